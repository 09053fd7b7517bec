"""Transformer blocks one by one: recomputed in the backward pass, compiled.

Only a block's `forward` is wrapped, so names in the state dict stay what they are and FSDP's hooks
stay outside: a block's parameters are gathered once for the recomputation and its backward.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hybrid.config import ParallelConfig
from hybrid.errors import ConfigError
from hybrid.training.rules import CPU_COMPILERS

_aten = torch.ops.aten
SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""Operators whose results `selective` keeps: matrix products and fused attention, which is two."""


def wrap_blocks(model: Any, parallel: ParallelConfig, device: torch.device) -> None:
    """Recompute and compile each block as `parallel` says.

    `activation_checkpointing: full` keeps a block's input only for the backward pass and computes
    the rest again (Chen et al. 2016); `selective` also keeps what is dear to compute, the results
    of matrix products (as Korthikanti et al. 2022 choose). Equal blocks share one compilation.

    Raises:
        ConfigError: to compile on a CPU takes a C++ compiler, and there is none.
    """
    mode = parallel.activation_checkpointing
    blocks = list(model.get_decoder().layers)
    run = _recomputed(mode) if mode != "none" else _plain
    if parallel.compile:
        if device.type == "cpu" and not any(map(shutil.which, CPU_COMPILERS)):
            raise ConfigError(
                "training.parallel.compile needs a C++ compiler (g++ or clang++) on every node:"
                " install one, or switch it off",
                param="training.parallel.compile",
            )
        # One function that is given the block: compiled per bound method, each block would be
        # compiled anew, and those past dynamo's limit would silently not be.
        run = torch.compile(run, dynamic=False)
    elif mode == "none":
        return
    for block in blocks:
        block.forward = partial(run, type(block).forward, block)


def _plain(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(block, *args, **kwargs)


def _recomputed(mode: str) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def run(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, block, *args, **options, **kwargs)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in SAVED
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
