"""How a model is spread over workers: DDP, FSDP2, HSDP, tensor parallel by FSDP, ZeRO-3, or one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training.blocks import wrap_blocks
from hybrid.training.compression import reduce_dtype
from hybrid.training.loss import return_loss
from hybrid.training.norms import set_norms
from hybrid.training.rules import SHARDED, check_strategy, shard_size
from hybrid.training.tensor import share_matrices
from hybrid.training.world import Precision, World, backend
from hybrid.training.zero_setup import partition

__all__ = ["Precision", "World", "backend", "gradient_sync", "spread"]

log = logging.getLogger(__name__)

KEEPS_GATHERED = "keeps_gathered"
"""An attribute of a root module: parameters stay gathered from forward to backward."""


def spread(
    model: nn.Module, settings: TrainingConfig, precision: Precision, world: World
) -> nn.Module:
    """Move `model` to this rank's device and spread it, as `settings.strategy` and `.parallel` say.

    - `ddp` keeps a copy on each rank and reduces gradients in buckets behind the backward pass (Li
      et al. 2020).
    - `fsdp` shards parameters, gradients and optimiser state (ZeRO stage 3, Rajbhandari et al.
      2020; Zhao et al. 2023) through FSDP2, one unit a transformer block and one for the rest.
    - `hsdp` does so within a node and keeps a copy on each.
    - `tp` shares each matrix among neighbouring ranks (Shoeybi et al. 2019); the other dimension
      of the mesh is fsdp.
    - `deepspeed` is ZeRO stage 3 by that package.

    The next block's parameters are gathered while one computes. Matrix products run in
    `precision.compute`; the optimiser and, unless compression says otherwise, reduction in
    `precision.params`.

    Returns:
        What `train_step` takes: called with input_ids and labels it gives the loss summed over
        labels (see `loss.return_loss`). Its state dict has the model's own names.

    Raises:
        ConfigError: settings that make no sense together, for this model or on these workers.
    """
    strategy, nodes = settings.strategy, world.gather(world.node)
    check_strategy(settings, model.config, nodes)
    if strategy != "single" and not dist.is_initialized():
        raise ConfigError(
            f"training.strategy: {strategy!r} needs a process group: use 'single'",
            param="training.strategy",
        )
    if strategy not in (*SHARDED, "deepspeed"):
        model = model.to(device=world.device)  # those move it block by block
    model = model.to(dtype=precision.params)
    return_loss(model)
    exact = precision.params == torch.float64
    if strategy == "tp":
        mesh = init_device_mesh(
            world.device.type, (world.data_size, world.tensor), mesh_dim_names=("shard", "tensor")
        )
        share_matrices(model, mesh["tensor"])
        set_norms(model, exact=exact, mesh=mesh["tensor"])
        mesh = mesh["shard"]
    elif strategy == "hsdp":
        mesh = _mesh_of_nodes(world, nodes, shard_size(settings, nodes))
    elif strategy == "fsdp":
        mesh = init_device_mesh(world.device.type, (world.size,))
    if strategy != "tp":
        set_norms(model, exact=exact)
    wrap_blocks(model, settings.parallel, world.device)
    if strategy == "deepspeed":
        return partition(model, settings, precision, world)
    if strategy in SHARDED:
        _shard(model, settings, precision, mesh)
        return model
    if precision.mixed:
        model.forward = torch.autocast(world.device.type, dtype=precision.compute)(model.forward)
    if strategy == "ddp":
        return DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    return model


def _shard(
    model: nn.Module, settings: TrainingConfig, precision: Precision, mesh: DeviceMesh
) -> None:
    """FSDP2 over `mesh`, and what is gathered ahead of use."""
    parallel = settings.parallel
    if parallel.offload and mesh.device_type == "cpu":
        log.warning(
            "training.parallel.offload: there is no GPU; all is in the host's memory anyway"
        )
    kind: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=precision.compute if precision.mixed else None,
            reduce_dtype=reduce_dtype(settings.compression, precision.params),
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if parallel.offload
        else OffloadPolicy(),
    }
    blocks = list(model.get_decoder().layers)  # type: ignore[operator]
    for block in blocks:
        fully_shard(block, reshard_after_forward=parallel.reshard, **kind)
    root: Any = fully_shard(model, reshard_after_forward=False, **kind)
    setattr(root, KEEPS_GATHERED, not parallel.reshard)
    units: list[Any] = [root, *blocks]
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    if parallel.reshard:  # else they are still there
        for unit, previous in zip(units[:1] + units[:1:-1], units[:0:-1], strict=False):
            unit.set_modules_to_backward_prefetch([previous])


def _mesh_of_nodes(world: World, nodes: list[str], shard: int) -> DeviceMesh:
    """Copies by ranks of a copy: the ranks of a copy are neighbours on their nodes."""
    order = sorted(range(world.size), key=lambda rank: (nodes[rank], rank))
    return DeviceMesh(
        world.device.type,
        torch.tensor(order).view(world.size // shard, shard),
        mesh_dim_names=("replicate", "shard"),
    )


@contextmanager
def gradient_sync(model: nn.Module, on: bool) -> Iterator[None]:
    """Whether the backward pass within reduces gradients over ranks, or only accumulates them.

    Reducing once a step is the cheapest in traffic; FSDP then holds unsharded gradients until the
    step's last micro-batch.
    """
    if isinstance(model, DistributedDataParallel) and not on:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
        model.set_is_last_backward(on)
        if getattr(model, KEEPS_GATHERED):  # between micro-batches too: gathered once a step
            model.set_reshard_after_backward(on)
    yield
