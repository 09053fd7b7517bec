"""hybrid.yaml: every mistake is named with file, key, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid import config
from hybrid.errors import ConfigError

GOOD: dict[str, Any] = {"run": {"name": "t"}, "model": {"name": "b"}}


def write(folder: Path, data: Any) -> Path:
    path = folder / "hybrid.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"training": {"stepps": 3}}, "training.stepps: unknown key; did you mean 'steps'?"),
        ({"trainin": {}}, "trainin: unknown key; did you mean 'training'?"),
        ({"adapters": {"a": {"train": "x", "holdout": "y", "lora": {"rnk": 1}}}},
         "adapters.a.lora.rnk: unknown key; did you mean 'rank'?"),
        ({"agents": {"specs": {"a": {"descripton": "x"}}}},
         "agents.specs.a.descripton: unknown key; did you mean 'description'?"),
        ({"training": {"steps": 0}}, "training.steps: 0:"),
        ({"training": {"steps": "many"}}, "training.steps: 'many':"),
        ({"training": {"strategy": "fdsp"}}, "training.strategy: 'fdsp': Input should be"),
        ({"training": {"sequence_length": 999}}, "is longer than model.context (256)"),
        ({"model": {"name": "b", "heads": 5}}, "whole, even head dimension"),
        ({"model": {"name": "b", "kv_heads": 3}}, "multiple of kv_heads"),
        ({"model": {"name": "Böse"}}, "model.name: 'Böse':"),
        ({"model": None}, "model:"),
        ({"adapters": {"a": {"train": "x", "holdout": "y", "template": "no"}}}, "{input}"),
        ({"serving": {"port": 70000}}, "serving.port: 70000:"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write(tmp_path, {**GOOD, **change})
    with pytest.raises(ConfigError) as e:
        config.load(path)
    assert says in e.value.message
    assert e.value.message.startswith(str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected a mapping"),
        (b"- a", "expected a mapping, found list"),
        (b"a: [", "hybrid.yaml"),
        (b"run: {name: \xff}", "not UTF-8 at byte 12"),
        (b"{}", "run: missing"),
    ],
)
def test_what_is_no_project_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "hybrid.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        config.load(path)
    with pytest.raises(ConfigError, match="no such file"):
        config.load(tmp_path / "none.yaml")


def test_relative_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    data = {
        **GOOD,
        "data": {"train": ["a/*.txt", "s3://bucket/x"]},
        "adapters": {
            "a": {"train": "t.jsonl", "holdout": "h.jsonl", "augment": "aug.py:f"},
            "b": {"train": "t.jsonl", "holdout": "h.jsonl", "augment": "package.module.f"},
        },
    }
    made = config.load(write(tmp_path, data))
    assert made.run.dir == tmp_path / ".hybrid"
    assert made.data.train == (str(tmp_path / "a/*.txt"), "s3://bucket/x")
    assert made.adapters["a"].augment == str(tmp_path / "aug.py:f")
    assert made.adapters["b"].augment == "package.module.f"
    assert config.parse(made.model_dump(mode="json")) == made, "it survives the wire"


def test_overrides_replace_keys_and_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    made = config.load(path, {"training.steps": 7, "serving.port": 0})
    assert (made.training.steps, made.serving.port) == (7, 0)
    with pytest.raises(ConfigError, match="is not a section"):
        config.load(path, {"run.name.x": 1})
    with pytest.raises(ConfigError, match="unknown key"):
        config.load(path, {"training.stepz": 1})


def test_the_configuration_cannot_be_changed() -> None:
    made = config.parse(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        made.training.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["legal", "debug"])
def test_the_examples_are_fine(name: str) -> None:
    root = Path(__file__).parents[1] / "examples"
    assert config.load(root / name / "hybrid.yaml").run.name == name
