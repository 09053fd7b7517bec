"""What goes wrong on purpose, on a rank of a spawned world; functions that a child can import."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from hybrid.training.loop import Job, train
from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.watchdog import Watchdog


def hold_the_lock() -> None:
    """A call into C that does not let go of the interpreter's lock."""
    ctypes.PyDLL(None).sleep(3600)


def stop_and_hold(folder: Path) -> None:
    """Rank 1 is stopped in step 3 and rank 2 cannot run Python; rank 0 waits for both."""
    world, position = World.current(), Position()
    with Watchdog(folder, world, position, 2.0, node=f"node-{world.rank}"):
        for step in (1, 2, 3):
            position.at("forward", step)
            if step == 3:
                time.sleep(0.5)  # the sign of life of step 3 is written
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if world.rank == 2:
                    hold_the_lock()
            world.sum(1.0)


def slow_storage() -> None:
    """A read that does not come back."""
    time.sleep(3600)


def train_with_slow_storage(made: Job) -> None:
    """Rank 1's loader stays in `slow_storage` in step 3."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401 - not timed

    from hybrid.training.data import ShardSet

    read = ShardSet.micro_batch

    def reading(self: Any, step: int, *args: Any) -> Any:
        if step == 2 and World.current().rank == 1:
            slow_storage()
        return read(self, step, *args)

    ShardSet.micro_batch = reading  # type: ignore[method-assign]
    train(made)


def train_with_poison(made: Job, step: int, index: int) -> dict[str, Any]:
    """The loss of one micro-batch (step and index from 0) is NaN, whichever rank computes it."""
    from hybrid.training import step as steps
    from hybrid.training.data import ShardSet

    read, loss_sum = ShardSet.micro_batch, steps._loss_sum
    poisoned: list[Any] = []

    def reading(self: Any, at: int, number: int, *args: Any) -> Any:
        batch = read(self, at, number, *args)
        if (at, number) == (step, index):
            poisoned.append(batch)
        return batch

    def summing(model: Any, batch: Any, *args: Any) -> Any:
        loss = loss_sum(model, batch, *args)
        return loss * float("nan") if any(batch is p for p in poisoned) else loss

    ShardSet.micro_batch, steps._loss_sum = reading, summing  # type: ignore[method-assign]
    try:
        return train(made)
    finally:
        ShardSet.micro_batch, steps._loss_sum = read, loss_sum  # type: ignore[method-assign]


def train_with_slow_rank(made: Job) -> dict[str, Any]:
    """Rank 1 takes 50 ms more in the first block's forward pass; its node has a name."""
    from hybrid.training import loop

    build = loop.build_model

    def building(*args: Any) -> Any:
        model = build(*args)
        if World.current().rank == 1:
            block = model.get_decoder().layers[0]
            block.mlp.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        return model

    loop.build_model = building
    return train(made, place=f"node-{World.current().rank}")


def step_with_every_strategy(settings: Any) -> dict[str, Any]:
    """One step with DDP and one with FSDP; what rank 0's flight recorder says thereafter."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from hybrid.training.flight import read_flight
    from hybrid.training.optimizer import make_optimizer
    from hybrid.training.parallel import Precision, gradient_sync, spread

    world = World.current()
    pair = dist.new_group([0, 1])
    for strategy in ("ddp", "fsdp"):
        shape = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        )  # fmt: skip
        precision = Precision.of("float32", world.device)
        model = spread(
            LlamaForCausalLM(shape),
            settings.model_copy(update={"strategy": strategy}),
            precision,
            world,
        )
        optimizer = make_optimizer(model, settings)
        with gradient_sync(model, on=True):
            model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(1), group=pair)
    flight, deadline = read_flight(), time.monotonic() + 30
    while flight.unfinished and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo wakes the caller a moment before it notes the end
        flight = read_flight()
    world.gather(None)
    return flight.as_record()
