"""How a model is handed to DeepSpeed's ZeRO-3 (Rajbhandari et al. 2020): configuration and start.

From here on DeepSpeed gathers parameters before each module's forward and backward pass and
drops them after it, and reduces gradients; the step around that (grid, loss, clipping, AdamW,
checkpoints) is ours.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from typing import Any

import torch
from torch import nn

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training.optimizer import adamw, parameter_groups
from hybrid.training.world import Precision, World
from hybrid.training.zero import ZeroModel

EXTRA = "pip install 'hybrid[deepspeed]'"
_MOST = 500_000_000
"""Elements of a bucket, at most: DeepSpeed's own default."""


def partition(
    model: nn.Module, settings: TrainingConfig, precision: Precision, world: World
) -> ZeroModel:
    """Spread `model` by ZeRO-3, with the optimiser of `settings`. Collective.

    Args:
        model: whole, in float32, the same on all ranks; returning its loss (`loss.return_loss`).

    Raises:
        ConfigError: the package is not installed.
    """
    deepspeed = _load(world)
    config = engine_config(model, settings, precision, world)
    # Before it is partitioned: parameters then lose their shapes, and all would be without decay.
    groups = parameter_groups(model, settings)
    names = {id(p): name for name, p in model.named_parameters()}
    named = [[names[id(p)] for p in group["params"]] for group in groups]
    whole = {name: p.detach() for name, p in model.named_parameters()} if precision.mixed else {}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    # One parameter at a time to this rank's device, which never holds the model.
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    _move_buffers(model, world.device)
    # The loss takes the head's matrix from outside of its module.
    deepspeed.zero.register_external_parameter(model, head.weight)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(groups, settings), config=config)
    made = ZeroModel(engine, named)
    if whole:
        _set_masters(made, whole)
    return made


def engine_config(
    model: nn.Module, settings: TrainingConfig, precision: Precision, world: World
) -> dict[str, Any]:
    """DeepSpeed's configuration: what is reduced, gathered and kept is sized by the blocks."""
    blocks: Any = model.get_decoder().layers  # type: ignore[operator]
    block = sum(p.numel() for p in blocks[0].parameters())
    width: int = model.config.hidden_size  # type: ignore[union-attr, assignment]
    root = sum(p.numel() for p in model.parameters()) - block * len(blocks)
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": 1,  # each backward pass as it is: the loss has its weight
        "gradient_clipping": 0.0,
        "bf16": {"enabled": precision.mixed},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": world.device.type == "cuda",
            "reduce_bucket_size": min(block, _MOST),
            "stage3_prefetch_bucket_size": min(block, _MOST),
            "stage3_max_live_parameters": root + 3 * block,
            "stage3_max_reuse_distance": 0,  # dropped after forward, as fsdp does
            # Gains stay gathered: each is too small to be worth a collective.
            "stage3_param_persistence_threshold": 2 * width,
            "sub_group_size": 10**15,  # one flat master copy a group
        },
    }


def installed() -> bool:
    """Whether DeepSpeed can be imported here, without importing it."""
    return importlib.util.find_spec("deepspeed") is not None


def _load(world: World) -> Any:
    """The package, told about this process."""
    if not installed():
        raise ConfigError(
            f"training.strategy: 'deepspeed' needs the extra of that name: {EXTRA}, on every node"
            " (or use fsdp, which shards as much)",
            param="training.strategy",
        )
    kind = world.device.type
    os.environ["DS_ACCELERATOR"] = kind  # it would guess, and warn about that
    os.environ["LOCAL_RANK"] = str(world.device.index or 0)  # it computes on that device
    if kind == "cpu":
        os.environ["LOCAL_SIZE"] = str(world.size)  # else it asks numactl at every bucket
    import deepspeed

    # Of collectives that it calls by the names torch 2.13 is about to drop.
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if kind == "cpu":
        # An all-reduce of its inference, which it would compile now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@torch.no_grad()
def _set_masters(made: ZeroModel, whole: dict[str, torch.Tensor]) -> None:
    """In full precision: DeepSpeed made them of parameters rounded to the matmuls' dtype."""
    for name, piece in made.pieces():
        run = whole[name].flatten()[piece.start : piece.start + piece.flat.numel()]
        piece.flat.copy_(run)
