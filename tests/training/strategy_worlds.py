"""What the ranks of the strategies' tests run: importable by the processes that are spawned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid.config import CheckpointConfig, TrainingConfig
from hybrid.training.checkpoint import Checkpoints
from hybrid.training.data import IGNORE, Batch
from hybrid.training.optimizer import make_optimizer
from hybrid.training.parallel import Precision, World, spread
from hybrid.training.step import StepResult, evaluate, train_step

VOCABULARY = 67
"""No multiple of the ranks: the shards of the vocabulary are unequal."""
MICRO_BATCHES = 3
"""No multiple of the data groups: some micro-batches are padding."""


def model(seed: int = 0) -> LlamaForCausalLM:
    """A small Llama with tied embeddings, the same at each call."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def batch(step: int, index: int) -> Batch:
    """Two rows of 16 tokens, some without a label."""
    rng = np.random.default_rng((step, index))
    rows = rng.integers(0, VOCABULARY, (2, 17))
    labels = rows[:, 1:].copy()
    labels[0, : index + 2] = IGNORE
    return {"input_ids": rows[:, :-1].copy(), "labels": labels}


class Run:
    """A model spread as `settings` say, its optimiser, and the steps it has made."""

    def __init__(self, settings: TrainingConfig) -> None:
        self.settings = settings
        self.world = World.current(settings.parallel.tensor)
        precision = Precision.of(settings.precision, self.world.device)
        self.model = spread(model(), settings, precision, self.world).train()
        self.optimizer = make_optimizer(self.model, settings)

    def step(
        self, number: int, batch_at: Callable[[int, int], Batch], micro_batches: int
    ) -> StepResult:
        """One, of the micro-batches that `batch_at` gives for its number and an index."""
        return train_step(
            self.model,
            self.optimizer,
            lambda index: batch_at(number, index),
            step=number,
            seed=0,
            micro_batches=micro_batches,
            clip=self.settings.clip,
            world=self.world,
        )

    def steps(self, first: int, last: int, micro_batches: int = MICRO_BATCHES) -> list[float]:
        """Loss and gradient norm of each step, and the held-out loss at the end."""
        numbers = []
        for step in range(first, last):
            result = self.step(step, batch, micro_batches)
            numbers += [result.loss, result.grad_norm]
        held = evaluate(self.model, lambda index: batch(999, index), MICRO_BATCHES, self.world)
        return [*numbers, held]


def run_each(settings: list[TrainingConfig], steps: int) -> list[list[float]]:
    """The numbers of each strategy, one after the other."""
    return [Run(one).steps(0, steps) for one in settings]


def accumulated(settings: TrainingConfig) -> tuple[list[float], int]:
    """A step of two micro-batches a rank, and how often a unit's parameters are gathered in it."""
    run = Run(settings)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        numbers = run.steps(0, 1, micro_batches=2 * run.world.data_size)
    counts = {event.key: event.count for event in seen.key_averages()}
    return numbers, counts.get("c10d::_allgather_base_", 0)


def relay(settings: list[TrainingConfig], folder: Path, steps: int) -> list[float]:
    """Each strategy takes the run `steps` further, from what the one before has saved."""
    numbers = []
    for leg, one in enumerate(settings):
        run = Run(one)
        checkpoints = Checkpoints(folder, run.world, CheckpointConfig(every=1))
        restored = checkpoints.restore(run.model, run.optimizer)
        assert restored.step == leg * steps, restored
        *made, held = run.steps(restored.step, restored.step + steps)
        numbers += made
        checkpoints.save(restored.step + steps, run.model, run.optimizer, wait=True)
        checkpoints.close()
    return [*numbers, held]


def everything(
    strategies: list[TrainingConfig], legs: list[TrainingConfig], folder: Path
) -> dict[str, Any]:
    """All of it in one world: processes are dear to start."""
    return {
        "numbers": run_each(strategies, 3),
        "relay": relay(legs, folder, 1),
        "accumulated": [accumulated(one) for one in strategies[:3]],
    }
