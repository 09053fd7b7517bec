"""Specialising on a real Ray cluster: refused at once, killed midway, trained by a team."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lora_support import PAIRS, write_rows

from hybrid.config import ProjectConfig
from hybrid.errors import AdapterRefused, TrainingError
from hybrid.registry import Registry
from hybrid.testing import kill, processes
from hybrid.training.specialise import specialise


@pytest.fixture
def project(base: Path, tmp_path: Path) -> ProjectConfig:
    """A published tiny base, and a spec for each way to train on it."""
    write_rows(tmp_path / "train.jsonl", PAIRS * 8)
    write_rows(tmp_path / "holdout.jsonl", PAIRS[:2])
    files = {"train": str(tmp_path / "train.jsonl"), "holdout": str(tmp_path / "holdout.jsonl")}
    lora = {"rank": 8, "alpha": 32, "lr": 0.004, "batch": 8, "dropout": 0.0}
    team = {"workers": 2, "micro_batches": 2, "checkpoint_every": 5, "steps": 300}
    made = ProjectConfig.model_validate(
        {
            "run": {"name": "r", "dir": str(tmp_path / "run")},
            "registry": {"root": str(tmp_path / "registry"), "cache": str(tmp_path / "cache")},
            "model": {"name": "base"},
            "adapters": {
                "solo": {**files, "lora": {**lora, "steps": 60, "base_precision": "nf4"}},
                "team": {**files, "lora": {**lora, **team}},
                "decomposed": {**files, "lora": {**lora, "dora": True}},
            },
        }
    )
    registry_of(made).publish("base", "base", base)
    return made


def registry_of(config: ProjectConfig) -> Registry:
    return Registry(config.registry.root, cache=config.registry.cache)


def test_what_is_not_served_is_refused_before_anything_starts(project: ProjectConfig) -> None:
    """All that is asked for is looked at first: the good one beside it is not trained either."""
    with pytest.raises(AdapterRefused, match=r"adapters.decomposed: use_dora.*nothing was trained"):
        specialise(project, registry_of(project), base="base", only=["solo", "decomposed"])
    assert not (project.run.dir / "adapters").exists()


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_team_that_loses_a_process_goes_on_where_it_was(project: ProjectConfig) -> None:
    registry, only = registry_of(project), ["solo", "team"]
    killed: list[int] = []

    def killing(record: dict[str, Any]) -> None:
        if record.get("adapter") == "team" and record.get("step", 0) >= 50 and not killed:
            killed.append(processes(os.getpid(), "ray::LoraWorker")[-1])
            kill(killed[0])

    with pytest.raises(TrainingError, match="team: a process that trained team is gone"):
        specialise(project, registry, base="base", only=only, on_progress=killing)
    assert [m.name for m in registry.list("adapter")] == ["solo"]

    said: list[dict[str, Any]] = []
    done = specialise(project, registry, base="base", only=only, on_progress=said.append)
    assert said[0] == {"message": "solo@v1 is published already"}
    metrics = done["team"].metrics
    assert metrics["resumed_from"] >= 45
    assert metrics["steps"] == 300
    assert metrics["exact"] == done["solo"].metrics["exact"] == 1.0
    folders = list((project.run.dir / "adapters").iterdir())
    assert not [f for folder in folders for f in folder.glob("state.pt*")], "not needed any more"
    deadline = time.monotonic() + 30
    while processes(os.getpid(), "ray::LoraWorker"):  # a killed actor's process ends a little later
        assert time.monotonic() < deadline, "a process is left running"
        time.sleep(0.1)
