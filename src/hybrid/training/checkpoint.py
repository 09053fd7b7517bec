"""Checkpoints that count only once committed, in a form any world size can restore.

    checkpoints/<run>/step-000100.tmp/   being written: every rank its own shards
    checkpoints/<run>/step-000100/       committed: renamed after commit.json was written in it

The learning rate, the data cursor and every random generator follow from the step number, so the
state is the model, the optimiser and that number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hybrid.errors import CheckpointError
from hybrid.training.parallel import World

log = logging.getLogger(__name__)

MARKER = "commit.json"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The step that training goes on from (0: from the start), and why newer ones were passed."""

    step: int
    rejected: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run. Every method is collective: all ranks call it together."""

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self.folder = folder
        self.world = world
        self.keep = keep

    def committed(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        found = [p for p in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
        return sorted((p for p in found if (p / MARKER).exists()), key=_step_of)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write, verify that all ranks have written, commit, and drop all but the newest `keep`.

        Raises:
            CheckpointError: a rank could not write (disk full, no permission).
        """
        final = self.folder / f"step-{step:06d}"
        temporary = final.with_suffix(".tmp")
        if self.world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # what a killed run left
            temporary.mkdir(parents=True)
        self.world.gather(None)  # nobody writes before the folder is clean
        try:
            save(
                _state(model, optimizer),
                checkpoint_id=temporary,
                no_dist=not dist.is_initialized(),
            )
        except (CheckpointException, OSError) as e:
            raise CheckpointError(f"step {step}: cannot write {temporary}: {e}") from e
        mine = sorted(temporary.glob(f"__{self.world.rank}_*"))
        if self.world.rank == 0:
            mine.append(temporary / ".metadata")
        parts = self.world.gather({p.name: [p.stat().st_size, _sha256(p)] for p in mine})
        if self.world.rank == 0:
            files = {name: entry for part in parts for name, entry in part.items()}
            _write_durably(temporary / MARKER, {"step": step, "files": files})
            if final.exists():  # a rejected one of this step: written anew after a fall-back
                shutil.rmtree(final)
            temporary.rename(final)
            _sync_folder(self.folder)
            for old in self.committed()[: -self.keep]:
                shutil.rmtree(old)
        self.world.gather(None)
        return final

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Restored:
        """Load the newest checkpoint whose every byte matches its marker, on any world size.

        Raises:
            CheckpointError: there are checkpoints and none of them is good.
        """
        rejected: list[str] = []
        for path in reversed(self.committed()):
            fault = self._fault(path)
            if fault is not None:
                log.warning("checkpoint %s is not used: %s", path, fault)
                rejected.append(f"{path.name}: {fault}")
                continue
            state = _state(model, optimizer)
            load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            return Restored(step=_step_of(path), rejected=tuple(rejected))
        if rejected:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be restored ({'; '.join(rejected)});"
                " restore its files, or start the run afresh"
            )
        return Restored(step=0)

    def _fault(self, path: Path) -> str | None:
        """What is wrong with a committed checkpoint. The files are dealt to ranks for hashing."""
        try:
            files: dict[str, list[Any]] = json.loads((path / MARKER).read_text())["files"]
        except (ValueError, KeyError, TypeError):
            return f"{MARKER} is damaged"
        mine = sorted(files.items())[self.world.rank :: self.world.size]
        faults = self.world.gather(
            [f for name, entry in mine if (f := _check(path / name, *entry))]
        )
        return next((fault for part in faults for fault in part), None)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Both state dicts under canonical parameter names, the same for single, DDP and FSDP."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _check(path: Path, size: int, sha256: str) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size} bytes, not {size}"
    if _sha256(path) != sha256:
        return f"{path.name} does not match its sha256"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_durably(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
