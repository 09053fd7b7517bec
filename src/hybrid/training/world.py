"""This process among the workers of one run: ranks, nodes, device, small collectives, precision."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hybrid.errors import ConfigError


def this_node() -> str:
    """What tells this machine from the run's others.

    Ray Train and torchrun number the nodes of a run (NODE_RANK, GROUP_RANK); else the host's name.
    """
    for name in ("NODE_RANK", "GROUP_RANK"):
        if (number := os.environ.get(name)) is not None:
            return f"node {number}"
    return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the workers of one run: its rank, their number, its device.

    With `tensor` > 1 that many neighbouring ranks share each matrix and compute the same
    micro-batches; data is dealt to such groups, of which there are `data_size`.
    """

    rank: int
    size: int
    device: torch.device
    tensor: int = 1
    node: str = field(default_factory=this_node)

    @classmethod
    def current(cls, tensor: int = 1) -> World:
        """The initialised process group, or one process alone; the current GPU if there is one.

        Raises:
            ConfigError: `tensor` does not divide the number of ranks.
        """
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        rank, size = 0, 1
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        if size % tensor:
            raise ConfigError(
                f"training.parallel.tensor: {tensor} does not divide the {size} workers",
                param="training.parallel.tensor",
            )
        return cls(rank=rank, size=size, device=device, tensor=tensor)

    @property
    def data_rank(self) -> int:
        """The number of this rank's group among those that data is dealt to."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """Groups that data is dealt to: all ranks, but for tensor parallelism."""
        return self.size // self.tensor

    @property
    def counts(self) -> bool:
        """Whether this rank is the one of its group that is counted."""
        return self.rank % self.tensor == 0

    def sum(self, value: float) -> float:
        """The sum of one float64 number over all ranks."""
        return self.sum_each([value])[0]

    def sum_data(self, value: float) -> float:
        """The sum of one float64 number over the groups that data is dealt to."""
        return self.sum(value if self.counts else 0.0)

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

    @property
    def mixed(self) -> bool:
        """Whether matmuls run in another dtype than the parameters are kept in."""
        return self.compute != self.params
