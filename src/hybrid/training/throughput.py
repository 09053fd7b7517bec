"""How fast training goes against what the hardware can do: tokens/s, MFU, memory, time left."""

from __future__ import annotations

import resource
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.training.parallel import Precision

# Dense bfloat16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets, by a part of the name.
BF16_SHEETS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What one device's matrix products reach, measured, and what its data sheet promises.

    Attributes:
        flops: FLOP/s, measured here and now.
        source: how.
        sheet: FLOP/s of the data sheet, where we know it.
    """

    flops: float
    source: str
    sheet: float | None


def device_peak(device: torch.device, precision: Precision) -> Peak:
    """Measure the device's matmul peak in the compute dtype: the best of a few square products.

    On random numbers: a GPU multiplies constants faster than anything it will meet in training.
    """
    cuda = device.type == "cuda"
    size, at_once = (8192, 8) if cuda else (1024, 1)
    a = torch.randn(size, size, device=device).to(precision.compute)
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(10):  # the first warms up; the best is the one nobody disturbed
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(at_once):
            torch.mm(a, a, out=out)
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / at_once)
    return Peak(
        flops=2 * size**3 / best,
        source=f"measured: {size}x{size} matmul, {precision.compute}, {device.type},"
        f" {torch.get_num_threads()} threads",
        sheet=_sheet(device) if cuda and precision.compute == torch.bfloat16 else None,
    )


def _sheet(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in BF16_SHEETS.items() if part in name), None)


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """FLOPs a token that training needs, recomputation not counted.

    Six a parameter that takes part in a matrix product (Kaplan et al. 2020), and attention's
    12 x layers x width x sequence length (Chowdhery et al. 2022, appendix B). An embedding that is
    not also the head is looked up, not multiplied.

    Args:
        model: a causal LM before it is spread.
    """
    config: Any = model.config
    parameters = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        parameters -= model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return float(6 * parameters + attention)


class Meter:
    """Rates over the last steps; MFU is against the measured peak of all devices together.

    Args:
        flops_per_token: see `flops_per_token`.
        peak_flops: FLOP/s of all devices of the run.
    """

    def __init__(self, flops_per_token: float, peak_flops: float, device: torch.device) -> None:
        self._flops_per_token = flops_per_token
        self._peak = peak_flops
        self._device = device
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)

    def step(self, tokens: int, seconds: float, steps_left: int) -> dict[str, Any]:
        """Count one step; returns tokens_per_s, mfu (0..1), memory_bytes, eta_s."""
        self._recent.append((tokens, seconds))
        total_tokens = sum(t for t, _ in self._recent)
        total_seconds = sum(s for _, s in self._recent)
        rate = total_tokens / total_seconds
        return {
            "tokens_per_s": round(rate, 1),
            "mfu": round(rate * self._flops_per_token / self._peak, 4),
            "memory_bytes": self._memory(),
            "eta_s": round(total_seconds / len(self._recent) * steps_left, 1),
        }

    def _memory(self) -> int:
        """Peak bytes so far: of this GPU's allocator, or of this process where there is none."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
