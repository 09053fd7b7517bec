"""How fast training goes against what the hardware can do: tokens/s, MFU, memory, time left."""

from __future__ import annotations

import resource
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.training.parallel import Precision

# Dense bfloat16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets, by a part of the name.
BF16_PEAKS = {
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
    """FLOP/s of one device, and where the number comes from."""

    flops: float
    source: str


def device_peak(device: torch.device, precision: Precision) -> Peak:
    """The data sheet's peak where we know it, else what a square matmul reaches here and now."""
    if device.type == "cuda" and precision.compute == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, flops in BF16_PEAKS.items():
            if part in name:
                return Peak(flops=flops, source=f"data sheet of {part}, dense bfloat16")
    size = 4096 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=precision.compute)
    best = float("inf")
    for _ in range(12):  # the first warms up; the best is the one nobody disturbed
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return Peak(
        flops=2 * size**3 / best,
        source=f"measured: {size}x{size} matmul, {precision.compute}, {device.type},"
        f" {torch.get_num_threads()} threads",
    )


class Meter:
    """Rates over the last steps. MFU counts 6 FLOPs a parameter and token (Kaplan et al. 2020)."""

    def __init__(self, parameters: int, peak: Peak, world_size: int, device: torch.device) -> None:
        self._flops_per_token = 6 * parameters
        self._peak = peak.flops * world_size
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
