"""Compressed gradients: a run learns as well, fewer bytes travel, and nothing is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compression_worlds
import worlds

from hybrid.config import TrainingConfig, parse
from hybrid.errors import ConfigError

STEPS = 80
WITHIN = 0.1
"""Nats a token that a compressed run may end above the same run without compression, where a model
that has learnt nothing has 4.2."""


def settings(strategy: str, kind: str, warm_start_steps: int = 4) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "strategy": strategy, "precision": "float32", "lr": 1e-2, "warmup_steps": 5,
            "steps": STEPS, "compression": {"kind": kind, "warm_start_steps": warm_start_steps},
        }
    )  # fmt: skip


KINDS = [
    ("ddp", "none"), ("ddp", "bf16"), ("ddp", "powersgd"), ("ddp", "onebit"),
    ("fsdp", "bf16"),
]  # fmt: skip
RESUMED = ["powersgd", "onebit"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compression")
    return worlds.run(  # type: ignore[no-any-return]
        2, folder / "world", compression_worlds.everything, [settings(*kind) for kind in KINDS],
        STEPS, [settings("ddp", kind, 2) for kind in RESUMED], folder / "checkpoints",
    )  # fmt: skip


def outcome(found: dict[str, Any], strategy: str, kind: str) -> dict[str, Any]:
    return found["outcomes"][KINDS.index((strategy, kind))]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("strategy", "kind"), [k for k in KINDS if k[1] != "none"])
def test_a_compressed_run_learns_as_well(found: dict[str, Any], strategy: str, kind: str) -> None:
    plain = outcome(found, "ddp", "none")["losses"]  # sharded, it gives the same
    got = outcome(found, strategy, kind)["losses"]
    assert plain[0] > 4 > 2 > plain[-1]
    assert got[:2] == pytest.approx(plain[:2], abs=1e-3)
    assert got[-1] < plain[-1] + WITHIN
    assert got != plain


def test_bytes_on_the_wire_are_those_of_a_ring(found: dict[str, Any]) -> None:
    """Two ranks: an all-reduce sends as many bytes as the tensor has."""
    plain = outcome(found, "ddp", "none")
    whole = 4 * plain["parameters"]
    assert plain["figures"]["gradient_bytes"] == whole
    assert "compression_ratio" not in plain["figures"]
    assert 0 < plain["figures"]["comm_bytes"] - whole < 1000
    half = outcome(found, "ddp", "bf16")["figures"]
    assert half["gradient_bytes"] == whole / 2
    assert half["compression_ratio"] == 2.0
    sharded = outcome(found, "fsdp", "bf16")["figures"]
    assert sharded["gradient_bytes"] == pytest.approx(whole / 4, rel=0.01)  # rows are padded
    assert sharded["compression_ratio"] == 2.0


@pytest.mark.parametrize(("kind", "ratio"), [("powersgd", 2.0), ("onebit", 15.0)])
def test_error_feedback_begins_after_the_warm_start(
    found: dict[str, Any], kind: str, ratio: float
) -> None:
    got = outcome(found, "ddp", kind)
    assert got["first"]["gradient_bytes"] == 4 * got["parameters"]
    assert got["figures"]["compression_ratio"] > ratio
    assert len(got["kept"]) >= 14  # seven matrices a block


def test_a_run_that_goes_on_does_what_the_unbroken_one_did(found: dict[str, Any]) -> None:
    """Chunks that share a scale follow DDP's buckets, which a new process groups anew."""
    for kind, within in (("powersgd", 1e-5), ("onebit", 1e-2)):
        got = found["resumed"][RESUMED.index(kind)]
        assert got["off"] == 0.0
        assert got["again"][0] == pytest.approx(got["unbroken"][0], abs=1e-5)
        assert got["again"] == pytest.approx(got["unbroken"], abs=within)
        assert got["figures"] == outcome(found, "ddp", kind)["figures"]


def test_what_is_left_out_is_kept_for_the_next_step(found: dict[str, Any]) -> None:
    assert found["lost"]["onebit"] < 1e-4
    assert found["lost"]["powersgd"] < 1e-4


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fsdp", "powersgd"), ("fsdp", "onebit"), ("hsdp", "powersgd"), ("hsdp", "onebit"),
        ("single", "bf16"), ("tp", "bf16"),
    ],
)  # fmt: skip
def test_what_cannot_be_compressed_is_refused_with_its_key(strategy: str, kind: str) -> None:
    training = {"strategy": strategy, "compression": {"kind": kind}}
    with pytest.raises(ConfigError, match=r"compression\.kind"):
        parse({"run": {"name": "r"}, "model": {"name": "m"}, "training": training})
