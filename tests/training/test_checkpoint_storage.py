"""Checkpoints on storage that goes away, is full, or is S3; runs that are killed as they write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

sys.path.insert(0, str(Path(__file__).parent))

import checkpoint_worlds
import worlds
from checkpoint_runs import Run, same, state_of
from checkpoint_worlds import weights
from s3_server import s3_server

from hybrid.errors import CheckpointError
from hybrid.training.storage import Storage


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
