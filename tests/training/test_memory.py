"""The estimate of memory against what the allocator hands out in real steps."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from memory_worlds import DEBUG, HUGE, MID, WIDE, measured, measured_all, project, shape

from hybrid.config import ProjectConfig
from hybrid.testing_models import tiny_base
from hybrid.training.memory import ADVICE, Layout, estimate
from hybrid.training.model import architecture

WITHIN = 0.15
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'hybrid[deepspeed]'",
)


def estimated(made: ProjectConfig, workers: int, **more: Any) -> Any:
    return estimate(partial(shape, made), made.training, workers=workers, gpu=False, **more)


CASES = [
    (DEBUG, {"micro_batches": 2}),
    (DEBUG, {"precision": "bfloat16"}),
    (MID, {"micro_batch": 1, "micro_batches": 2}),
]


@pytest.mark.parametrize(("model", "training"), CASES)
def test_the_estimate_holds_on_one_process(model: Any, training: Any) -> None:
    made = project(model, strategy="single", **training)
    got = measured(made)
    assert estimated(made, 1).total == pytest.approx(got, rel=WITHIN)


def test_the_estimate_holds_when_spread_over_two(tmp_path: Path) -> None:
    made = [
        project(DEBUG, strategy=strategy, workers=2, micro_batches=batches)
        for strategy, batches in (("ddp", 4), ("fsdp", 2), ("fsdp", 4))
    ]
    for one, peak in zip(made, worlds.run(2, tmp_path, measured_all, made), strict=True):
        told = estimated(one, 2)
        assert told.total == pytest.approx(peak, rel=WITHIN), (one.training, told)


def test_the_estimate_of_hsdp_knows_the_ranks_of_a_node() -> None:
    """A copy is shared by a node's ranks: the fewer they are, the more each holds."""
    made = project(DEBUG, strategy="hsdp", workers=8)
    eight, four, two = (estimated(made, 8, per_node=n).terms["parameters"] for n in (8, 4, 2))
    assert eight * 4 == four * 2 == two
    given = project(DEBUG, strategy="hsdp", workers=8, parallel={"shard": 2})
    assert estimated(given, 8, per_node=4).terms["parameters"] == two


@needs_deepspeed
def test_the_estimate_holds_for_deepspeed(tmp_path: Path) -> None:
    made = [
        project(model, strategy="deepspeed", workers=2, micro_batches=batches, precision=precision)
        for model in (DEBUG, WIDE)
        for batches, precision in ((4, "float32"), (2, "bfloat16"))
    ]
    for one, peak in zip(made, worlds.run(2, tmp_path, measured_all, made), strict=True):
        told = estimated(one, 2)
        assert told.total == pytest.approx(peak, rel=WITHIN), (one.training, told)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("sizes", [(2, 128), (4, 256)])
def test_the_estimate_holds_for_every_precision(tmp_path: Path, precision: str, sizes: Any) -> None:
    rows, length = sizes
    more = {"precision": precision, "micro_batch": rows, "sequence_length": length}
    alone = project(MID, strategy="single", micro_batches=1, **more)
    assert estimated(alone, 1).total == pytest.approx(measured(alone), rel=WITHIN)
    made = [
        project(MID, strategy=strategy, workers=2, micro_batches=batches, **more)
        for strategy in ("ddp", "fsdp")
        for batches in (2, 4)
    ]
    for one, peak in zip(made, worlds.run(2, tmp_path, measured_all, made), strict=True):
        told = estimated(one, 2)
        assert told.total == pytest.approx(peak, rel=WITHIN), (one.training, told)


def test_seventy_billion_parameters_are_estimated_without_memory() -> None:
    made = project(HUGE, sequence_length=4096, micro_batch=1, precision="bfloat16", workers=64)
    told = estimated(made, 64, layout=Layout(strategy="fsdp", shards=64))
    assert told.parameters == pytest.approx(70.5e9, rel=0.01)
    assert told.checkpoint == told.parameters * 12
    assert told.dominant == "activations"
    assert "micro_batch" in told.advice
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert resident < 8 * 2**30 < told.total

    alone = estimated(made, 1, layout=Layout(strategy="single", shards=1))
    assert alone.dominant == "optimiser"
    assert alone.terms["optimiser"] == 2 * alone.terms["parameters"] == 8 * told.parameters


def test_every_way_to_spread_saves_what_it_promises() -> None:
    made = project(MID, precision="bfloat16", micro_batches=8)
    told = {
        name: estimated(made, 8, layout=Layout(**layout))
        for name, layout in {
            "ddp": {"strategy": "ddp", "shards": 1},
            "fsdp": {"strategy": "fsdp", "shards": 8},
            "kept": {"strategy": "fsdp", "shards": 8, "reshard": False},
            "hsdp": {"strategy": "hsdp", "shards": 4},
            "tp": {"strategy": "tp", "shards": 4, "tensor": 2},
            "offload": {"strategy": "fsdp", "shards": 8, "offload": True},
            "foreach": {"strategy": "ddp", "shards": 1, "fused": False},
        }.items()
    }
    total = {name: t.total for name, t in told.items()}
    assert total["offload"] < total["fsdp"] < total["kept"]
    assert total["fsdp"] < total["hsdp"] < total["ddp"] <= total["foreach"]
    assert told["tp"].terms["activations"] < told["hsdp"].terms["activations"]
    assert told["offload"].host == pytest.approx(16 * told["fsdp"].parameters / 8, rel=0.01)
    assert len({t.parameters for t in told.values()}) == 1
    for t in told.values():
        assert t.terms.keys() == ADVICE.keys()


def test_a_loaded_base_is_estimated_by_its_own_configuration(tmp_path: Path) -> None:
    source = tiny_base(tmp_path / "base")
    made = project({"source": str(source)}, strategy="single")
    told = estimate(partial(architecture, made.model, 0), made.training, workers=1, gpu=False)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    assert told.parameters == sum(p.numel() for p in model.parameters())
