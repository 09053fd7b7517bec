"""DeepSpeed's ZeRO-3 on two processes: the same numbers and the same checkpoints as ours."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

import strategy_worlds
import worlds
import zero_worlds
from test_loop import job, losses

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training import zero_setup
from hybrid.training.loop import train
from hybrid.training.progress import read_progress
from hybrid.training.world import Precision, World

CLOSE = 2e-6
"""In float32, over three steps: what ddp and fsdp differ by as well."""

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
RELAY = [ZERO, FSDP, ZERO, DDP, ZERO]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    return worlds.run(  # type: ignore[no-any-return]
        2, folder / "world", zero_worlds.everything, list(STRATEGIES.values()), RELAY, folder
    )


def numbers(found: dict[str, Any], name: str) -> list[float]:
    return found["numbers"][list(STRATEGIES).index(name)]  # type: ignore[no-any-return]


@needs_deepspeed
@pytest.mark.parametrize("name", [n for n in STRATEGIES if "bfloat16" not in n])
def test_losses_and_norms_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    alone = strategy_worlds.Run(settings("single")).steps(0, 3)
    assert numbers(found, name) == pytest.approx(alone, abs=CLOSE)


@needs_deepspeed
def test_bfloat16_is_that_of_fsdp_and_its_master_copy_float32(found: dict[str, Any]) -> None:
    ours = numbers(found, "fsdp in bfloat16")
    assert numbers(found, "bfloat16") == pytest.approx(ours, abs=CLOSE)
    assert ours != pytest.approx(numbers(found, "fsdp"), abs=CLOSE)


@needs_deepspeed
def test_what_deepspeed_saved_others_go_on_from_and_back(found: dict[str, Any]) -> None:
    unbroken = strategy_worlds.Run(settings("single")).steps(0, len(RELAY))
    assert found["relay"] == pytest.approx(unbroken, abs=CLOSE)


@needs_deepspeed
def test_each_rank_holds_its_part_and_a_refused_update_leaves_no_trace(
    found: dict[str, Any],
) -> None:
    seen = found["looked at"]
    assert seen["held"] == seen["whole"] / 2
    assert seen["gathered"] == 0
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(seen["names"])
    assert seen["kept"]
    assert seen["norms"][0] == seen["norms"][1]  # gradients are not added to those refused
    assert seen["dtypes"] == ["torch.float32"]


@needs_deepspeed
def test_the_loop_goes_on_in_another_world_and_exports_the_model(tmp_path: Path) -> None:
    """On two ranks to step 4, then on three, where no matrix divides, against fsdp on two."""
    ours = job(tmp_path, run_id="fsdp", strategy="fsdp", precision="float32")
    made = job(tmp_path, run_id="deepspeed", strategy="deepspeed", precision="float32")
    expected = worlds.run(2, tmp_path / "w2", train, ours)
    worlds.run(2, tmp_path / "z2", worlds.train_until, made, 4)
    final = worlds.run(3, tmp_path / "z3", train, made)
    assert losses(made) == pytest.approx(losses(ours), abs=1e-5)
    assert final["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
    steps = [r for r in read_progress(made.folder) if r["event"] == "step"]
    assert steps[0]["gradient_bytes"] > 0
    weights, theirs = (load_file(one.export / "model.safetensors") for one in (made, ours))
    assert weights.keys() == theirs.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"parallel": {"reshard": False}}, "parallel.reshard"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor"),
        ({"parallel": {"shard": 2}}, "parallel.shard"),
        ({"parallel": {"offload": True}}, "parallel.offload"),
        ({"parallel": {"compile": True}}, "parallel.compile"),
        ({"precision": "float64"}, "precision"),
        ({"compression": {"kind": "bf16"}}, "compression.kind"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(more: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: .*deepspeed"):
        settings(**more)


def test_a_missing_package_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_setup, "installed", lambda: False)
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    precision = Precision.of("float32", alone.device)
    with pytest.raises(ConfigError, match=r"hybrid\[deepspeed\]") as refused:
        zero_setup.partition(strategy_worlds.model(), ZERO, precision, alone)
    assert refused.value.param == "training.strategy"
