"""What `test_memory` measures in real steps: its cases, and the peak of the allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from hybrid import config
from hybrid.config import ProjectConfig
from hybrid.training.model import architecture
from hybrid.training.zero import ZeroModel

DEBUG = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2}
MID = {"hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 4}
WIDE = {**MID, "intermediate_size": 1024, "layers": 2, "heads": 4, "kv_heads": 2}
HUGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "layers": 80, "heads": 64, "kv_heads": 8,
    "tie_embeddings": False, "context": 4096,
}  # fmt: skip
"""Of 101 thousand, 28 million, 9 million (half of it in the embedding) and 70 thousand million
parameters."""
VOCABULARY = {64: 512, 512: 8192, 8192: 128_000}


def project(model: dict[str, Any], **training: Any) -> ProjectConfig:
    settings = {"micro_batch": 4, "sequence_length": 64, "workers": 1, **training}
    return config.parse(
        {"run": {"name": "m"}, "model": {"name": "m", **model}, "training": settings}
    )


def shape(made: ProjectConfig) -> Any:
    return architecture(made.model, VOCABULARY[made.model.hidden_size])


def measured(made: ProjectConfig) -> float:
    """Bytes of this rank's tensors at the peak of a usual step.

    The profiler misses what gloo's own threads free, so it can only see too much: the lowest of
    several steps counts, each from what is held between steps.
    """
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
    model = AutoModelForCausalLM.from_config(shape(made))
    precision = Precision.of(settings.precision, world.device)
    model = spread(model, settings, precision, world).train()
    optimizer = make_optimizer(model, settings)
    buckets: dict[int, int] = {}

    def look(loss: float, norm: float) -> bool:
        """DDP's gradients are views of buckets that it keeps from step to step."""
        if settings.strategy == "ddp":
            found = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
            buckets.clear()
            buckets.update({storage.data_ptr(): storage.nbytes() for storage in found})
        return True

    def step(number: int) -> None:
        train_step(
            model, optimizer, lambda index: batch, step=number, seed=0,
            micro_batches=settings.micro_batches, clip=1.0, world=world, accept=look,
        )  # fmt: skip

    step(0)  # makes the optimiser's state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for number in range(1, 5):
            with record_function("a step"):
                step(number)
    peaks, now, until = [], 0, 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "a step":
            peaks.append(0)
            now, until = 0, event.end_ns()
        elif event.name() == "[memory]" and event.start_ns() < until:
            now += event.nbytes()
            peaks[-1] = max(peaks[-1], now)
    assert len(peaks) == 4
    return held(model, optimizer) + sum(buckets.values()) + min(peaks)


def held(model: Any, optimizer: Any) -> int:
    """Bytes of this rank's parameters and optimiser state, and of what DeepSpeed keeps besides."""
    tensors = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [t for t in state.values() if isinstance(t, torch.Tensor)]
    if isinstance(model, ZeroModel):
        tensors += [optimizer.lp_param_buffer, optimizer.grad_partitions_flat_buffer]
        tensors += optimizer.fp32_partitioned_groups_flat
        tensors += [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.nbytes for t in local)


def measured_all(made: list[ProjectConfig]) -> list[float]:
    return [measured(one) for one in made]
