"""The worker's loop: the training algorithm, top to bottom, on one rank.

Runs under Ray Train (see trainer.py), under torchrun, or in one process; it imports no Ray.
"""

from __future__ import annotations

import math
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
from hybrid.training.bad_batches import record_batch
from hybrid.training.checkpoint import Checkpoints, Restored
from hybrid.training.checkpoint_state import States
from hybrid.training.compression import Compression
from hybrid.training.data import Batch, PreparedData, ShardSet, load_tokenizer
from hybrid.training.fence import Fence
from hybrid.training.isolation import check_isolation
from hybrid.training.model import build_model, save_model
from hybrid.training.notice import NOTHING, Notice
from hybrid.training.optimizer import learning_rate, make_optimizer
from hybrid.training.parallel import Precision, World, spread
from hybrid.training.policy import Policy, Verdict
from hybrid.training.position import Position
from hybrid.training.processes import Process
from hybrid.training.profiling import Profiling, watched_position
from hybrid.training.progress import Progress
from hybrid.training.step import StepResult, evaluate, train_step
from hybrid.training.stragglers import OwnTime, Stragglers
from hybrid.training.throughput import Meter, device_peak, flops_per_token
from hybrid.training.watchdog import Watchdog
from hybrid.training.zero import ZeroModel

PULSE_S = 2.0
"""Seconds between calls of `notice`."""
REPORT_S = 10.0
"""Seconds between calls of `report`: in Ray Train all ranks wait in it, for some 7 ms."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All a worker needs to know. Pickles; the folders are seen by every worker."""

    config: ProjectConfig
    data: PreparedData
    run_id: str
    profiling: Profiling | None = None
    trial: bool = False
    """Only steps, to time them: nothing is restored, saved or exported."""

    @property
    def folder(self) -> Path:
        """Progress and the exported model."""
        return self.config.run.dir / "runs" / self.run_id

    @property
    def export(self) -> Path:
        """The finished model in Hugging Face layout."""
        return self.folder / "export"

    @property
    def checkpoints(self) -> str:
        """Path or URL of this run's checkpoints."""
        storage = self.config.training.checkpoint.storage or self.config.run.dir / "checkpoints"
        return f"{str(storage).rstrip('/')}/{self.run_id}"


def train(
    job: Job,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    notice: Callable[[], Notice] = lambda: NOTHING,
    place: str = "",
) -> dict[str, Any]:
    """Train to the last step, from the last good checkpoint if there is one, and export.

    Args:
        report: called on all ranks together with the latest metrics, every `REPORT_S` or rarer.
        notice: called on all ranks together, every `PULSE_S` or rarer; what it says is the
            same on all of them. After a `move` the step is committed and the loop ends. After a
            `reclaim` every step is committed, and shortly before the deadline the loop stands still
            until it is ended.
        place: the node this rank runs on, for the record.

    Returns:
        The final metrics: train_loss, eval_loss, perplexity, tokens_per_s, mfu, steps, seconds,
        world_size, parameters, skipped_steps, and of several workers rank_skew, slow_ranks; after
        a move only `moved`, why, and `step`, where to go on.

    Raises:
        TrainingError: a step's numbers are bad and `training.faults` says to stop, or a later
            attempt took the run over.
        CheckpointError: a checkpoint cannot be written, or none of them restored.

    A run that hangs raises nothing: its processes end, see `watchdog`.
    """
    world = World.current(job.config.training.parallel.tensor)
    hang_s = job.config.training.faults.hang_s
    with (
        watched_position(job.profiling, job.folder, world) as position,
        Watchdog(job.folder, world, position, hang_s, node=place) as watchdog,
    ):
        return _train(job, report, notice, world, position, watchdog.processes)


def _train(
    job: Job,
    report: Callable[[dict[str, Any]], None],
    notice: Callable[[], Notice],
    world: World,
    position: Position,
    processes: list[Process],
) -> dict[str, Any]:
    config, settings, seed = job.config, job.config.training, job.config.run.seed
    if world.device.type == "cpu":
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
    precision = Precision.of(settings.precision, world.device)
    tokenizer = load_tokenizer(job.data.tokenizer)
    shards = ShardSet(job.data.train)
    holdout = ShardSet(job.data.holdout) if job.data.holdout else None

    position.at("model")
    model = build_model(config.model, tokenizer, seed)
    parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, settings.sequence_length)
    own_time = OwnTime(model, world.device)
    model = spread(model, settings, precision, world)
    if settings.packing == "isolate":
        check_isolation(model, len(tokenizer), world.device)
    compression = Compression(model, settings.strategy, settings.compression)
    optimizer = make_optimizer(model, settings)
    position.watch(model, optimizer)
    progress = Progress(job.folder, enabled=world.rank == 0, scalars=True)
    fence = Fence(job.folder)
    if world.rank == 0:
        fence.take()
    policy = Policy(settings.faults)
    extra: States = {"policy": policy, "compression": compression}
    checkpoints = Checkpoints(
        job.checkpoints, world, settings.checkpoint, progress.write, owned=lambda: not fence.lost()
    )
    position.at("restore")
    restored = Restored(step=0) if job.trial else checkpoints.restore(model, optimizer, extra=extra)

    position.at("matmul peak")
    peak = device_peak(world.device, precision)
    peak_flops = world.sum(peak.flops)
    meter = Meter(flops, peak_flops, world.device)
    progress.write(
        "start",
        step=restored.step,
        steps=settings.steps,
        world_size=world.size,
        strategy=settings.strategy,
        device=str(world.device),
        precision=str(precision.compute),
        parameters=parameters,
        flops_per_token=flops,
        peak_flops=peak_flops,
        peak_source=peak.source,
        sheet_flops=world.sum(peak.sheet or 0.0),
        rejected_checkpoints=list(restored.rejected),
        workers=[{"rank": p.rank, "node": p.node, "pid": p.pid} for p in processes],
    )
    stragglers = Stragglers([p.node for p in processes], settings.faults.straggler)
    metrics: dict[str, Any] = {}
    coming = NOTHING
    pulse = reported = begun = time.monotonic()
    model.train()
    for step in range(restored.step, settings.steps):
        started = time.monotonic()
        position.at("step", step + 1)
        lr = learning_rate(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = lr

        def batch_at(index: int, step: int = step) -> Batch:
            with progress.phase("data"):
                return shards.micro_batch(step, index, settings, seed)

        with progress.phase("step"), compression.step(step):
            result = train_step(
                model,
                optimizer,
                batch_at,
                step=step,
                seed=seed,
                micro_batches=settings.micro_batches,
                clip=settings.clip,
                world=world,
                accept=policy.accept,
                position=position,
                own_time=own_time,
            )
        done, last = step + 1, step + 1 == settings.steps
        seconds = time.monotonic() - started
        rates = meter.step(result.tokens, seconds, settings.steps - done)
        if policy.verdict is not None:
            position.at("bad batch")
            if policy.verdict.action == "stop":
                checkpoints.close()
            _bad_step(job, done, policy.verdict, result, tokenizer, world, progress)
        if result.applied:
            metrics |= {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, **rates}
            metrics |= compression.figures()
            progress.write("step", step=done, steps=settings.steps, tokens=result.tokens, **metrics)
        if (slow := stragglers.add(result.own_s)) is not None:
            progress.write("stragglers", step=done, **slow)

        eval_loss = None
        if holdout and (done % settings.eval_every == 0 or last):
            position.at("evaluation")
            with progress.phase("evaluation"):
                metrics |= _evaluate(model, holdout, settings, world)
            eval_loss = metrics["eval_loss"]
            progress.write("eval", step=done, eval_loss=eval_loss)
        position.at("report")
        if world.agree(time.monotonic() - pulse > PULSE_S):
            pulse = time.monotonic()
            if world.agree(pulse - reported > REPORT_S):
                reported = pulse
                report({"step": done, **metrics})
            if world.agree(world.rank == 0 and fence.lost()):
                raise fence.taken()
            coming = notice()
            if coming.kind:
                progress.write("notice", step=done, kind=coming.kind, why=coming.why)
        position.at("checkpoint")
        wait = last or bool(coming.kind)
        if job.trial:
            continue
        with progress.phase("checkpoint"):
            if checkpoints.due(done, seconds, eval_loss) or wait:
                checkpoints.save(
                    done, model, optimizer, extra=extra, eval_loss=eval_loss, wait=wait
                )
        if coming.kind == "move" and not last:
            return {"moved": coming.why, "step": done}
        if coming.deadline and not last and world.agree(coming.hold(time.monotonic() - started)):
            position.wait("standing still")
            _stand_still(progress, done)

    if job.trial:
        return metrics
    if not metrics and holdout:  # resumed after the last step: only its export was missing
        metrics = _evaluate(model, holdout, settings, world)
    position.at("export")
    with progress.phase("export"):
        export(model, tokenizer, job.export, world)
    slowness = stragglers.report()
    final: dict[str, Any] = {
        "train_loss": metrics.get("loss"),
        **{key: metrics[key] for key in ("eval_loss", "perplexity") if key in metrics},
        **{key: metrics[key] for key in ("tokens_per_s", "mfu") if key in metrics},
        "steps": settings.steps,
        "seconds": round(time.monotonic() - begun, 2),
        "world_size": world.size,
        "parameters": parameters,
        "skipped_steps": policy.skipped,
        **(
            {"rank_skew": slowness["skew"], "slow_ranks": slowness["slow"]}
            if world.size > 1
            else {}
        ),
    }
    progress.write("finished", step=settings.steps, metrics=final)
    return final


def export(model: nn.Module, tokenizer: Any, folder: Path, world: World) -> None:
    """Gather the full model on rank 0 and save it; all ranks take part and wait."""
    if isinstance(model, ZeroModel):
        state = model.full_state(world.rank)
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
    if world.rank == 0:
        save_model(model, state, tokenizer, folder)
    world.gather(None)


def _bad_step(
    job: Job,
    step: int,
    verdict: Verdict,
    result: StepResult,
    tokenizer: Any,
    world: World,
    progress: Progress,
) -> None:
    """Record a bad step's batch.

    Raises:
        TrainingError: the verdict is to stop.
    """
    path = record_batch(
        job.folder,
        world,
        step=step,
        verdict=verdict,
        result=result,
        tokenizer=tokenizer,
        origin={"seed": job.config.run.seed, "data_digest": job.data.digest},
    )
    progress.write(
        "bad_step",
        step=step,
        action=verdict.action,
        message=f"step {step}: {verdict.action}: {verdict.reason}",
        batch=str(path),
    )
    if verdict.action == "stop":
        raise TrainingError(
            f"step {step}: {verdict.reason}; its batch is in {path}: look at the data there, or"
            f" lower training.lr ({job.config.training.lr:g})"
        )


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
