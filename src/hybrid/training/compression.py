"""What gradients cost on the wire, and the kinds of compression that make it less.

`bf16` halves it: under DDP by a communication hook, under FSDP2 as the dtype that is reduced in
(its all-reduce hook would run after HSDP's own all-reduce and save nothing). `powersgd` and
`onebit` are hooks of DDP, with error feedback: what one step leaves out is added to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hybrid.config import CompressionConfig, Strategy
from hybrid.errors import ConfigError
from hybrid.sections_training import compression_refusal
from hybrid.training.onebit import OneBit
from hybrid.training.powersgd import PowerSGD
from hybrid.training.traffic import EXCHANGES, REDUCTIONS, Collective, counted

_COUNTED_STEPS = 3
"""Steps counted in each phase, of which the last holds: DDP groups its buckets anew after a run's
first one, and in the second `onebit` brings what is left out into that order."""


def reduce_dtype(settings: CompressionConfig, usual: torch.dtype) -> torch.dtype:
    """The dtype that a sharded strategy reduces gradients in."""
    return torch.bfloat16 if settings.kind == "bf16" else usual


class Compression:
    """The reduction of one run's gradients: its hook, its bytes, and its state in a checkpoint.

    Args:
        model: spread over the workers.
        strategy: the one it was spread by, not `auto`.

    Raises:
        ConfigError: this kind cannot work with this strategy; says why.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, settings: CompressionConfig) -> None:
        refusal = compression_refusal(strategy, settings.kind)
        if refusal is not None:
            key = "training.compression.kind"
            raise ConfigError(f"{key}: {refusal}", param=key)
        self.settings = settings
        self.active = False
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = parameters[0].device
        self._itemsize = parameters[0].element_size()
        self._elements = sum(p.numel() for p in parameters)
        self._found: dict[bool, list[Collective]] = {}
        self._left = {True: _COUNTED_STEPS, False: _COUNTED_STEPS}
        self._ddp = isinstance(model, DistributedDataParallel)
        self._method: PowerSGD | OneBit | None = None
        if settings.kind == "powersgd":
            self._method = PowerSGD(settings.rank)
        elif settings.kind == "onebit":
            self._method = OneBit()
        if isinstance(model, DistributedDataParallel) and settings.kind != "none":
            self._names = {id(p): name for name, p in model.module.named_parameters()}
            self._stream: torch.cuda.Stream | None = None
            if self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # torch would look at the annotations of a function, and they are strings here.
            model.register_comm_hook(None, lambda _, bucket: self._hook(bucket))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one optimiser step, `step` counted from 0 over the whole run."""
        warming = self._method is not None and step < self.settings.warm_start_steps
        self.active = self.settings.kind != "none" and not warming
        if not (dist.is_initialized() and self._left[self.active]):
            yield
            return
        self._left[self.active] -= 1
        with counted() as found:
            yield
        self._found[self.active] = found

    def figures(self) -> dict[str, float]:
        """Of a step: comm_bytes (what a rank sends in all, on average), gradient_bytes (of these,
        for gradients), compression_ratio (uncompressed gradients over these; absent where there
        is no compression or nothing to send).

        They are counted in three steps of each phase and hold for the others, which send the same.
        """
        found = self._found.get(self.active, [])
        kinds = EXCHANGES if self._ddp else REDUCTIONS  # else all-gathers are of parameters
        of_gradients = [c for c in found if c.gradients and c.kind in kinds]
        compressed = sum(c.bytes for c in of_gradients)
        if self._ddp:
            size = dist.get_world_size()
            plain = 2 * (size - 1) / size * self._elements * self._itemsize
        else:
            plain = sum(c.sent for c in of_gradients) * self._itemsize
        ratio = {"compression_ratio": round(plain / compressed, 2)} if compressed else {}
        return {
            "comm_bytes": round(sum(c.bytes for c in found)),
            "gradient_bytes": round(compressed),
            **(ratio if self.settings.kind != "none" else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Error feedback, the same on all ranks: what the mean gradient still lacks. Collective.

        Each rank goes on with that as well, so a run that is taken up here does what one that was
        never interrupted does; `onebit` up to which elements share a scale, as a new process groups
        DDP's buckets anew.
        """
        if self._method is None:
            return {}
        self._method.fold()
        return self._method.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up error feedback, on as many ranks as wrote it or others."""
        if self._method is not None:
            self._method.load_state_dict(state, self._device)

    def _hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self.active:
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
        if self._method is None:
            return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
        # One bucket after the other, so that all ranks issue their collectives in one order; on a
        # GPU on a stream beside that of the backward pass, which goes on meanwhile.
        buffer = bucket.buffer()
        named = [
            (self._names[id(p)], g)
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        future: torch.futures.Future[torch.Tensor]
        if self._stream is None:
            future = torch.futures.Future()
            self._method.reduce(named)
            future.set_result(buffer)
            return future
        future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._method.reduce(named)
            future.set_result(buffer)
        return future
