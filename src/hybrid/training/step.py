"""One optimiser step over a fixed grid of micro-batches: the same losses on any number of workers.

A step is `micro_batches` micro-batches whatever the world size. They are dealt whole to the ranks,
each is seeded by (seed, step, micro-batch), losses are summed over real tokens and divided by the
token count of all ranks. Only the order of additions depends on who computed what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hybrid.training.data import IGNORE, Batch
from hybrid.training.optimizer import clip_gradients
from hybrid.training.parallel import gradient_sync
from hybrid.training.position import Position
from hybrid.training.stragglers import OwnTime
from hybrid.training.traffic import reducing
from hybrid.training.world import World

BatchAt = Callable[[int], Batch]
"""Micro-batch by its index within the step (or within the held-out corpus)."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One of this rank's micro-batches: its loss summed over `tokens` real tokens (a scalar)."""

    index: int
    batch: Batch
    loss: torch.Tensor
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of all ranks: mean loss (nats a token), real tokens, gradient norm before clipping.

    Attributes:
        applied: whether the update was made.
        own_s: each rank's own time, see `stragglers`.
        micro_batches: this rank's.
    """

    loss: float
    tokens: int
    grad_norm: float
    applied: bool
    own_s: list[float]
    micro_batches: list[MicroBatch]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_at: BatchAt,
    *,
    step: int,
    seed: int,
    micro_batches: int,
    clip: float,
    world: World,
    accept: Callable[[float, float], bool] = lambda loss, grad_norm: True,
    position: Position | None = None,
    own_time: OwnTime | None = None,
) -> StepResult:
    """Forward, backward and update over the step's whole grid.

    Args:
        model: spread by `parallel.spread`, in training mode.
        step: counted from 0; with `seed` it decides all randomness.
        clip: the global L2 norm gradients are clipped to.
        accept: told the loss and the gradient norm of all ranks, whether the update is made; must
            answer the same on all of them. If not, parameters and optimiser state stay as they are.
        position: kept up to date, for a watchdog.
        own_time: made of the model before it was spread.
    """
    position = position or Position()
    own_time = own_time or OwnTime()
    position.at("data")
    with own_time.data():
        batches = [(index, batch) for index, batch in _dealt(batch_at, micro_batches, world)]
    position.at("token count")
    tokens = world.sum_data(float(sum(_real_tokens(batch) for _, batch in batches)))
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    done = []
    for n, (index, batch) in enumerate(batches):
        position.at(f"forward and backward of micro-batch {index}")
        torch.manual_seed(micro_batch_seed(seed, step, index))
        last = n == len(batches) - 1
        with gradient_sync(model, on=last), reducing():
            with own_time.forward(on=n == 0), position.within("forward"):
                loss_sum = _loss_sum(model, batch, world.device)
            # DDP and FSDP average gradients over data groups; times their number that is the sum.
            with position.within("backward and reduce" if last else "backward"):
                (loss_sum * (world.data_size / tokens)).backward()  # type: ignore[no-untyped-call]
        loss += loss_sum.detach()
        done.append(
            MicroBatch(index=index, batch=batch, loss=loss_sum.detach(), tokens=_real_tokens(batch))
        )
    position.at("gradient norm")
    norm = float(clip_gradients(model, clip))
    mine = [float(loss) if world.counts else 0.0, *([0.0] * world.size)]
    mine[1 + world.rank] = own_time.seconds()
    total, *own_s = world.sum_each(mine)
    position.at("update")
    applied = accept(total / tokens, norm)
    if applied:
        with position.within("optimizer"):
            optimizer.step()
    optimizer.zero_grad()
    return StepResult(
        loss=total / tokens,
        tokens=int(tokens),
        grad_norm=norm,
        applied=applied,
        own_s=own_s,
        micro_batches=done,
    )


@torch.no_grad()
def evaluate(model: nn.Module, batch_at: BatchAt, micro_batches: int, world: World) -> float:
    """Mean loss (nats a token) over the real tokens of `micro_batches` micro-batches.

    Each token weighs the same, so the result does not depend on how rows were dealt or padded.
    """
    model.eval()
    loss, tokens = 0.0, 0
    for _, batch in _dealt(batch_at, micro_batches, world):
        loss += float(_loss_sum(model, batch, world.device))
        tokens += _real_tokens(batch)
    model.train()
    return world.sum_data(loss) / world.sum_data(tokens)


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The generator's seed for one micro-batch: 63 bits, unrelated for neighbouring arguments."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _dealt(batch_at: BatchAt, count: int, world: World) -> Iterable[tuple[int, Batch]]:
    """This rank's micro-batches of `count`: every `data_size`-th one.

    All ranks get equally many, since forward and backward are collective: where `count` does not
    divide, the rest get micro-batch 0 again at zero weight (no position has a label).
    """
    for first in range(0, count, world.data_size):
        index = first + world.data_rank
        if index < count:
            yield index, batch_at(index)
        else:
            batch = batch_at(0)
            yield index, {**batch, "labels": np.full_like(batch["labels"], IGNORE)}


def _loss_sum(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Cross entropy summed over real tokens, in float32 or better: a scalar."""
    inputs = torch.from_numpy(batch["input_ids"]).to(device, non_blocking=True)
    labels = torch.from_numpy(batch["labels"]).to(device, non_blocking=True)
    more = {}
    if "position_ids" in batch:  # documents are isolated
        more["position_ids"] = torch.from_numpy(batch["position_ids"]).to(device, non_blocking=True)
    loss: torch.Tensor = model(input_ids=inputs, labels=labels, use_cache=False, **more)
    return loss


def _real_tokens(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE).sum())
