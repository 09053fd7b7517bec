"""Variants of LoRA: what in PEFT's configuration changes what an adapter computes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "use_rslora",
}  # fmt: skip
"""Fields that are read, or that only tell how an adapter was trained."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def refuse_variants(
    config: dict[str, Any], refuse: Callable[[str], Exception], but: Collection[str] = ()
) -> None:
    """Refuse what is not known to be harmless: a field of a later PEFT may mean anything.

    Args:
        config: adapter_config.json.
        refuse: makes the error.
        but: fields that the caller judges itself.
    """
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:  # PiSSA and its like take from the base what they begin with
        raise refuse(f"init_lora_weights={start!r} is not supported: it changes the base's weights")
    for field, value in sorted(config.items()):
        if field == "bias" and value == "none":
            continue
        if value and field not in _HARMLESS and field not in but:
            raise refuse(f"{field}={value!r} is not supported")
