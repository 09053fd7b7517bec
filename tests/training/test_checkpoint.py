"""Checkpoints: nothing half written counts, damage is passed over, any world takes up any other."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

sys.path.insert(0, str(Path(__file__).parent))

import checkpoint_worlds
import worlds
from checkpoint_worlds import Numbers, model_and_optimizer, step, weights
from s3_server import s3_server

from hybrid.config import CheckpointConfig
from hybrid.errors import CheckpointError
from hybrid.training.checkpoint import Checkpoints
from hybrid.training.parallel import World
from hybrid.training.storage import Storage

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class Run:
    """A model in training with checkpoints of its own, in this process."""

    def __init__(
        self,
        url: Path | str,
        hidden: int = 32,
        retry_s: tuple[float, ...] = (0, 0),
        **settings: Any,
    ) -> None:
        self.records: list[dict[str, Any]] = []
        self.checkpoints = Checkpoints(
            url, ALONE, CheckpointConfig(**{"every": 1, **settings}), self._record, retry_s
        )
        self.model, self.optimizer = model_and_optimizer(hidden=hidden)
        self.done = 0

    def _record(self, event: str, **fields: Any) -> None:
        self.records.append({"event": event, **fields})

    def restore(self, **more: Any) -> Run:
        self.restored = self.checkpoints.restore(self.model, self.optimizer, **more)
        self.done = self.restored.step
        return self

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            step(self.model, self.optimizer, self.done)
            self.done += 1

    def save(self, **more: Any) -> None:
        self.checkpoints.save(self.done, self.model, self.optimizer, **more)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["event"] == kind]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def state_of(run: Run) -> dict[str, Any]:
    moments = run.optimizer.state_dict()["state"]
    flat = {f"{i}.{k}": v.clone() for i, s in moments.items() for k, v in s.items()}
    return {**weights(run.model), **flat}


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


# --- storage that fails -------------------------------------------------------------------


def test_storage_that_is_gone_for_a_while_costs_no_run(tmp_path: Path) -> None:
    """The folder is away for two saves; the third is taken."""
    url = tmp_path / "s"
    run = Run(url).restore()
    run.train()
    run.save(wait=True)
    url.rename(tmp_path / "away")
    url.touch()
    for _ in range(2):
        run.train()
        assert run.checkpoints.due(run.done, 0.01)
        run.save()
        run.checkpoints.close()
    failed = run.events("checkpoint_failed")
    assert [(r["step"], r["failures"], r["retry_s"]) for r in failed] == [(2, 1, 0), (3, 2, 0)]
    assert "rank 0" in failed[0]["error"]
    url.unlink()
    (tmp_path / "away").rename(url)
    run.train()
    assert run.checkpoints.due(run.done, 0.01)
    run.save(wait=True)
    assert Run(url).restore().restored.step == 4


def test_too_many_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    url = tmp_path / "s"
    run = Run(url).restore()
    run.train()
    run.save(wait=True)
    url.rename(tmp_path / "away")
    url.touch()
    with pytest.raises(
        CheckpointError, match=r"3 checkpoints in a row.*last good one is of step 1"
    ):
        run.save(wait=True)


def test_a_failed_save_waits_before_it_is_tried_again(tmp_path: Path) -> None:
    url = tmp_path / "s"
    run = Run(url, retry_s=(3600.0,), every=2).restore()
    url.rmdir()
    url.touch()
    run.train(2)
    run.save()
    run.checkpoints.close()
    for _ in range(4):
        run.train()
        assert not run.checkpoints.due(run.done, 0.01)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    at = tmp_path / "disk"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(at)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a disk of 1 MiB cannot be mounted here (needs root)")
    yield at
    subprocess.run(["umount", str(at)], check=True)


def test_a_full_disk_keeps_the_last_good_one(disk: Path) -> None:
    run = Run(disk, hidden=48, keep=1).restore()  # 0.7 MB: one fits, two do not
    run.train()
    run.save(wait=True)
    run.train()
    run.save()
    run.checkpoints.close()
    [failed] = run.events("checkpoint_failed")
    assert failed["step"] == 2 and "No space left" in failed["error"]
    assert list((disk / "step-000002").iterdir()) == [], "half a file would take others' room"
    assert Run(disk, hidden=48).restore().restored.step == 1
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    run.train()
    assert run.checkpoints.due(run.done, 0.01)
    run.save()
    run.checkpoints.close()
    assert [p.name for p in disk.iterdir()] == ["step-000003"]


# --- several ranks ------------------------------------------------------------------------


def test_killed_between_write_and_commit_then_other_worlds_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP on two ranks, killed; FSDP and DDP on three; one alone: on a real S3 API."""
    with s3_server() as endpoint:
        for name, value in (
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        httpx.put(f"{endpoint}/bucket").raise_for_status()
        url = "s3://bucket/prefix/run"
        with pytest.raises((ProcessExitedException, ProcessRaisedException)):
            worlds.run(2, tmp_path / "two", checkpoint_worlds.go_on, url, "fsdp", 3, 3)
        left = Storage(url).names("step-000003")
        assert len([n for n in left if n.endswith(".safetensors")]) == 2, "both had written"
        assert "commit.json" not in left
        fsdp, ddp, again = worlds.run(3, tmp_path / "three", checkpoint_worlds.go_on_twice, url)
        alone = Run(url).restore()
    assert fsdp["from"] == 2 and fsdp["rejected"] == ()
    assert fsdp["policy"]["norms"] == [1.0, 2.0]
    assert torch.equal(fsdp["policy"]["sum"], torch.tensor([2.0, 2.0]))
    assert fsdp["seen"] == [-1, -1, -1], "each rank's own state was of another world size"
    assert ddp["from"] == 4 and ddp["seen"] == [0, 1, 2]
    assert again["from"] == 5 and same(again["weights"], ddp["weights"])
    assert fsdp["tied"] and ddp["tied"] and ddp["steps"] == [4, 5], "the newest two are kept"
    assert alone.restored.step == 5 and same(weights(alone.model), ddp["weights"])
    uninterrupted = Run(tmp_path / "other")
    uninterrupted.train(5)
    for name, tensor in weights(uninterrupted.model).items():
        assert torch.allclose(ddp["weights"][name], tensor, atol=1e-5), name
    alone.train()
    uninterrupted.train()
    after = state_of(uninterrupted)
    for name, tensor in state_of(alone).items():
        assert torch.allclose(tensor, after[name], atol=1e-4), name
