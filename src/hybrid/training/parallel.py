"""How a model is spread over workers: process group, device, FSDP2, DDP or single, precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hybrid.config import Strategy
from hybrid.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the workers of one run: its rank, their number, its device."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def current(cls) -> World:
        """The initialised process group, or one process alone; the current GPU if there is one."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if dist.is_initialized():
            return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
        return cls(rank=0, size=1, device=device)

    def sum(self, value: float) -> float:
        """The sum of one float64 number over all ranks."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def sum_each(self, values: Sequence[float]) -> list[float]:
        """Float64 numbers, as many on every rank, each summed over all ranks."""
        totals = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(totals)
        return [float(total) for total in totals]

    def agree(self, value: bool) -> bool:
        """What rank 0 says: clocks differ, and what ranks do together must not hang on them."""
        if self.size == 1:
            return value
        said = torch.tensor(int(value))
        dist.broadcast(said, 0)
        return bool(said)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in order of rank, on every rank. Also a barrier."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


def backend(gpu: bool) -> str:
    """The process group's backend: numbers and objects travel over gloo, gradients over NCCL."""
    return "cpu:gloo,cuda:nccl" if gpu else "gloo"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """dtype of the parameters, gradients and optimiser state, and dtype of the matmuls."""

    params: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, name: str, device: torch.device) -> Precision:
        """Resolve `training.precision`: `auto` is bfloat16 compute on a GPU that has it."""
        if name == "float64":
            return cls(params=torch.float64, compute=torch.float64)
        if name == "auto":
            gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bfloat16" if gpu else "float32"
        compute = torch.bfloat16 if name == "bfloat16" else torch.float32
        return cls(params=torch.float32, compute=compute)


def spread(model: nn.Module, strategy: Strategy, precision: Precision, world: World) -> nn.Module:
    """Move `model` to this rank's device and spread it.

    `fsdp` shards parameters, gradients and optimiser state (ZeRO stage 3, Rajbhandari et al. 2020)
    through FSDP2, one unit a transformer block and one for the rest; reduction is in the
    parameters' dtype. `ddp` keeps a copy on each rank.

    Raises:
        ConfigError: `single` with several workers, or a spread strategy without a process group.
    """
    if strategy == "single" and world.size > 1:
        raise ConfigError(
            f"training.strategy 'single' is for one worker; training.workers is {world.size}"
        )
    if strategy != "single" and not dist.is_initialized():
        raise ConfigError(f"training.strategy {strategy!r} needs a process group: use 'single'")
    model = model.to(device=world.device, dtype=precision.params)
    if precision.params == torch.float64:
        _exact_norms(model)
    mixed = precision.compute != precision.params
    if strategy == "fsdp":
        mesh = init_device_mesh(world.device.type, (world.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute if mixed else None,
            reduce_dtype=precision.params if mixed else None,
        )
        for block in model.get_decoder().layers:  # type: ignore[operator]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if mixed:
        autocast = torch.autocast(world.device.type, dtype=precision.compute)
        model.forward = autocast(model.forward)
    if strategy == "ddp":
        return DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    return model


def _exact_norms(model: nn.Module) -> None:
    """Have RMS norms computed in float64.

    transformers' round to float32 in between, whatever the dtype: then a sum taken in another
    order, as another world size takes it, is not 1e-16 but 1e-8 off after a few steps.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm: Any = module
            norm.forward = partial(_rms_norm, norm)


def _rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


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
    yield
