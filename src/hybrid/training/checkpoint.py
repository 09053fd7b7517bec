"""Checkpoints that are written while training goes on, and count only once they are committed.

    <storage>/<run>/step-000100/00000-5f3a….safetensors   rank 0's pieces
    <storage>/<run>/step-000100/00001-91c2….safetensors   rank 1's
    <storage>/<run>/step-000100/metadata-5f3a….pkl        which piece is where (DCP's)
    <storage>/<run>/step-000100/commit.json               written last: names, sizes, sha256 of all

A save copies the state to staging memory, which is all that training waits for; a thread of each
rank hashes and writes its file; at the first step at which all ranks are done, rank 0's thread
writes the marker. Collectives run on the training thread only, at the same place on every rank, so
that none hangs unwatched. No file name is used twice: a killed run's late writes spoil nothing.
"""

from __future__ import annotations

import logging
import math
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from hybrid.config import CheckpointConfig
from hybrid.errors import CheckpointError
from hybrid.training.background import Work
from hybrid.training.checkpoint_restore import load_into, newest_good
from hybrid.training.checkpoint_state import State, States, collect
from hybrid.training.committed import MARKER, Committed, best, folder_of, kept, sweep
from hybrid.training.interval import Cadence, run_mtbf
from hybrid.training.parallel import World
from hybrid.training.shard_file import Image, Staging, owners
from hybrid.training.storage import Storage, check_storage

log = logging.getLogger(__name__)

RETRY_S = (5.0, 20.0, 80.0, 300.0)
"""Seconds from a failed save to the next attempt; one more failure than there are ends the run."""
Record = Callable[..., None]
_Files = dict[str, tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The step that training goes on from (0: from the start), and why newer ones were passed."""

    step: int
    rejected: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Flight:
    """A save under way on this rank: its file is being written, then the marker (rank 0)."""

    step: int
    eval_loss: float | None
    began: float
    work: Work[Any]
    paths: list[str]
    stall_s: float = 0.0
    record: Committed | None = None  # made once all ranks have written


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What this rank writes, as agreed by all; kept while no rank's state changes its shape."""

    local: SavePlan
    mine: SavePlan
    metadata: bytes  # of rank 0, pickled


class Checkpoints:
    """The checkpoints of one run. Every method is collective: all ranks call it together.

    Args:
        url: the run's own folder: a local path, or an fsspec URL.
        record: told about what happens, on every rank (`Progress.write`): `checkpoint` (step,
            stall_s, write_s, bytes), `checkpoint_failed` (step, error, failures, retry_s),
            `checkpoint_late` (step, writing), `interval` (steps, cost_s, write_s, mtbf_s).
        retry_s: seconds from a failed save to the next attempt.
        owned: whether the run is still this attempt's; asked by rank 0 before a marker is written.
    """

    def __init__(
        self,
        url: str | Path,
        world: World,
        settings: CheckpointConfig,
        record: Record = lambda event, **fields: None,
        retry_s: Sequence[float] = RETRY_S,
        owned: Callable[[], bool] = lambda: True,
    ) -> None:
        self.storage = Storage(url)
        self.world = world
        self.settings = settings
        self._record = record
        self._retry_s = retry_s
        self._owned = owned
        self._staging = Staging(world.device)
        self._cadence = Cadence(settings.every, settings.mtbf_hours * 3600)
        self._known: dict[int, Committed] = {}
        self._flight: _Flight | None = None
        self._plan: _Plan | None = None
        self._leftovers: list[str] = []
        self._wanted = False
        self._failures = 0
        self._retry_at = 0.0

    @property
    def steps(self) -> list[int]:
        """Steps with a committed checkpoint that is not known to be damaged, ascending."""
        return sorted(self._known)

    # --- saving -------------------------------------------------------------------------

    def due(self, step: int, seconds: float, eval_loss: float | None = None) -> bool:
        """Whether to save now. Called after every step: it also looks after the save under way.

        A save that is due while another is being written is late, not lost: it is due again once
        that one has ended. One that failed is due again after a while (`retry_s`).

        Args:
            step: steps done.
            seconds: what the last one took.
            eval_loss: held-out loss, if it was measured at this step.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        self._cadence.step_took(seconds, saving=self._flight is not None)
        self._advance(wait=False)
        if self._cadence.due(step):
            if self._flight is not None and not self._wanted:
                self._record("checkpoint_late", step=step, writing=self._flight.step)
            self._wanted = True
        if self._is_best(eval_loss):
            return True
        if not self._wanted or self._flight is not None:
            return False
        return not self._failures or self.world.agree(time.monotonic() >= self._retry_at)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        extra: States | None = None,
        per_rank: States | None = None,
        eval_loss: float | None = None,
        wait: bool = False,
    ) -> None:
        """Save the state after `step` steps. A save still under way is waited for first.

        Args:
            extra: further state that is the same on all ranks.
            per_rank: further state that is each rank's own; it comes back only on as many ranks.
            eval_loss: held-out loss, if it was measured at this step.
            wait: return once it is committed, trying again where that fails.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        self._advance(wait=True)
        began = time.monotonic()
        state = collect(model, optimizer, self.world.rank, extra or {}, per_rank or {})
        while True:
            self._start(step, state, began, eval_loss, wait=wait)
            if not wait and self.settings.asynchronous:
                return
            self._advance(wait=True)
            if not (wait and self._failures):
                return
            time.sleep(self._retry_s[self._failures - 1])

    def close(self) -> None:
        """Wait for the save under way. To be called at the end, and before an error that all ranks
        raise together."""
        self._advance(wait=True)

    def _start(
        self, step: int, state: State, began: float, eval_loss: float | None, *, wait: bool
    ) -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self.world.rank == 0)
        plan = self._agreed(planner)
        image = Image.of(plan.mine, planner)
        background = self.settings.asynchronous and not wait
        blocks = [self._staging.copy(image)] if background else image.blocks()
        token = secrets.token_hex(6)
        shard = f"{self.world.rank:05d}-{token}.safetensors"
        contents = {shard: blocks}
        if self.world.rank == 0:
            contents[f"metadata-{token}.pkl"] = [memoryview(plan.metadata)]

        def write() -> _Files:
            self._remove_leftovers()
            folder = folder_of(step)
            return {n: self.storage.write(f"{folder}/{n}", b) for n, b in contents.items()}

        self._flight = _Flight(
            step=step,
            eval_loss=eval_loss,
            began=began,
            work=Work(write, "checkpoint", yielding=background),
            paths=[f"{folder_of(step)}/{name}" for name in contents],
        )
        self._wanted = False
        self._cadence.begun(step)
        self._flight.stall_s = time.monotonic() - began

    def _agreed(self, planner: DefaultSavePlanner) -> _Plan:
        """Who writes what: DCP's global plan, asked for anew only when a local one has changed."""
        local = planner.create_local_plan()
        plan = self._plan
        if plan is not None and self._tally(plan.local == local)[0] == self.world.size:
            return plan
        mine, metadata = [local], b""
        plans: list[Any] = [local] * self.world.size
        if self.world.size > 1:
            dist.gather_object(local, plans if self.world.rank == 0 else None)
        if self.world.rank == 0:
            plans, described = planner.create_global_plan(plans)
            described.storage_data = owners(plans)
            metadata = pickle.dumps(described)
            mine = plans[:1]
        if self.world.size > 1:
            dist.scatter_object_list(mine, plans if self.world.rank == 0 else None)
        self._plan = _Plan(local=local, mine=mine[0], metadata=metadata)
        return self._plan

    def _advance(self, *, wait: bool) -> None:
        """Bring the save under way as far as it is ready on all ranks, or to its end."""
        while (flight := self._flight) is not None:
            began = time.monotonic()
            if wait:
                flight.work.join()
            ended, failed = self._tally(flight.work.ended, flight.work.error is not None)
            if wait:  # training is held up until the slowest rank has written
                flight.stall_s += time.monotonic() - began
            if ended < self.world.size:
                return
            if failed:
                self._failed(flight)
            elif flight.record is None:
                self._commit(flight)
                if not wait:
                    return
            else:
                self._committed(flight, flight.record)

    def _commit(self, flight: _Flight) -> None:
        """All ranks have written: rank 0's thread writes the marker, then drops old ones."""
        written: list[_Files] = self.world.gather(flight.work.result())
        flight.record = record = Committed(
            step=flight.step,
            shards=tuple(next(iter(files)) for files in written),
            metadata=list(written[0])[1],
            files={name: entry for files in written for name, entry in files.items()},
            eval_loss=flight.eval_loss,
        )
        records = {**self._known, record.step: record}.values()
        keep = kept(records, self.settings.keep, self.settings.keep_best)

        def commit() -> None:
            if not self._owned():
                raise CheckpointError("a later attempt has taken the run over")
            self.storage.put(f"{record.folder}/{MARKER}", record.dump())
            try:
                sweep(self.storage, keep, record)
            except OSError as e:
                log.warning("old checkpoints in %s cannot be removed: %s", self.storage.url, e)

        nothing = self.world.rank != 0
        flight.work = Work((lambda: None) if nothing else commit, "commit", yielding=False)

    def _committed(self, flight: _Flight, record: Committed) -> None:
        self._flight, self._failures = None, 0
        self._known[record.step] = record
        keep = kept(self._known.values(), self.settings.keep, self.settings.keep_best)
        self._known = {step: known for step, known in self._known.items() if step in keep}
        write_s = time.monotonic() - flight.began
        stall_s = flight.stall_s
        self._record(
            "checkpoint",
            step=record.step,
            stall_s=round(stall_s, 4),
            write_s=round(write_s, 3),
            bytes=record.size,
        )
        if self._cadence.auto:
            cost_s = self._cadence.cost_s(stall_s)
            mine = self._cadence.best(stall_s, write_s) if self.world.rank == 0 else 0
            self._cadence.interval = int(self.world.sum(mine))
            self._record(
                "interval",
                step=record.step,
                steps=self._cadence.interval,
                cost_s=round(cost_s, 4),
                write_s=round(write_s, 3),
                mtbf_s=self._cadence.mtbf_s,
            )

    def _failed(self, flight: _Flight) -> None:
        self._flight = None
        self._failures += 1
        if flight.record is None:  # else the marker may be there in spite of the error
            self._leftovers += flight.paths
        own = flight.work.error
        said = self.world.gather(own and f"rank {self.world.rank}: {own or type(own).__name__}")
        error = next(text for text in said if text)
        again = self._failures <= len(self._retry_s)
        retry_s = self._retry_s[self._failures - 1] if again else None
        self._record(
            "checkpoint_failed",
            step=flight.step,
            error=error,
            failures=self._failures,
            retry_s=retry_s,
        )
        last = f"the last good one is of step {self.steps[-1]}" if self._known else "there is none"
        if retry_s is None:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be written to"
                f" {self.storage.url}: step {flight.step}: {error}; {last}; mend the storage or"
                " make room, then run the same command to go on from there"
            )
        if self.world.rank == 0:
            log.warning("checkpoint of step %d failed: %s; %s", flight.step, error, last)
        self._wanted = True
        self._retry_at = time.monotonic() + retry_s

    def _remove_leftovers(self) -> None:
        """What this rank has written for saves that failed."""
        for path in list(self._leftovers):
            try:
                self.storage.remove(path)
            except OSError:  # it is tried again with the next save
                continue
            self._leftovers.remove(path)

    def _is_best(self, eval_loss: float | None) -> bool:
        if eval_loss is None or not math.isfinite(eval_loss) or not self.settings.keep_best:
            return False
        top = best(self._known.values(), self.settings.keep_best)
        return len(top) < self.settings.keep_best or eval_loss < (top[-1].eval_loss or 0.0)

    def _tally(self, *flags: bool) -> list[int]:
        """On how many ranks each flag is set."""
        if self.world.size == 1:
            return [int(flag) for flag in flags]
        counts = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(counts)
        return [int(n) for n in counts]

    # --- restoring ----------------------------------------------------------------------

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        extra: States | None = None,
        per_rank: States | None = None,
    ) -> Restored:
        """Load the newest checkpoint whose every byte matches its marker, on any world size.

        Before that the storage is tried: every rank must write there and see the others' files.

        Args:
            extra, per_rank: filled where the checkpoint holds them; see `save`.

        Raises:
            ConfigError: the storage is not shared by all ranks.
            CheckpointError: the storage cannot be read or written, or there are checkpoints and
                none of them is good, or the good one is of another model.
        """
        check_storage(self.storage, self.world)
        nodes = len(set(self.world.gather(socket.gethostname())))
        self._cadence.mtbf_s = run_mtbf(self.settings.mtbf_hours * 3600, nodes)
        good, rejected = newest_good(self.storage, self.world)
        step = 0
        if good:
            step = max(good)
            load_into(
                self.storage, good[step], self.world, model, optimizer, extra or {}, per_rank or {}
            )
        self._known = good
        self._cadence.begun(step)
        return Restored(step=step, rejected=tuple(rejected))
