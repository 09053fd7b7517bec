"""Which checkpoint a run goes on from: the newest that is whole; and loading it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from hybrid.errors import CheckpointError
from hybrid.training.checkpoint_state import States, apply, template
from hybrid.training.committed import (
    Committed,
    fault_of,
    folder_of,
    read_marker,
    steps_in,
    sweep,
)
from hybrid.training.parallel import World
from hybrid.training.shard_file import ShardReader
from hybrid.training.storage import Storage

log = logging.getLogger(__name__)

READ_RETRY_S = (1.0, 4.0)
"""Seconds between attempts to read, before a checkpoint is passed over."""


def newest_good(storage: Storage, world: World) -> tuple[dict[int, Committed], list[str]]:
    """The newest checkpoint whose every byte matches its marker, and the older ones unread.

    Collective. What was never committed is removed: a killed run was writing it.

    Returns:
        Records by step; and of each newer checkpoint that is not good, why.

    Raises:
        CheckpointError: the storage cannot be read, or there are checkpoints and none is good.
    """
    found = _found(storage, world)
    good: dict[int, Committed] = {}
    rejected: list[str] = []
    for step in sorted(found, reverse=True):
        entry = found[step]
        if good:
            if isinstance(entry, Committed):
                good[step] = entry
            continue
        fault = entry if isinstance(entry, str) else _fault(storage, entry, world)
        if fault is None and isinstance(entry, Committed):
            good[step] = entry
            continue
        log.warning("checkpoint %s is not used: %s", storage.at(folder_of(step)), fault)
        rejected.append(f"{folder_of(step)}: {fault}")
    if rejected and not good:
        raise CheckpointError(
            f"no checkpoint in {storage.url} can be restored ({'; '.join(rejected)});"
            " restore its files, or start the run afresh (--fresh)"
        )
    if world.rank == 0:
        try:
            sweep(storage, set(found))
        except OSError as e:
            log.warning("%s cannot be cleaned: %s", storage.url, e)
    return good, rejected


def load_into(
    storage: Storage,
    record: Committed,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: States,
    per_rank: States,
) -> None:
    """Load a checkpoint, whatever world size and strategy it was saved by. Collective.

    Raises:
        CheckpointError: it is of another model, or cannot be read after all.
    """
    reader = ShardReader(storage, record.folder, record.metadata, list(record.shards))
    same = len(record.shards) == world.size
    try:
        metadata = reader.read_metadata()
        prefixes = ["extra", *([f"rank.{world.rank}"] if same else [])]
        state = template(model, optimizer, metadata, prefixes)
        load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError, OSError) as e:
        failures = getattr(e, "failures", {})
        cause = next((error for error, _ in failures.values()), e)
        raise CheckpointError(
            f"{storage.at(record.folder)} cannot be loaded: {cause}; if the model or its settings"
            " were changed, start the run afresh (--fresh)"
        ) from e
    apply(state, metadata, model, optimizer, world.rank, extra, per_rank)


def _found(storage: Storage, world: World) -> dict[int, Committed | str]:
    """Markers by step, or what is wrong with them, as rank 0 sees them."""

    def markers() -> dict[int, Committed | str]:
        read = {step: read_marker(storage, step) for step in steps_in(storage)}
        return {step: entry for step, entry in read.items() if entry is not None}

    mine: dict[int, Committed | str] | str = _patiently(markers) if world.rank == 0 else {}
    found: dict[int, Committed | str] | str = world.gather(mine)[0]
    if isinstance(found, str):
        raise CheckpointError(f"{storage.url} {found}")
    return found


def _fault(storage: Storage, record: Committed, world: World) -> str | None:
    """What is wrong with a checkpoint. Its files are dealt to the ranks, large ones first."""
    by_size = sorted(record.files, key=lambda name: -record.files[name][0])
    mine = by_size[world.rank :: world.size]
    faults = world.gather(_patiently(lambda: fault_of(storage, record, mine)))
    return next((fault for fault in faults if fault), None)


def _patiently(read: Callable[[], Any]) -> Any:
    """What `read` returns; where the storage fails time and again, what it says."""
    for delay in (*READ_RETRY_S, None):
        try:
            return read()
        except OSError as e:
            if delay is None:
                return f"cannot be read: {e}"
            log.warning("reading checkpoints: %s; once more in %g s", e, delay)
            time.sleep(delay)
    return None
