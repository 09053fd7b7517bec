"""`strategy: auto` as the driver sees it: trials on the run's own workers, a choice that is kept.

The choice is an event `strategy` of the run's progress file: a run that is taken up again keeps it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError

from hybrid._ray_compat import draining_nodes
from hybrid.errors import TrainingError
from hybrid.training.hang_report import last_hang
from hybrid.training.loop import Job
from hybrid.training.progress import Follower, Progress, read_progress
from hybrid.training.slots import NOBODY, PLACE_S, Avoid, has_gpus, pool_nodes, wait_for_workers
from hybrid.training.trial_loop import FOLDER, OUT_OF_MEMORY, Book, run_trials
from hybrid.training.trials import Choice, Row, choose, lines, picked
from hybrid.training.workers import WAIT_S, causes, fit, own_error

Say = Callable[[dict[str, Any]], None]
Fit = Callable[[Job, int, Avoid], None]
"""Starts that many workers, which make the trials, and waits for them."""
MOST_FAILURES = 2
"""Failures of the workers outside of any trial, after which the search gives up."""


def settled(job: Job, say: Say, avoid: Avoid = NOBODY, start: Fit | None = None) -> Job:
    """The job with a strategy: `auto` becomes what was chosen for this run, or is chosen now.

    The arguments are those of `try_strategies`.

    Raises:
        PlacementError: too few slots. TrainingError: no combination works.
    """
    if job.config.training.strategy != "auto":
        return job
    asked = _asked(job)
    for record in reversed(read_progress(job.folder)):
        if record["event"] == "strategy":
            if record["asked"] == asked:
                choice = Choice.of_record(record)
                say({"message": f"strategy, tried before: {picked(choice)}"})
                return with_choice(job, choice)
            say({"message": "strategy: trials are made again, the settings are others"})
            break
    progress = Progress(job.folder)
    with progress.phase("trials"):
        choice = try_strategies(job, say, avoid, start)
    progress.write("strategy", asked=asked, **choice.as_record())
    say({"message": "\n".join(["trials of strategies:", *lines(choice)])})
    return with_choice(job, choice)


def with_choice(job: Job, choice: Choice) -> Job:
    """The job with the chosen combination in place of `auto`."""
    training = choice.candidate.applied(job.config.training)
    return replace(job, config=job.config.model_copy(update={"training": training}))


def _asked(job: Job) -> dict[str, Any]:
    """What the choice depends on, so far as it is known without a worker."""
    settings = job.config.training
    keys = {"parallel", "trials", "workers", "cpus_per_worker", "precision", "compression"}
    return {**settings.model_dump(mode="json", include=keys), "gpu": has_gpus()}


def try_strategies(job: Job, say: Say, avoid: Avoid = NOBODY, start: Fit | None = None) -> Choice:
    """Make trials on workers as the run's, and pick. Leaves nothing behind.

    A combination whose trial ends the workers is rejected, and the search goes on without it.

    Args:
        start: see `Fit`; by default under Ray Train.

    Raises:
        PlacementError: too few slots. TrainingError: no combination works, or the workers fail
        outside of any trial.
    """
    began, folder = time.time(), job.folder / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    book = Book(folder)
    try:
        with Follower(folder, lambda record: _tell(record, say)):
            workers = _to_the_end(job, book, avoid, start or _start, say)
        choice = choose(
            book.rows(),
            book.reasons(),
            workers=workers,
            usd_per_hour=job.config.training.usd_per_hour,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(choice, seconds=time.time() - began)


def _to_the_end(job: Job, book: Book, avoid: Avoid, start: Fit, say: Say) -> int:
    """Start workers until the search is over; returns how many made its trials."""
    settings = job.config.training
    failures, workers, patience = 0, 0, PLACE_S
    while not book.over:
        count = wait_for_workers(settings, patience, avoid)
        if count != workers:
            workers = count
            book.begin()
            say({"message": f"trying strategies on {workers} workers"})
        patience = WAIT_S
        nodes, begun = {n["NodeID"] for n in pool_nodes()}, time.time()
        try:
            start(job, workers, avoid)
        except Exception as e:
            # What a trial may die of has no end: whatever it is, the trial is rejected.
            under_way = next((r for r in book.rows() if r.outcome == "begun"), None)
            why, memory = _why(e, job, begun)
            if nodes & draining_nodes().keys():
                say({"message": f"a node was taken away amid the trials: {why}"})
                workers = 0  # those that come may be elsewhere: all trials are made again
            elif under_way is not None:
                book.add(replace(under_way, outcome="rejected", why=why, memory=memory))
            elif (failures := failures + 1) > MOST_FAILURES:
                raise TrainingError(f"training.strategy: auto: the workers fail: {why}") from e
    return workers


def _start(job: Job, count: int, avoid: Avoid) -> None:
    fit(job, count, avoid, worker=_worker)


def _worker(arguments: dict[str, Any]) -> None:
    """What Ray Train runs on each worker."""
    import ray

    job: Job = arguments["job"]
    run_trials(job, job.folder / FOLDER, place=ray.get_runtime_context().get_node_id())


def _why(error: Exception, job: Job, begun: float) -> tuple[str, bool]:
    """What ended the workers, in a few words, and whether it was for want of memory."""
    if (hang := last_hang(job.folder / FOLDER / "trial", begun)) is not None:
        return f"it hangs: {hang}", False
    if (own := own_error(error)) is not None:
        return own.message, False
    found = list(causes(error))
    text = " ".join(str(e) for e in found)
    if "torch.OutOfMemoryError" in text or "CUDA out of memory" in text:
        return OUT_OF_MEMORY, True
    if any(isinstance(e, OutOfMemoryError) for e in found):
        return "was ended by Ray: the node's memory ran full", True
    if any(isinstance(e, (ActorDiedError, RayActorError)) for e in found):
        return "its process was killed, as the kernel does when memory runs out", True
    last = str(error).strip().splitlines()
    return (last[-1] if last else type(error).__name__), False


def _tell(record: dict[str, Any], say: Say) -> None:
    if record["event"] != "trial":
        return
    row = Row.of_record(record["row"])
    c = row.candidate
    name = f"{c}, {c.micro_batch} rows x {c.micro_batches}"
    if row.outcome == "measured":
        say({"message": f"tried {name}: {row.tokens_per_s:,.0f} tokens/s"})
    elif row.why:
        say({"message": f"{row.outcome}: {name}: {row.why}"})
