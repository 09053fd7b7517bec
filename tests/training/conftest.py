"""What the tests of adapters train on: one tiny base for all of them, and a few rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybrid.testing_models import tiny_base

sys.path.insert(0, str(Path(__file__).parent))
from lora_support import PAIRS, write_rows


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nobody writes to."""
    return tiny_base(tmp_path_factory.mktemp("base") / "base", initializer_range=0.15)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", PAIRS * 4)
    write_rows(tmp_path / "holdout.jsonl", PAIRS[:2])
    return tmp_path
