"""Adapters in PEFT's format for a base that transformers runs: by the names of its own modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hybrid.engine.lora import Adapter, Layout
from hybrid.engine.preflight import LoraSpec
from hybrid.errors import AdapterRefused

if TYPE_CHECKING:
    from hybrid.engine.fallback import FallbackDecoder

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Deltas = dict[str, tuple[Tensor, Tensor]]
"""By module: a [in, r] and b [r, out], the scaling folded into b."""


@dataclass(eq=False)
class ModuleAdapter(Adapter):
    """An adapter by module; its `row` is empty."""

    deltas: Deltas = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return sum(a.nbytes + b.nbytes for a, b in self.deltas.values())


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that can be adapted, by name."""
    from transformers.pytorch_utils import Conv1D

    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}


def load_module_adapter(
    folder: Path,
    decoder: FallbackDecoder,
    *,
    name: str,
    digest: str,
    base_digest: str,
    served_base: str,
) -> ModuleAdapter:
    """Read an adapter and check it against the base it is to run on; see `adapters.load_adapter`.

    Raises:
        AdapterRefused: another base, missing or truncated files, unsupported features, targets
            that match nothing, ranks or shapes that do not fit, NaN or infinity.
    """

    def refuse(why: str) -> AdapterRefused:
        return AdapterRefused(f"adapter {name} ({digest[:12]}): {why}", param="model")

    if base_digest != served_base:
        raise refuse(f"trained on base {base_digest}, served is {served_base}")
    for file in (_CONFIG, _WEIGHTS):
        if not (folder / file).exists():
            raise refuse(f"{file} is missing")
    # GPT-2's layers lie the other way; LoRA's own matrices do not.
    spec = LoraSpec.read(folder / _CONFIG, refuse, fan_in_fan_out=True)
    if spec.saved or spec.biases:
        raise refuse("modules_to_save and bias are not supported on this base")
    try:
        state = load_file(folder / _WEIGHTS)
    # Also what its own reader and torch raise at headers that are well-formed but wrong.
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as e:
        raise refuse(f"{_WEIGHTS} cannot be read: {e}") from None

    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _KEY.fullmatch(key)
        if match is None or match[1] not in decoder.linears:
            raise refuse(f"weight {key} matches nothing in the base: no linear layer of that name")
        if not torch.isfinite(tensor).all():
            raise refuse(f"weight {key} holds NaN or infinity")
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise refuse("it holds no LoRA weights")

    deltas: Deltas = {}
    for at, pair in halves.items():
        if pair.keys() != {"A", "B"}:
            raise refuse(f"{at} has only lora_{next(iter(pair))}")
        a, b = pair["A"], pair["B"]
        n_in, n_out = _sizes(decoder.linears[at])
        rank = spec.rank_of(at)
        if tuple(a.shape) != (rank, n_in) or tuple(b.shape) != (n_out, rank):
            raise refuse(
                f"{at}: A {tuple(a.shape)} and B {tuple(b.shape)}, expected"
                f" {(rank, n_in)} and {(n_out, rank)}"
            )
        deltas[at] = (
            a.t().to(decoder.device, decoder.dtype).contiguous(),
            (b.t().float() * spec.scaling_of(at)).to(decoder.device, decoder.dtype).contiguous(),
        )
    nothing = torch.empty(0, dtype=decoder.dtype, device=decoder.device)
    layout = Layout.of(decoder.shape, 0, frozenset())
    return ModuleAdapter(digest=digest, layout=layout, row=nothing, deltas=deltas)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(in, out); GPT-2's Conv1D is a linear layer whose weight lies the other way."""
    first, second = (int(n) for n in getattr(module, "weight").shape)  # noqa: B009
    return (second, first) if isinstance(module, nn.Linear) else (first, second)
