"""A poisoned micro-batch: left out alike by every world and strategy, and written down."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from faults import train_with_poison
from test_loop import job, losses

from hybrid.errors import TrainingError
from hybrid.training.data import ShardSet, load_tokenizer
from hybrid.training.loop import Job
from hybrid.training.progress import read_progress

STEP, INDEX = 2, 1  # counted from 0
SKIP = {"faults.not_finite": "skip", "precision": "float64", "micro_batches": 4}


def record(made: Job, step: int) -> dict[str, Any]:
    path = made.folder / f"bad-batches/step-{step:06d}.json"
    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=_no_constants)
    return content


def _no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One process that left step 3 out: what every other world must give."""
    made = job(tmp_path_factory.mktemp("single"), strategy="single", **SKIP)
    final = train_with_poison(made, STEP, INDEX)
    assert final["skipped_steps"] == 1
    assert math.isfinite(final["train_loss"])
    return made


def test_the_run_goes_on_with_the_next_steps_data(single: Job) -> None:
    steps = [r for r in read_progress(single.folder) if r["event"] == "step"]
    assert [r["step"] for r in steps] == [1, 2, 4, 5, 6, 7, 8]
    assert all(math.isfinite(loss) for loss in losses(single))
    [bad] = [r for r in read_progress(single.folder) if r["event"] == "bad_step"]
    assert (bad["step"], bad["action"]) == (3, "skip")
    assert "not finite" in bad["message"]
    assert Path(bad["batch"]).exists()


def test_the_poisoned_micro_batch_is_written_down_with_its_text(single: Job) -> None:
    written = record(single, STEP + 1)
    assert (written["loss"], written["grad_norm"]) == ("nan", "nan")
    assert written["not_finite"] == [INDEX]
    assert [m["index"] for m in written["micro_batches"]] == [0, 1, 2, 3]
    assert [m["loss"] for m in written["micro_batches"] if m["index"] == INDEX] == ["nan"]
    assert all(m["loss"] > 0 for m in written["micro_batches"] if m["index"] != INDEX)
    [suspect] = written["suspects"]
    settings, seed = single.config.training, written["made_from"]["seed"]
    batch = ShardSet(single.data.train).micro_batch(STEP, INDEX, settings, seed)
    rows = [row["token_ids"] for row in suspect["rows"]]
    assert rows == batch["input_ids"].tolist()
    tokenizer = load_tokenizer(single.data.tokenizer)
    assert suspect["rows"][0]["text"] == tokenizer.decode(rows[0])


@pytest.mark.parametrize(
    ("size", "strategy"), [(2, "fsdp"), pytest.param(3, "ddp", marks=pytest.mark.full)]
)
def test_every_world_leaves_the_same_step_out(
    tmp_path: Path, single: Job, size: int, strategy: str
) -> None:
    made = job(tmp_path, strategy=strategy, **SKIP)
    worlds.run(size, tmp_path / "world", train_with_poison, made, STEP, INDEX)
    assert losses(made) == pytest.approx(losses(single), abs=1e-9)
    written = record(made, STEP + 1)
    assert written["not_finite"] == [INDEX]
    assert written["suspects"][0]["rank"] == INDEX % size
    assert [m["rank"] for m in written["micro_batches"]] == [i % size for i in range(4)]
    assert written["suspects"][0]["rows"] == record(single, STEP + 1)["suspects"][0]["rows"]


def test_a_run_that_is_to_stop_says_where_the_batch_is(tmp_path: Path) -> None:
    made = job(tmp_path, strategy="single")
    with pytest.raises(TrainingError, match=r"step 3: .*not finite; its batch is in .*000003.json"):
        train_with_poison(made, STEP, INDEX)
    assert record(made, 3)["action"] == "stop"


def test_a_spike_is_left_out_and_its_worst_micro_batches_are_written_down(tmp_path: Path) -> None:
    """Every norm of a run whose limit is next to the median is a spike one time in two."""
    faults = {"faults.spike": 1.0001, "faults.max_skipped": 1}
    made = job(tmp_path, strategy="single", steps=60, eval_every=60, **faults)
    with pytest.raises(TrainingError, match="times the recent median"):
        train_with_poison(made, -1, -1)
    first, second = [r for r in read_progress(made.folder) if r["event"] == "bad_step"]
    assert (first["action"], second["action"]) == ("skip", "stop")
    written = record(made, first["step"])
    assert written["not_finite"] == []
    by_loss = sorted(written["micro_batches"], key=lambda m: -m["loss"])
    assert [s["index"] for s in written["suspects"]] == [m["index"] for m in by_loss][:4]
