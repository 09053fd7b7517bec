"""The worker's loop: the training algorithm, top to bottom, on one rank.

Runs under Ray Train (see trainer.py), under torchrun, or in one process; it imports no Ray.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hybrid.config import ProjectConfig, TrainingConfig
from hybrid.errors import TrainingError
from hybrid.training.checkpoint import Checkpoints
from hybrid.training.data import PreparedData, ShardSet, load_tokenizer
from hybrid.training.fence import Fence
from hybrid.training.isolation import check_isolation
from hybrid.training.model import build_model, save_model
from hybrid.training.notice import NOTHING, Notice
from hybrid.training.optimizer import learning_rate, make_optimizer
from hybrid.training.parallel import Precision, World, spread
from hybrid.training.progress import Progress
from hybrid.training.step import evaluate, train_step
from hybrid.training.throughput import Meter, device_peak

PULSE_S = 2.0
"""Seconds between calls of `report` and `notice`: Ray Train drains about one report in two."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All a worker needs to know. Pickles; the folders are seen by every worker."""

    config: ProjectConfig
    data: PreparedData
    run_id: str

    @property
    def folder(self) -> Path:
        """Progress and the exported model."""
        return self.config.run.dir / "runs" / self.run_id

    @property
    def export(self) -> Path:
        """The finished model in Hugging Face layout."""
        return self.folder / "export"

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints of this run."""
        return self.config.run.dir / "checkpoints" / self.run_id


def train(
    job: Job,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    notice: Callable[[], Notice] = lambda: NOTHING,
    place: str = "",
) -> dict[str, Any]:
    """Train to the last step, from the last good checkpoint if there is one, and export.

    Args:
        report: called on all ranks together with the latest metrics, every `PULSE_S` or rarer.
        notice: called on all ranks together, as often; what it says is the same on all of them.
            After a reclaim every step is committed, and shortly before the deadline the loop
            stands still until it is ended: to return early would mark the run as finished. At each
            word of more workers one step is committed.
        place: the node this rank runs on, for the record.

    Returns:
        The final metrics: train_loss, eval_loss, perplexity, tokens_per_s, mfu, steps, seconds,
        world_size, parameters.

    Raises:
        TrainingError: the loss or the gradient is not finite, or a later attempt took the run over.
        CheckpointError: a checkpoint cannot be written, or none of them restored.
    """
    config, settings, seed = job.config, job.config.training, job.config.run.seed
    world = World.current()
    if world.device.type == "cpu":
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
    precision = Precision.of(settings.precision, world.device)
    tokenizer = load_tokenizer(job.data.tokenizer)
    shards = ShardSet(job.data.train)
    holdout = ShardSet(job.data.holdout) if job.data.holdout else None

    model = build_model(config.model, tokenizer, seed)
    parameters = sum(p.numel() for p in model.parameters())
    model = spread(model, settings.strategy, precision, world)
    if settings.packing == "isolate":
        check_isolation(model, len(tokenizer), world.device)
    optimizer = make_optimizer(model, settings)
    fence = Fence(job.folder)
    if world.rank == 0:
        fence.take()
    every = 50 if settings.checkpoint.every == "auto" else settings.checkpoint.every
    checkpoints = Checkpoints(job.checkpoints, world, settings.checkpoint.keep)
    restored = checkpoints.restore(model, optimizer)

    peak = device_peak(world.device, precision)
    meter = Meter(parameters, peak, world.size, world.device)
    progress = Progress(job.folder, enabled=world.rank == 0)
    progress.write(
        "start",
        step=restored.step,
        steps=settings.steps,
        world_size=world.size,
        strategy=settings.strategy,
        device=str(world.device),
        precision=str(precision.compute),
        parameters=parameters,
        peak_flops=peak.flops,
        peak_source=peak.source,
        rejected_checkpoints=list(restored.rejected),
        workers=world.gather({"rank": world.rank, "node": place, "pid": os.getpid()}),
    )
    metrics: dict[str, Any] = {}
    coming = NOTHING
    pulse = begun = time.monotonic()
    model.train()
    for step in range(restored.step, settings.steps):
        started = time.monotonic()
        lr = learning_rate(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = lr
        result = train_step(
            model,
            optimizer,
            lambda index, step=step: shards.micro_batch(step, index, settings, seed),  # type: ignore[misc]
            step=step,
            seed=seed,
            micro_batches=settings.micro_batches,
            clip=settings.clip,
            world=world,
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise TrainingError(
                f"step {step + 1}: loss {result.loss}, gradient norm {result.grad_norm}: not"
                f" finite; lower training.lr ({settings.lr:g}) or look at the data"
            )
        done = step + 1
        rates = meter.step(result.tokens, time.monotonic() - started, settings.steps - done)
        metrics |= {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, **rates}
        progress.write("step", step=done, steps=settings.steps, tokens=result.tokens, **metrics)

        if holdout and (done % settings.eval_every == 0 or done == settings.steps):
            metrics |= _evaluate(model, holdout, settings, world)
            progress.write("eval", step=done, eval_loss=metrics["eval_loss"])
        if world.agree(time.monotonic() - pulse > PULSE_S):
            pulse = time.monotonic()
            report({"step": done, **metrics})
            if world.agree(world.rank == 0 and fence.lost()):
                raise fence.taken()
            coming = notice()
            if coming.kind:
                progress.write("notice", step=done, kind=coming.kind, deadline=coming.deadline)
        if coming.kind or done % every == 0 or done == settings.steps:
            checkpoints.save(done, model, optimizer)
            progress.write("checkpoint", step=done)
            if coming.kind == "grow":  # said anew at the next pulse
                coming = NOTHING
            if done < settings.steps and world.agree(coming.hold(time.monotonic() - started)):
                _stand_still(progress, done)

    if not metrics and holdout:  # resumed after the last step: only its export was missing
        metrics = _evaluate(model, holdout, settings, world)
    export(model, tokenizer, job.export, world)
    final: dict[str, Any] = {
        "train_loss": metrics.get("loss"),
        **{key: metrics[key] for key in ("eval_loss", "perplexity") if key in metrics},
        **{key: metrics[key] for key in ("tokens_per_s", "mfu") if key in metrics},
        "steps": settings.steps,
        "seconds": round(time.monotonic() - begun, 2),
        "world_size": world.size,
        "parameters": parameters,
    }
    progress.write("finished", step=settings.steps, metrics=final)
    return final


def export(model: nn.Module, tokenizer: Any, folder: Path, world: World) -> None:
    """Gather the full model on rank 0 and save it; all ranks take part and wait."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
    if world.rank == 0:
        save_model(model, state, tokenizer, folder)
    world.gather(None)


def _stand_still(progress: Progress, step: int) -> NoReturn:
    """Wait to be ended: all is committed."""
    progress.write("still", step=step)
    while True:
        time.sleep(0.2)


def _evaluate(
    model: nn.Module, holdout: ShardSet, settings: TrainingConfig, world: World
) -> dict[str, float]:
    rows = min(holdout.sequences(settings.sequence_length), settings.eval_sequences)
    loss = evaluate(
        model,
        lambda index: holdout.eval_batch(index, settings),
        -(-rows // settings.micro_batch),
        world,
    )
    return {"eval_loss": loss, "perplexity": math.exp(loss)}
