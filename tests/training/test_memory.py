"""The estimate of memory against what the allocator hands out in real steps."""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent))

import worlds

from hybrid import config
from hybrid.config import ProjectConfig
from hybrid.testing_models import tiny_base
from hybrid.training.memory import ADVICE, Layout, estimate
from hybrid.training.model import architecture

WITHIN = 0.15
DEBUG = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2}
MID = {"hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 4}
HUGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "layers": 80, "heads": 64, "kv_heads": 8,
    "tie_embeddings": False,
}  # fmt: skip
"""Of 101 thousand, 28 million and 70 thousand million parameters."""
VOCABULARY = {64: 512, 512: 8192, 8192: 128_000}


def project(model: dict[str, Any], **training: Any) -> ProjectConfig:
    settings = {"micro_batch": 4, "sequence_length": 64, "workers": 1, **training}
    return config.parse(
        {"run": {"name": "m"}, "model": {"name": "m", **model}, "training": settings}
    )


def shape(made: ProjectConfig) -> Any:
    return architecture(made.model, VOCABULARY[made.model.hidden_size])


def estimated(made: ProjectConfig, workers: int, **more: Any) -> Any:
    return estimate(partial(shape, made), made.training, workers=workers, gpu=False, **more)


def measured(made: ProjectConfig) -> float:
    """Bytes this rank's allocator has handed out at the peak of a usual step."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from hybrid.training.optimizer import make_optimizer
    from hybrid.training.parallel import Precision, World, spread
    from hybrid.training.step import train_step

    settings, world, vocabulary = made.training, World.current(), shape(made).vocab_size
    rows = np.random.default_rng(0).integers(
        0, vocabulary, (settings.micro_batch, settings.sequence_length + 1)
    )
    batch = {"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}

    def run() -> None:
        model = AutoModelForCausalLM.from_config(shape(made))
        precision = Precision.of(settings.precision, world.device)
        model = spread(model, settings.strategy, precision, world).train()
        optimizer = make_optimizer(model, settings)
        for step in range(4):
            with record_function("a step"):
                train_step(
                    model, optimizer, lambda index: batch, step=step, seed=0,
                    micro_batches=settings.micro_batches, clip=1.0, world=world,
                )  # fmt: skip

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    peaks, total, until = [], 0, 0
    for event in events:
        if event.name() == "a step":
            peaks.append(total)
            until = event.end_ns()
        elif event.name() == "[memory]":
            total += event.nbytes()
            if peaks and event.start_ns() < until:
                peaks[-1] = max(peaks[-1], total)
    assert len(peaks) == 4
    return statistics.median(peaks[1:])  # the first has no optimiser state before its end


def measured_all(made: list[ProjectConfig]) -> list[float]:
    return [measured(one) for one in made]


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
        project(model, strategy=strategy, workers=2, micro_batches=batches, **more)
        for model, more in ((DEBUG, {}), (MID, {"micro_batch": 1}))
        for strategy, batches in (("ddp", 4), ("fsdp", 2), ("fsdp", 4))
    ]
    got = worlds.run(2, tmp_path, measured_all, made)
    for one, peak in zip(made, got, strict=True):
        told = estimated(one, 2)
        where = (one.model.hidden_size, one.training.strategy, one.training.micro_batches, told)
        assert told.total == pytest.approx(peak, rel=WITHIN), where


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("sizes", [(2, 128), (8, 256)])
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
    assert "activation_checkpointing" in told.advice or "micro_batch" in told.advice
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
