"""Every strategy on four processes against one: the same losses, gradient norms and checkpoints."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import strategy_worlds
import worlds

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError

EXACT = 1e-9
"""In float64: sums are only taken in another order."""


def settings(strategy: str, **more: Any) -> TrainingConfig:
    given = {"precision": "float64", "lr": 1e-2, "warmup_steps": 0, "steps": 10, **more}
    return TrainingConfig.model_validate({"strategy": strategy, **given})


SINGLE = settings("single")
STRATEGIES = {
    "ddp": settings("ddp"),
    "fsdp": settings("fsdp"),
    "fsdp, kept gathered": settings("fsdp", parallel={"reshard": False}),
    "fsdp, offloaded": settings("fsdp", parallel={"offload": True}),
    "hsdp": settings("hsdp", parallel={"shard": 2}),
    "tp 2 x fsdp 2": settings("tp", parallel={"tensor": 2}),
    "tp, recomputed": settings("tp", parallel={"tensor": 2, "activation_checkpointing": "full"}),
    "ddp, recomputed in part": settings("ddp", parallel={"activation_checkpointing": "selective"}),
    "fsdp, recomputed": settings("fsdp", parallel={"activation_checkpointing": "full"}),
    "fsdp, several kernels": settings("fsdp", parallel={"fused_optimizer": False}),
}
LEGS = ["tp 2 x fsdp 2", "hsdp", "fsdp, offloaded", "ddp", "tp 2 x fsdp 2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("strategies")
    return worlds.run(  # type: ignore[no-any-return]
        4, folder / "world", strategy_worlds.everything, list(STRATEGIES.values()),
        [STRATEGIES[leg] for leg in LEGS], folder / "checkpoints",
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return strategy_worlds.Run(SINGLE).steps(0, 3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_computes_the_same(
    found: dict[str, Any], alone: list[float], name: str
) -> None:
    got = found["numbers"][list(STRATEGIES).index(name)]
    assert got == pytest.approx(alone, abs=EXACT)


def test_what_is_kept_gathered_is_gathered_once_a_step(found: dict[str, Any]) -> None:
    ddp, dropped, kept = found["accumulated"]  # of two micro-batches
    assert kept[0] == pytest.approx(ddp[0], abs=EXACT)
    assert dropped[0] == pytest.approx(ddp[0], abs=EXACT)
    blocks, held_out = 2, 1 * (2 + 1)  # the evaluation gathers each unit once
    assert kept[1] - held_out == blocks + 1
    assert dropped[1] - held_out == 2 * (2 * blocks + 1)


def test_what_one_strategy_saved_another_goes_on_from(found: dict[str, Any]) -> None:
    unbroken = strategy_worlds.Run(SINGLE).steps(0, len(LEGS))
    assert found["relay"] == pytest.approx(unbroken, abs=EXACT)
    assert torch.isfinite(torch.tensor(unbroken)).all()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU takes g++")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_compute_the_same(alone: list[float], mode: str) -> None:
    made = settings("single", parallel={"compile": True, "activation_checkpointing": mode})
    assert strategy_worlds.Run(made).steps(0, 3) == pytest.approx(alone, abs=EXACT)


def test_to_compile_on_a_cpu_takes_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        strategy_worlds.Run(settings("single", parallel={"compile": True}))
    assert refused.value.param == "training.parallel.compile"
