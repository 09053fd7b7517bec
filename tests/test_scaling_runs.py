"""The real job under Ray at one and two workers, timed and profiled; and what is refused before."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hybrid import config as configs
from hybrid.errors import ConfigError
from hybrid.planning.verdict import Knob
from hybrid.profiles import Tried, turned
from hybrid.project import Project
from hybrid.scaling_runs import default_counts, scale

DEBUG = Path(__file__).parents[1] / "examples/debug/hybrid.yaml"


def project(folder: Path, **training: Any) -> Project:
    loaded = configs.load(DEBUG, {f"training.{k}": v for k, v in training.items()})
    dumped = loaded.model_dump(mode="json")
    for key in ("train", "holdout"):
        dumped["data"][key] = [str(folder / "data" / Path(p).name) for p in dumped["data"][key]]
    dumped["run"]["dir"] = str(folder)
    return Project(configs.parse(dumped))


def test_counts_double_up_to_the_most() -> None:
    assert default_counts(1) == [1]
    assert default_counts(8) == [1, 2, 4, 8]
    assert default_counts(6) == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"workers": [0, 1]}, "--workers 0"),
        ({"steps": 2}, "--steps 2"),
        ({"warmup": 0}, "--warmup 0"),
        ({"workers": [1, 8]}, "micro_batches"),
        ({"modes": []}, "strong or weak"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        scale(project(tmp_path), **options)


def test_knobs_turn_keys_that_are_there_and_say_so_where_not(tmp_path: Path) -> None:
    config = project(tmp_path, strategy="fsdp", precision="float32").config
    doubled = turned(config, Knob(name="b", text="", settings={"training.micro_batch": "x2"}))
    assert not isinstance(doubled, Tried)
    assert doubled.training.micro_batch == 2 * config.training.micro_batch
    ddp = Knob(name="d", text="", settings={"training.strategy": "ddp"})
    changed = turned(config, ddp)
    assert not isinstance(changed, Tried)
    again = turned(changed, ddp)
    assert isinstance(again, Tried)
    assert again.outcome == "already so"
    compiled = turned(config, Knob(name="c", text="", settings={"training.parallel.compile": True}))
    assert not isinstance(compiled, Tried)
    assert compiled.training.parallel.compile
    for knob in (Knob(name="n", text="t"), Knob(name="n", text="t", settings={"training.x": 1})):
        by_hand = turned(config, knob)
        assert isinstance(by_hand, Tried)
        assert (by_hand.outcome, by_hand.text) == ("by hand", "t")


@pytest.mark.full
@pytest.mark.ray
def test_the_real_job_is_swept_resumed_and_profiled(tmp_path: Path, ray_cluster: Any) -> None:
    made = project(tmp_path)
    said: list[str] = []

    def note(record: dict[str, Any]) -> None:
        said.extend([record["message"]] if "message" in record else [])

    options: dict[str, Any] = {"steps": 5, "warmup": 2, "modes": ["strong"], "on_progress": note}
    [first] = made.scale(workers=[1], **options)
    assert "one point" in first.fit.notes[0]
    [sweep] = made.scale(workers=[1, 2], **options)
    assert "strong, 1 workers: measured before" in said
    assert sweep.measured[0] == first.measured[0]
    assert [m.workers for m in sweep.measured] == [1, 2]
    assert all(len(m.step_s) == 5 for m in sweep.measured)
    assert sweep.fit.model == "none"
    assert "no residual" in sweep.fit.notes[0]
    assert {m.machines for m in sweep.measured} == {1}
    assert not list((tmp_path / "runs").glob("scale-*"))

    done = made.profile(workers=2, steps=2, warmup=2, on_progress=note)
    assert [t.rank for t in done.ranks] == [0, 1]
    assert all(t.world_size == 2 and t.collectives for t in done.ranks)
    assert done.verdict.warnings == ()
    assert all("forward and backward" in t.phases for t in done.ranks)
    with gzip.open(done.ranks[0].path) as stream:
        assert json.load(stream)["traceEvents"]
    assert dataclasses.asdict(done.verdict)["bound"]
