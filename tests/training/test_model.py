"""Bases that are loaded rather than made, and what is wrong with some of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hybrid import config
from hybrid.config import ProjectConfig
from hybrid.errors import ConfigError
from hybrid.registry import Registry
from hybrid.testing_models import tiny_base
from hybrid.training.data import load_tokenizer, prepare_data
from hybrid.training.loop import Job, train
from hybrid.training.model import build_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_base(tmp_path / "source", initializer_range=0.05)


def project(folder: Path, source: Path) -> ProjectConfig:
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    training = {
        "steps": 2, "sequence_length": 16, "micro_batch": 2, "micro_batches": 1,
        "warmup_steps": 0, "strategy": "single", "checkpoint": {"every": 2}, "eval_every": 2,
    }  # fmt: skip
    return config.parse(
        {
            "run": {"name": "t", "dir": str(folder / "run")},
            "model": {"name": "b", "source": str(source)},
            "data": {"train": [str(folder / "corpus.txt")]},
            "training": training,
        }
    )


def test_a_base_from_a_directory_is_trained_on_and_keeps_its_tokenizer(
    tmp_path: Path, source: Path
) -> None:
    made = project(tmp_path, source)
    job = Job(config=made, data=prepare_data(made), run_id="r")
    final = train(job)
    assert final["steps"] == 2
    published = Registry(tmp_path / "registry").publish("base", "b", job.export)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        f.path for f in published.files
    }
    old, new = load_tokenizer(source), load_tokenizer(job.export)
    assert new("the lazy dog")["input_ids"] == old("the lazy dog")["input_ids"]
    trained = (job.export / "model.safetensors").read_bytes()
    assert trained != (source / "model.safetensors").read_bytes()


def test_what_is_no_base_is_refused(tmp_path: Path, source: Path) -> None:
    made = project(tmp_path, source)
    tokenizer = load_tokenizer(source)
    shutil.copytree(source, tmp_path / "small")
    small = tmp_path / "small/config.json"
    small.write_text(json.dumps({**json.loads(small.read_text()), "vocab_size": 10}))
    with pytest.raises(ConfigError, match="the tokenizer has 300 tokens, the model's"):
        build_model(project(tmp_path, tmp_path / "small").model, tokenizer, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build_model(project(tmp_path, tmp_path / "empty").model, tokenizer, 0)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.source"):
        build_model(made.model, tokenizer, 0)
