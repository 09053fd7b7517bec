"""Early stopping, going on after a kill, and many ranks: each ends where it should."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import lora_support
import worlds
from lora_support import spec, trained, write_rows

from hybrid.errors import TrainingError
from hybrid.training import rows
from hybrid.training.adapter_batches import Batches, split
from hybrid.training.adapter_loop import evaluate
from hybrid.training.adapter_loss import AnswerLoss
from hybrid.training.adapter_state import FILE, load_state
from hybrid.training.lora import Base, train_adapter

WEIGHTS = "adapter_model.safetensors"
EARLY = {"share": 0.3, "every": 5, "patience": 2}


def test_training_ends_where_other_rows_gain_nothing(base: Path, tmp_path: Path) -> None:
    """Answers that follow from nothing: what is learnt of them is of no use to other rows."""
    noise = [(f"number {i}", ("quick", "lazy")[i * 7919 % 13 % 2]) for i in range(40)]
    write_rows(tmp_path / "train.jsonl", noise)
    write_rows(tmp_path / "holdout.jsonl", noise[:1])
    config = spec(tmp_path, {"steps": 300, "early_stopping": EARLY, "lr": 0.01})
    looks: list[dict[str, Any]] = []
    made, data = Base(base, "b"), rows.read("a", config)
    done = train_adapter(made, config, data, tmp_path / "run/a", seed=1, report=looks.append)
    assert done["steps"] < 300
    assert done["best_step"] == done["steps"] - 2 * EARLY["every"]
    seen = {r["step"]: r["validation_loss"] for r in looks if "validation_loss" in r}
    assert done["validation_loss"] == seen[done["best_step"]] == min(seen.values())

    from peft import PeftModel

    model = PeftModel.from_pretrained(Base(base, "b").model, tmp_path / "run/a")
    _, aside = split(data.train, EARLY["share"], "")
    batches = Batches(made, config, aside, None, 0)
    kept = evaluate(AnswerLoss(model.base_model.model), batches.all(), made.world)
    assert kept == pytest.approx(done["validation_loss"], rel=1e-4), "the best weights are saved"


KILLED = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from lora_support import spec, trained
trained(Path({base!r}), spec(Path({folder!r}), {lora!r}), Path({folder!r}) / "killed/a")
"""


def test_a_killed_run_goes_on_to_the_same_adapter(base: Path, folder: Path) -> None:
    """SIGKILL midway; the second process ends with the very bytes of an uninterrupted run."""
    lora = {"steps": 80, "checkpoint_every": 7, "dropout": 0.1}
    lora["early_stopping"] = {"share": 0.3, "every": 20, "patience": 100}
    code = KILLED.format(
        here=str(Path(__file__).parent), base=str(base), folder=str(folder), lora=lora
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    state, deadline = folder / "killed" / FILE, time.monotonic() + 60
    while not state.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "killed/a").exists()
    at = load_state(folder / "killed", torch.device("cpu"))[0].step
    assert 0 < at < 80 and at % 7 == 0

    resumed = trained(base, spec(folder, lora), folder / "killed/a")
    whole = trained(base, spec(folder, lora), folder / "whole/a")
    assert resumed.pop("resumed_from") == at
    assert resumed == whole
    assert (folder / "killed/a" / WEIGHTS).read_bytes() == (
        folder / "whole/a" / WEIGHTS
    ).read_bytes()


def test_a_damaged_checkpoint_is_not_gone_on_from(base: Path, folder: Path) -> None:
    config = spec(folder, {"steps": 6, "checkpoint_every": 3})
    trained(base, config, folder / "run/a")
    whole = (folder / "run/a" / WEIGHTS).read_bytes()
    path = folder / "run" / FILE
    for damage in (lambda raw: raw[:-9], lambda raw: raw[:40] + b"x" + raw[41:], lambda raw: b""):
        path.write_bytes(damage(path.read_bytes()))
        said: list[dict[str, Any]] = []
        data = rows.read("a", config)
        done = train_adapter(
            Base(base, "b@1"), config, data, folder / "run/a", seed=1, report=said.append
        )
        assert "damaged" in said[0]["message"]
        assert "resumed_from" not in done
        assert (folder / "run/a" / WEIGHTS).read_bytes() == whole


def test_a_loss_that_is_no_number_ends_it(base: Path, folder: Path) -> None:
    with pytest.raises(TrainingError, match=r"step \d+: loss is"):
        trained(base, spec(folder, {"lr": 1e30, "steps": 9}), folder / "run/a")


GRID = {
    "steps": 8,
    "batch": 9,
    "micro_batches": 3,
    "dropout": 0.1,
    "early_stopping": {"share": 0.3, "every": 4, "patience": 9},
    "modules_to_save": ("lm_head",),
}


@pytest.mark.parametrize("kind", ["choice", "embed"])
def test_two_ranks_train_and_save_what_one_does(base: Path, folder: Path, kind: str) -> None:
    """The base sharded over two processes; three micro-batches do not divide by two."""
    write_rows(folder / "train.jsonl", [(f"the {i} fox", f"lazy {i % 7}") for i in range(24)])
    config = spec(folder, {**GRID, "workers": 2}, kind=kind)
    one = trained(base, config, folder / "one/a")
    two = worlds.run(
        2, folder / "world", lora_support.trained_sharded, base, config, folder / "two/a"
    )
    assert two == pytest.approx(one, rel=1e-5)
    want, got = (load_file(folder / name / "a" / WEIGHTS) for name in ("one", "two"))
    assert want.keys() == got.keys()
    moved = 0.0
    for name in want:
        assert got[name].shape == want[name].shape, f"{name} is whole"
        assert torch.allclose(got[name], want[name], atol=1e-4), name
        moved = max(moved, float(want[name].abs().max()) if "lora_B" in name else 0.0)
    assert moved > 1e-3, "something was trained"
