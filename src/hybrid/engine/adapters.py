"""Loading an adapter in PEFT's format, after a strict preflight: it fits, or it is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid.engine.lora import Adapter, Layout
from hybrid.engine.model import Decoder
from hybrid.engine.variants import refuse_variants
from hybrid.errors import AdapterRefused

_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)


def load_adapter(
    folder: Path, decoder: Decoder, *, name: str, digest: str, base_digest: str, served_base: str
) -> Adapter:
    """Read an adapter and check it against the base it is to run on.

    Args:
        folder: adapter_config.json and adapter_model.safetensors.
        base_digest: of the base the adapter was trained on.
        served_base: of the base it would run on.

    Raises:
        AdapterRefused: another base, missing or truncated files, unsupported features, targets
            that match nothing, ranks or shapes that do not fit, NaN or infinity.
    """

    def refuse(why: str) -> AdapterRefused:
        return AdapterRefused(f"adapter {name} ({digest[:12]}): {why}", param="model")

    if base_digest != served_base:
        raise refuse(f"trained on base {base_digest}, served is {served_base}")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).exists():
            raise refuse(f"{file} is missing")
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
        state = load_file(folder / "adapter_model.safetensors")
    except (SafetensorError, ValueError, OSError) as e:
        raise refuse(f"cannot be read: {e}") from None
    _check_features(config, refuse)

    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise refuse(f"weight {key} matches nothing in the base")
        if not torch.isfinite(tensor).all():
            raise refuse(f"weight {key} holds NaN or infinity")
        halves.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    if not halves:
        raise refuse("it holds no LoRA weights")

    shape = decoder.shape
    projections = shape.projections()
    found: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for (layer, module), pair in sorted(halves.items()):
        at = f"layers.{layer}.{module}"
        if module not in projections or layer >= shape.layers:
            raise refuse(f"target {at} matches nothing in the base")
        if pair.keys() != {"A", "B"}:
            raise refuse(f"{at} has only lora_{next(iter(pair))}")
        n_in, n_out, _, _ = projections[module]
        a, b = pair["A"], pair["B"]
        rank = _pattern(config, "rank_pattern", layer, module, config["r"])
        if tuple(a.shape) != (rank, n_in) or tuple(b.shape) != (n_out, rank):
            raise refuse(
                f"{at}: A {tuple(a.shape)} and B {tuple(b.shape)}, expected"
                f" {(rank, n_in)} and {(n_out, rank)}"
            )
        if module in ("q_proj", "k_proj"):
            b = b[shape.paired(n_out // shape.head_dim)]
        alpha = _pattern(config, "alpha_pattern", layer, module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found[layer, module] = a.t(), b.t().float() * scaling
    layout = Layout.of(shape, max(a.shape[1] for a, _ in found.values()), frozenset(found))
    row = torch.zeros(layout.size, dtype=decoder.dtype, device=decoder.device)
    for (layer, module), (a, b) in found.items():
        layout.write(row, layer, module, a, b)
    return Adapter(digest=digest, layout=layout, row=row)


def _check_features(config: dict[str, Any], refuse: Any) -> None:
    refuse_variants(config, refuse, but=("bias", "modules_to_save", "trainable_token_indices"))
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise refuse(f"peft_type is {config.get('peft_type')!r}, only LORA is served")
    if not isinstance(config.get("r"), int) or config["r"] < 1:
        raise refuse(f"rank r={config.get('r')!r} is not a positive whole number")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise refuse(f"lora_alpha={config.get('lora_alpha')!r} is not a number")
    if config.get("bias", "none") != "none":
        raise refuse(f"bias={config['bias']!r} is not supported")
    for feature in ("use_dora", "modules_to_save", "fan_in_fan_out", "trainable_token_indices"):
        if config.get(feature):
            raise refuse(f"{feature}={config[feature]!r} is not supported")


def _pattern(config: dict[str, Any], field: str, layer: int, module: str, default: Any) -> Any:
    """PEFT's per-module override: a pattern is a regular expression matched at a name's end."""
    full = f"model.layers.{layer}.{'mlp' if module[0] in 'gud' else 'self_attn'}.{module}"
    for pattern, value in (config.get(field) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", full):
            return value
    return default
