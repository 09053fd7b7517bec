"""The training loop on 1, 2 and 3 processes: the same losses, whoever computes what."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds

from hybrid import config
from hybrid.config import ProjectConfig
from hybrid.errors import CheckpointError, TrainingError
from hybrid.training.corpus import prepare_once
from hybrid.training.data import prepare_data
from hybrid.training.loop import Job, train
from hybrid.training.optimizer import learning_rate
from hybrid.training.progress import read_progress

DEBUG = Path(__file__).parents[2] / "examples/debug/hybrid.yaml"
GOLDEN_LOSS = 4.966
"""Of the debug preset after 8 steps, within GOLDEN_WITHIN: processors add in different orders."""
GOLDEN_WITHIN = 0.02


def project(folder: Path, **training: Any) -> ProjectConfig:
    settings = {"steps": 8, "checkpoint.every": 4, "eval_every": 8, **training}
    loaded = config.load(DEBUG, {f"training.{k}": v for k, v in settings.items()})
    dumped = loaded.model_dump(mode="json")
    for section, key in (("data", "train"), ("data", "holdout")):
        dumped[section][key] = [str(folder / "data" / Path(p).name) for p in dumped[section][key]]
    dumped["run"]["dir"] = str(folder)
    return config.parse(dumped)


def job(folder: Path, run_id: str = "run", **training: Any) -> Job:
    made = project(folder, **training)
    prepare_once(made.data, folder / "data")
    return Job(config=made, data=prepare_data(made), run_id=run_id)


def losses(made: Job) -> list[float]:
    return [r["loss"] for r in read_progress(made.folder) if r["event"] == "step"]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Float64 losses of one process: what every other world must give."""
    folder = tmp_path_factory.mktemp("single")
    made = job(folder, strategy="single", precision="float64", micro_batches=4)
    train(made)
    return losses(made)


@pytest.mark.parametrize(("size", "strategy"), [(2, "fsdp"), (3, "fsdp"), (2, "ddp"), (1, "fsdp")])
def test_any_world_gives_the_same_float64_losses(
    tmp_path: Path, single: list[float], size: int, strategy: str
) -> None:
    """Four micro-batches on three ranks do not divide: two of them are padding."""
    made = job(tmp_path, strategy=strategy, precision="float64", micro_batches=4)
    worlds.run(size, tmp_path / "world", train, made)
    assert losses(made) == pytest.approx(single, abs=1e-9)


def test_float32_stays_near_and_learns(tmp_path: Path, single: list[float]) -> None:
    made = job(tmp_path, strategy="fsdp", precision="float32")
    final = worlds.run(2, tmp_path / "world", train, made)
    assert losses(made) == pytest.approx(single, abs=2e-3)
    assert final["train_loss"] == pytest.approx(GOLDEN_LOSS, abs=GOLDEN_WITHIN)
    assert final["eval_loss"] < losses(made)[0]
    assert final["world_size"] == 2


def test_a_stopped_run_goes_on_in_another_world(tmp_path: Path, single: list[float]) -> None:
    """Two processes to step 4, then three to the end: as if it had never stopped."""
    first = job(tmp_path, strategy="fsdp", precision="float64", steps=4, warmup_steps=4)
    whole = job(tmp_path, strategy="fsdp", precision="float64")
    worlds.run(2, tmp_path / "w2", worlds.train_until, whole, 4)
    worlds.run(3, tmp_path / "w3", train, whole)
    assert losses(whole) == pytest.approx(single, abs=1e-9)
    starts = [r["step"] for r in read_progress(whole.folder) if r["event"] == "start"]
    assert starts == [0, 4]
    assert first.checkpoints == whole.checkpoints


def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path: Path) -> None:
    made = job(tmp_path, strategy="single", precision="float32")
    train(made)
    newest, older = (Path(made.checkpoints) / f"step-{n:06d}" for n in (8, 4))
    [part] = newest.glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-100])
    before = losses(made)
    train(made)
    start = [r for r in read_progress(made.folder) if r["event"] == "start"][-1]
    assert start["step"] == 4
    assert "step-000008" in start["rejected_checkpoints"][0]
    assert losses(made)[8:] == pytest.approx(before[4:], abs=1e-6)

    for path in (newest, older):
        marker = path / "commit.json"
        marker.write_text(marker.read_text()[:-5])
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        train(made)
    for path in (newest, older):
        (path / "commit.json").unlink()  # never committed: they do not count
    train(made)
    assert [r for r in read_progress(made.folder) if r["event"] == "start"][-1]["step"] == 0


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not finite"):
        train(job(tmp_path, strategy="single", lr=1e30, warmup_steps=0))


def test_the_export_is_a_hugging_face_model_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = job(tmp_path, strategy="single", steps=1)
    train(made)
    model = AutoModelForCausalLM.from_pretrained(made.export)
    tokenizer = AutoTokenizer.from_pretrained(made.export)
    assert model.config.vocab_size == len(tokenizer)
    text = "The Alcyone, 120 tons — één."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    names = json.loads((made.export / "config.json").read_text())
    assert names["eos_token_id"] == tokenizer.eos_token_id


def test_the_learning_rate_warms_up_and_falls_to_its_floor(tmp_path: Path) -> None:
    settings = project(tmp_path, steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.1).training
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_same_seed_gives_the_same_data(tmp_path: Path) -> None:
    one, two = job(tmp_path / "a"), job(tmp_path / "b")
    assert one.data.digest == two.data.digest
    shutil.rmtree(tmp_path / "b/shards")
    assert prepare_data(two.config).digest == one.data.digest
