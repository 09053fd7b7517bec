"""Which strategies make sense where: refusals that name the key, before anything is spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError

SHARDED = ("fsdp", "hsdp", "tp")
"""Strategies of FSDP2."""
TENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s that `tensor.share_matrices` is right for."""

CPU_COMPILERS, GPU_COMPILERS = ("c++", "g++", "clang++"), ("cc", "gcc", "clang")
"""torch.compile writes C++ for a CPU; for a GPU Triton compiles a little C around each kernel."""


def check_strategy(settings: TrainingConfig, model: Any, nodes: Sequence[str]) -> None:
    """Refuse a strategy, or details of it, that cannot run on these workers with this model.

    Args:
        model: the transformers configuration.
        nodes: the node of each worker, in order of rank.

    Raises:
        ConfigError: says which key, and what would do.
    """
    strategy, parallel, size = settings.strategy, settings.parallel, len(nodes)
    if strategy == "auto":
        _refuse("strategy", "'auto' is no strategy of workers: trials choose one before")
    if strategy == "single" and size > 1:
        _refuse("strategy", f"'single' is for one worker; training.workers is {size}")
    if strategy not in SHARDED and not parallel.reshard:
        _refuse("parallel.reshard", f"there is nothing to keep gathered under {strategy!r}")
    if strategy not in SHARDED and parallel.offload:
        _refuse("parallel.offload", f"{strategy!r} keeps all on the GPU: use fsdp")
    if strategy != "hsdp" and parallel.shard is not None:
        _refuse("parallel.shard", f"is for 'hsdp', not {strategy!r}")
    if strategy != "tp" and parallel.tensor > 1:
        _refuse("parallel.tensor", f"is for 'tp', not {strategy!r}")
    if strategy == "hsdp":
        shard_size(settings, nodes)
    if strategy == "tp":
        _check_tensor(parallel.tensor, model, nodes)


def _check_tensor(tensor: int, model: Any, nodes: Sequence[str]) -> None:
    key = "parallel.tensor"
    if tensor < 2:
        _refuse(key, "'tp' shares each matrix among 2 ranks or more")
    if len(nodes) % tensor:
        _refuse(key, f"{tensor} does not divide the {len(nodes)} workers")
    if model.model_type not in TENSOR_FAMILIES:
        _refuse(
            "strategy",
            f"'tp' knows how to cut {', '.join(TENSOR_FAMILIES)}, not {model.model_type}: use fsdp",
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(model, what)) % tensor:
            _refuse(key, f"{tensor} does not divide the model's {heads} {what}")
    if model.attention_dropout > 0:
        _refuse(
            "strategy",
            f"under 'tp' the model's attention_dropout ({model.attention_dropout:g}) would be drawn"
            " otherwise than on one worker: set it to 0 in its config.json, or use fsdp",
        )


def shard_size(settings: TrainingConfig, nodes: Sequence[str]) -> int:
    """hsdp: ranks that share one copy of the model; by default those of one node.

    Raises:
        ConfigError: nodes have unequal numbers of workers, or the number does not divide.
    """
    shard = settings.parallel.shard
    if shard is None:
        counts = {node: list(nodes).count(node) for node in nodes}
        if len(set(counts.values())) > 1:
            _refuse(
                "parallel.shard",
                f"nodes have unequal numbers of workers ({counts}): set it, or use fsdp",
            )
        return counts[nodes[0]]
    if len(nodes) % shard:
        _refuse("parallel.shard", f"{shard} does not divide the {len(nodes)} workers")
    return shard


def _refuse(key: str, why: str) -> NoReturn:
    raise ConfigError(f"training.{key}: {why}", param=f"training.{key}")
