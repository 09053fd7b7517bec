"""The training of one adapter, top to bottom, on one rank or many; it imports no Ray.

A step is a fixed grid of micro-batches dealt whole to the ranks, each seeded by (seed, step,
micro-batch). The trained parameters are on every rank in full, and so are the gradients once they
are summed: what rank 0 saves is the whole adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.config import LoraConfig
from hybrid.errors import TrainingError
from hybrid.training.adapter_batches import Batches
from hybrid.training.adapter_state import AdapterState, Best, load_state
from hybrid.training.parallel import World
from hybrid.training.step import micro_batch_seed

Report = Callable[[dict[str, Any]], None]
_WARMUP = 0.05
_EVERY = 10
"""Steps between reports."""


@dataclass(frozen=True)
class Trained:
    """train_loss: mean of the last tenth of the steps (nats). best: of the validation rows."""

    steps: int
    train_loss: float
    best: Best | None
    resumed_from: int


def train_loop(
    loss: nn.Module,
    parameters: dict[str, nn.Parameter],
    lora: LoraConfig,
    batches: Batches,
    validation: Batches | None,
    folder: Path,
    *,
    seed: int,
    world: World,
    report: Report,
) -> Trained:
    """Train `parameters` to the last step or until early stopping; they end as they are saved.

    Args:
        loss: `loss(micro_batch)` is a sum, `micro_batch.count` what to divide it by.
        parameters: the trained ones by name, on every rank in full.
        validation: rows for early stopping.
        folder: of the small checkpoint, seen by every rank.
        report: called on rank 0 with `{"step", "steps", "loss"}`, and `{"message"}`.

    Raises:
        TrainingError: a loss is not finite. OSError: the checkpoint cannot be written.
    """
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=lora.lr, weight_decay=lora.weight_decay, betas=(0.9, 0.99)
    )
    state, why = load_state(folder, world.device)
    if why and world.rank == 0:
        report({"message": why})
    resumed_from = state.step
    if state.step:
        _put(parameters, state.weights)
        optimizer.load_state_dict(state.optimizer)
    early = lora.early_stopping
    loss.train()
    while state.step < lora.steps and not _stopped(state, lora):
        step = state.step
        for group in optimizer.param_groups:
            group["lr"] = lora.lr * _schedule(step, lora.steps)
        mean = _step(loss, parameters, optimizer, batches.at(step), seed, step, world)
        if not math.isfinite(mean):
            raise TrainingError(f"step {step + 1}: loss is {mean}; lower lora.lr ({lora.lr})")
        state.step += 1
        state.losses.append(mean)
        last = state.step == lora.steps
        if validation and early and (state.step % early.every == 0 or last):
            value = evaluate(loss, validation.all(), world)
            _look(state, value, parameters)
            if world.rank == 0:
                report({"step": state.step, "steps": lora.steps, "validation_loss": value})
        ends = last or _stopped(state, lora)
        if world.rank == 0 and (state.step % _EVERY == 0 or ends):
            recent = state.losses[-_EVERY:]
            shown = sum(recent) / len(recent)
            report({"step": state.step, "steps": lora.steps, "loss": shown})
        if world.rank == 0 and (state.step % lora.checkpoint_every == 0 or ends):
            state.weights = _taken(parameters)
            state.optimizer = optimizer.state_dict()
            state.save(folder)
    if state.best:
        _put(parameters, state.best.weights)
    tail = state.losses[-max(1, lora.steps // 10) :]
    return Trained(state.step, sum(tail) / len(tail), state.best, resumed_from)


def _step(
    loss: nn.Module,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    grid: Sequence[Any],
    seed: int,
    step: int,
    world: World,
) -> float:
    """Forward, backward and update; the mean loss of the whole grid, the same on every rank."""
    count: int = sum(batch.count for batch in grid)
    total = 0.0
    for index, batch, weight in _dealt(grid, world):
        torch.manual_seed(micro_batch_seed(seed, step, index))
        value = loss(batch) * weight
        (value / count).backward()
        total += float(value.detach())
    if world.size > 1:
        _sum_gradients(list(parameters.values()))
    nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return world.sum(total) / count


@torch.no_grad()
def evaluate(loss: nn.Module, grid: Sequence[Any], world: World) -> float:
    """Mean loss over all micro-batches, without dropout; the same on every rank."""
    loss.eval()
    total = sum(float(loss(batch)) * weight for _, batch, weight in _dealt(grid, world))
    loss.train()
    count: int = sum(batch.count for batch in grid)
    return world.sum(total) / count


def _dealt(grid: Sequence[Any], world: World) -> list[tuple[int, Any, float]]:
    """(index, micro-batch, weight) of this rank's. All ranks get equally many, because forward and
    backward gather the base together: who has none left computes the first again, at weight 0."""
    rounds = -(-len(grid) // world.size)
    indices = [world.rank + i * world.size for i in range(rounds)]
    return [(i, grid[i], 1.0) if i < len(grid) else (i, grid[0], 0.0) for i in indices]


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Over all ranks, in one message."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    parts = torch.split(flat, [p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)


def _look(state: AdapterState, value: float, parameters: dict[str, nn.Parameter]) -> None:
    if state.best is None or value < state.best.loss:
        state.best = Best(value, state.step, _taken(parameters))
    else:
        state.best.worse += 1


def _stopped(state: AdapterState, lora: LoraConfig) -> bool:
    early, best = lora.early_stopping, state.best
    return early is not None and best is not None and best.worse >= early.patience


def _taken(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


@torch.no_grad()
def _put(parameters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    for name, p in parameters.items():
        p.copy_(weights[name])


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then a cosine to zero."""
    warm = max(1, int(_WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
