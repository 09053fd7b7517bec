"""The trials of `strategy: auto` on one rank: the real loop, a few steps of each combination.

One start of the workers makes all trials; rank 0 decides what comes next and writes it down before
it begins, so that whoever starts the workers again knows what ended them. An error of one rank ends
the workers: the others may be waiting for it in a collective.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from hybrid.errors import HybridError
from hybrid.training.candidates import Candidate, Space
from hybrid.training.data import load_tokenizer
from hybrid.training.loop import Job, train
from hybrid.training.memory import estimate
from hybrid.training.model import architecture
from hybrid.training.preflight import MARGIN, size
from hybrid.training.progress import Progress, read_progress
from hybrid.training.trial_memory import Memory, place_of
from hybrid.training.trials import Row, Search, latest
from hybrid.training.world import World

FOLDER = "trials"
"""Below the folder of the run: the book of the trials, and a folder for the one under way."""
NEVER = 10**9
OUT_OF_MEMORY = "ran out of the GPU's memory"


class Book:
    """The rows of a search, in a progress file of their own: an event `trial` each.

    `trials_begin` makes what stands before it void; `left_out` and `trials_done` are the others.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._progress = Progress(folder)

    def begin(self) -> None:
        """Start from nothing."""
        self._progress.write("trials_begin")

    def add(self, row: Row) -> None:
        """Append what is known of a combination now."""
        self._progress.write("trial", row=row.as_record())

    def left_out(self, reasons: dict[str, str]) -> None:
        """Say what is not tried at all."""
        self._progress.write("left_out", reasons=reasons)

    def done(self) -> None:
        """Say that the search is over."""
        self._progress.write("trials_done")

    def rows(self) -> list[Row]:
        """The last that was said of each combination."""
        return latest(Row.of_record(r["row"]) for r in self._records("trial"))

    def reasons(self) -> dict[str, str]:
        """What is not tried at all, and why."""
        found = self._records("left_out")
        return dict(found[-1]["reasons"]) if found else {}

    @property
    def over(self) -> bool:
        """Whether the search was brought to its end."""
        return bool(self._records("trials_done"))

    def _records(self, event: str) -> list[dict[str, Any]]:
        records = read_progress(self.folder)
        begun = [n for n, r in enumerate(records) if r["event"] == "trials_begin"]
        return [r for r in records[begun[-1] if begun else 0 :] if r["event"] == event]


def run_trials(job: Job, book_folder: Path, place: str = "") -> None:
    """Try combinations until none is left to try. Every rank calls it.

    Args:
        job: with strategy `auto`.
        book_folder: of the `Book`; every rank sees it.
        place: the node this rank runs on, for the record.

    Raises:
        Whatever ends a trial; the last row of the book is then `begun`.
    """
    world = World.current()
    trials = _Trials(job, world, Book(book_folder) if world.rank == 0 else None, place)
    try:
        while (candidate := world.gather(trials.next())[0]) is not None:
            trials.make(candidate)
    finally:
        trials.stop()


class _Trials:
    def __init__(self, job: Job, world: World, book: Book | None, place: str) -> None:
        self._job, self._world, self._book, self._node = job, world, book, place
        settings = job.config.training
        tokenizer = load_tokenizer(job.data.tokenizer)
        self._architecture = partial(architecture, job.config.model, len(tokenizer))
        self._place = place_of(world)
        self._memory = Memory(world.device)
        space = Space(settings, self._architecture(), self._place)
        self._search = Search(space, settings.trials.most)
        self._estimate = lru_cache(maxsize=None)(self._estimated)
        if book is not None:
            book.left_out(space.left_out)

    def next(self) -> Candidate | None:
        """On rank 0, what is tried next; it is in the book already."""
        if self._book is None:
            return None
        while (candidate := self._search.next(rows := self._book.rows())) is not None:
            why = self._search.hopeless(candidate, rows) or self._too_large(candidate)
            if why is None:
                # What a trial that was killed has left.
                shutil.rmtree(self._trial_job(candidate).folder, ignore_errors=True)
                self._book.add(Row(candidate=candidate, outcome="begun"))
                return candidate
            self._book.add(Row(candidate=candidate, outcome="left out", why=why, memory=True))
        self._book.done()
        return None

    def make(self, candidate: Candidate) -> None:
        """Try one combination; rank 0 writes down what came of it."""
        self._memory.clear()
        job = self._trial_job(candidate)
        alone = self._world.size == 1
        try:
            train(job, place=self._node)
        except torch.OutOfMemoryError:
            if not alone:
                raise
            row = Row(candidate=candidate, outcome="rejected", why=OUT_OF_MEMORY, memory=True)
        except HybridError as e:
            if not alone:
                raise
            row = Row(candidate=candidate, outcome="rejected", why=e.message)
        else:
            peaks = self._world.gather((self._memory.peak(), self._memory.retries()))
            row = self._row(candidate, job, peaks)
        if self._book is not None:
            self._book.add(row)
            shutil.rmtree(job.folder, ignore_errors=True)

    def stop(self) -> None:
        """Leave no thread behind."""
        self._memory.stop()

    def _row(self, candidate: Candidate, job: Job, peaks: Sequence[tuple[int, int]]) -> Row:
        settings = self._job.config.training
        peak, retries = max(p for p, _ in peaks), sum(r for _, r in peaks)
        times = [r["time"] for r in read_progress(job.folder) if r["event"] == "step"]
        timed = [b - a for a, b in itertools.pairwise(times[settings.trials.warmup - 1 :])]
        step_s = statistics.median(timed) if timed else None
        why = ""
        if retries:
            why = f"the allocator ran full {retries} times and gave back its cache"
        elif peak > self._place.memory:
            why = f"held {size(peak)}, a worker's share is {size(self._place.memory)}"
        elif not timed:
            why = "steps were left out, see training.faults"
        return Row(
            candidate=candidate,
            outcome="rejected" if why else "measured",
            why=why,
            memory=bool(why) and bool(timed),
            step_s=step_s,
            tokens_per_s=settings.tokens_per_step / step_s if step_s else None,
            peak_bytes=peak,
            retries=retries,
        )

    def _trial_job(self, candidate: Candidate) -> Job:
        settings = candidate.applied(self._job.config.training)
        trials = settings.trials
        settings = settings.model_copy(
            update={
                "steps": trials.warmup + trials.steps,
                "eval_every": NEVER,
                "warmup_steps": min(settings.warmup_steps, trials.warmup),
            }
        )
        config = self._job.config.model_copy(update={"training": settings})
        return replace(
            self._job,
            config=config,
            data=replace(self._job.data, holdout=None),
            run_id=f"{self._job.run_id}/{FOLDER}/trial",
            trial=True,
            profiling=None,
        )

    def _too_large(self, candidate: Candidate) -> str | None:
        needs, has = self._estimate(candidate), self._place.memory
        if needs <= MARGIN * has:
            return None
        return f"needs an estimated {size(needs)} a worker, which has {size(has)}"

    def _estimated(self, candidate: Candidate) -> int:
        settings = candidate.applied(self._job.config.training)
        return estimate(
            self._architecture,
            settings,
            workers=self._world.size,
            per_node=self._place.per_node,
            gpu=self._place.gpu,
        ).total
