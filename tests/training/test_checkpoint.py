"""Checkpoints: nothing half written counts, damage is passed over, what is restored was saved."""

from __future__ import annotations

import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_runs import Run, same, state_of
from checkpoint_worlds import Numbers

from hybrid.errors import CheckpointError


class Gate:
    """Holds a storage's writes of shards until it is opened."""

    def __init__(self, run: Run) -> None:
        self.opened = threading.Event()
        write = run.checkpoints.storage.write

        def waiting(path: str, blocks: Any) -> Any:
            assert self.opened.wait(30)
            return write(path, blocks)

        run.checkpoints.storage.write = waiting  # type: ignore[method-assign]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_restored_is_the_state_that_was_saved(tmp_path: Path, asynchronous: bool) -> None:
    """Training goes on while the asynchronous one is written: it shall not show."""
    run = Run(tmp_path, asynchronous=asynchronous).restore()
    run.train(3)
    gate = Gate(run)
    if not asynchronous:
        gate.opened.set()
    then = state_of(run)
    run.save()
    run.train(2)
    assert not same(state_of(run), then)
    gate.opened.set()
    run.checkpoints.close()
    again = Run(tmp_path).restore()
    assert again.restored.step == 3 and same(state_of(again), then)
    again.train(2)
    assert same(state_of(again), state_of(run)), "the steps after it are those of the first run"
    [record] = run.events("checkpoint")
    assert record["step"] == 3 and record["bytes"] > 10_000


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_record_says_how_long_training_was_held_up(tmp_path: Path, asynchronous: bool) -> None:
    """The write takes 0.2 s at least, which hold the step up only where it is not asynchronous."""
    run = Run(tmp_path, asynchronous=asynchronous).restore()
    run.train()
    gate = Gate(run)
    opener = threading.Timer(0.2, gate.opened.set)
    if not asynchronous:
        opener.start()
    run.save()
    if asynchronous:  # what a training step would take
        opener.start()
        opener.join()
    run.checkpoints.close()
    [record] = run.events("checkpoint")
    assert record["write_s"] >= 0.19
    if asynchronous:
        assert record["write_s"] - record["stall_s"] >= 0.19
    else:
        assert record["stall_s"] >= 0.19
    opener.join()


def test_one_save_at_a_time_and_a_late_one_is_not_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2).restore()
    gate = Gate(run)
    saved = []
    for _ in range(5):
        run.train()
        if run.checkpoints.due(run.done, 0.01):
            saved.append(run.done)
            run.save()
    assert saved == [2] and run.events("checkpoint_late") == [
        {"event": "checkpoint_late", "step": 4, "writing": 2}
    ]
    gate.opened.set()
    run.checkpoints.close()
    run.train()
    assert run.checkpoints.due(run.done, 0.01)
    run.train()
    assert run.checkpoints.due(run.done, 0.01), "due until it is taken"


def test_a_tied_embedding_is_saved_once_and_comes_back_tied(tmp_path: Path) -> None:
    run = Run(tmp_path).restore()
    run.train()
    run.save(wait=True)
    [shard] = (tmp_path / "step-000001").glob("*.safetensors")
    stored = safetensors.torch.load_file(shard)
    assert "model.lm_head.weight" not in stored
    assert torch.equal(stored["model.model.embed_tokens.weight"], run.model.lm_head.weight)
    again = Run(tmp_path).restore()
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert same(state_of(again), state_of(run))


def damage(folder: Path, how: str) -> str:
    """Damage a committed checkpoint; a word of what is to be said about it."""
    [shard] = folder.glob("*.safetensors")
    [metadata] = folder.glob("*.pkl")
    marker = folder / "commit.json"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
        return "bytes, not"
    if how == "one bit":
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
        return "does not match its sha256"
    if how == "missing":
        shard.unlink()
        return "is missing"
    if how == "metadata":
        metadata.write_bytes(metadata.read_bytes()[::-1])
        return "does not match its sha256"
    text = marker.read_text()
    marker.write_text(
        text[:-20] if how == "half a marker" else text.replace('"step": 3', '"step": 2')
    )
    return "commit.json is damaged"


@pytest.mark.parametrize(
    "how", ["truncated", "one bit", "missing", "metadata", "half a marker", "another's marker"]
)
def test_a_damaged_one_is_passed_over_and_said_so(tmp_path: Path, how: str) -> None:
    run = Run(tmp_path, keep=3).restore()
    states = []
    for _ in range(3):
        run.train()
        run.save(wait=True)
        states.append(state_of(run))
    said = damage(tmp_path / "step-000003", how)
    again = Run(tmp_path, keep=1).restore()
    assert again.restored.step == 2 and same(state_of(again), states[1])
    assert "step-000003" in again.restored.rejected[0] and said in again.restored.rejected[0]
    # The damaged one is no longer counted among those that are kept.
    again.checkpoints.save(2, again.model, again.optimizer, wait=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    third = Run(tmp_path).restore()
    assert third.restored.step == 2 and not third.restored.rejected


def test_what_a_killed_run_left_does_not_count_and_goes(tmp_path: Path) -> None:
    run = Run(tmp_path).restore()
    run.train()
    run.save(wait=True)
    garbage = tmp_path / "step-000007"
    shutil.copytree(tmp_path / "step-000001", garbage)
    (garbage / "commit.json").unlink()
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-000009/.commit.json.1a2b").write_bytes(b"{")
    (tmp_path / "notes.txt").write_text("not ours")
    again = Run(tmp_path).restore()
    assert again.restored.step == 1 and not again.restored.rejected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000001"]
    # A file of a process that still writes is dropped when this step is committed again.
    (tmp_path / "step-000001/00001-dead.safetensors").write_bytes(b"late")
    again.save(wait=True)
    assert len(list((tmp_path / "step-000001").iterdir())) == 3
    assert Run(tmp_path).restore().restored.step == 1


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, every=100, keep=1, keep_best=2).restore()
    saved = []
    for loss in (5.0, 3.0, 4.0, 3.5, 4.5, float("nan"), 2.0):
        run.train()
        if run.checkpoints.due(run.done, 0.01, loss):
            saved.append(run.done)
            run.save(eval_loss=loss)
    run.checkpoints.close()
    assert saved == [1, 2, 3, 4, 7], "only what is among the best is worth a save of its own"
    assert run.checkpoints.steps == [2, 7]
    run.train()
    run.save(wait=True)
    again = Run(tmp_path, every=100, keep=1, keep_best=2).restore()
    assert again.checkpoints.steps == [2, 7, 8]
    again.train()
    assert not again.checkpoints.due(again.done, 0.01, 3.2)
    assert again.checkpoints.due(again.done, 0.01, 2.9)


def test_generators_and_further_state_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path).restore()
    extra = {"a": Numbers(losses=[1.5, 2.5], deep={"t": [torch.arange(3), {"n": None}]})}
    per_rank = {"b": Numbers(error=torch.ones(2, dtype=torch.bfloat16))}
    run.train()
    run.save(extra=extra, per_rank=per_rank, wait=True)
    drawn = (torch.rand(1).item(), float(np.random.rand()), random.random())
    new, mine = {"a": Numbers(), "c": Numbers(x=1)}, {"b": Numbers()}
    Run(tmp_path).restore(extra=new, per_rank=mine)
    assert (torch.rand(1).item(), float(np.random.rand()), random.random()) == drawn
    assert new["a"].values["losses"] == [1.5, 2.5]
    tensor, rest = new["a"].values["deep"]["t"]
    assert torch.equal(tensor, torch.arange(3)) and rest == {"n": None}
    assert new["c"].values == {"x": 1}, "what the checkpoint knows nothing of is left alone"
    assert torch.equal(mine["b"].values["error"], torch.ones(2, dtype=torch.bfloat16))


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path).restore()
    run.train()
    run.save(wait=True)
    with pytest.raises(CheckpointError, match=r"step-000001 cannot be loaded.*--fresh"):
        Run(tmp_path, hidden=64).restore()
