"""DeepSpeed's ZeRO-3 on two processes: the same numbers and the same checkpoints as ours."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import strategy_worlds
import worlds
import zero_worlds

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError

CLOSE = 2e-6
"""In float32, over three steps: what ddp and fsdp differ by as well."""
ROUGH = 2e-2
"""Products in bfloat16."""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'hybrid[deepspeed]'",
)


def settings(strategy: str = "deepspeed", **more: Any) -> TrainingConfig:
    given = {"precision": "float32", "lr": 1e-2, "warmup_steps": 0, "steps": 10, **more}
    return TrainingConfig.model_validate({"strategy": strategy, **given})


ZERO, FSDP, DDP = settings(), settings("fsdp"), settings("ddp")
STRATEGIES = {
    "deepspeed": ZERO,
    "recomputed": settings(parallel={"activation_checkpointing": "full"}),
    "recomputed in part": settings(parallel={"activation_checkpointing": "selective"}),
    "several kernels": settings(parallel={"fused_optimizer": False}),
    "fsdp": FSDP,
    "ddp": DDP,
    "bfloat16": settings(precision="bfloat16"),
    "fsdp in bfloat16": settings("fsdp", precision="bfloat16"),
}
RELAYS = {"mixed": [ZERO, FSDP, ZERO, DDP, ZERO], "alone": [ZERO, ZERO]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    return worlds.run(  # type: ignore[no-any-return]
        2, folder / "world", zero_worlds.everything, list(STRATEGIES.values()), RELAYS, folder
    )


def numbers(found: dict[str, Any], name: str) -> list[float]:
    return found["numbers"][list(STRATEGIES).index(name)]  # type: ignore[no-any-return]


@needs_deepspeed
@pytest.mark.parametrize("name", [n for n in STRATEGIES if "bfloat16" not in n])
def test_losses_and_norms_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    alone = strategy_worlds.Run(settings("single")).steps(0, 3)
    assert numbers(found, name) == pytest.approx(alone, abs=CLOSE)


@needs_deepspeed
def test_bfloat16_has_a_master_copy_in_float32(found: dict[str, Any]) -> None:
    ours = numbers(found, "fsdp in bfloat16")
    assert numbers(found, "bfloat16") == pytest.approx(ours, abs=ROUGH)
