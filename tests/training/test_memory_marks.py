"""Memory by category of steps whose sizes are known, and of the loop itself, alone and sharded."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from test_loop import job

from hybrid.planning.memory_timeline import Memory, read_memory
from hybrid.training.loop import train
from hybrid.training.parallel import World
from hybrid.training.profiling import Profiling, memory_path, trace_path, watched_position

PLAN = Profiling(warmup=1, active=2, memory=True)
WIDE, ROWS = 512, 2048


class Squares(nn.Module):
    """Its activations outweigh all else: a square keeps its operand for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.wide = nn.Linear(64, WIDE, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return self.wide(rows).square().sum()


def profiled(folder: Path, steps: int = PLAN.steps) -> None:
    model = Squares()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with watched_position(PLAN, folder, World.current()) as position:
        position.watch(model, optimizer)
        for step in range(1, steps + 1):
            position.at("step", step)
            position.at("data")
            rows = torch.ones(ROWS, 64)
            position.at("forward and backward of micro-batch 0")
            with position.within("forward"):
                loss = model(rows)
            with position.within("backward"):
                loss.backward()
            position.at("update")
            optimizer.step()
            optimizer.zero_grad()
            del rows, loss


def test_every_byte_of_a_job_of_known_sizes_is_in_its_category(tmp_path: Path) -> None:
    profiled(tmp_path)
    found = read_memory(memory_path(tmp_path, 0))
    numbers = 2 * 64 * 64 + 64 * WIDE
    assert found.peak["parameters"] == numbers * 4
    assert found.peak["optimiser"] == 2 * numbers * 4 + 3 * 4  # and a step number for each
    assert found.peak["input"] == ROWS * 64 * 4
    # Both layers' outputs, what `square` keeps, and what its backward pass makes of that; the loss
    # and its gradient.
    wide, kept = ROWS * WIDE * 4, 2 * ROWS * 64 * 4 + 2 * 4
    assert (found.peak["activations"] - kept) % wide == 0
    assert 2 * wide <= found.peak["activations"] - kept <= 4 * wide
    assert found.peak["gradients"] == 0  # of none of the layers yet
    assert found.category == "activations"
    assert found.owner.owner == "wide" or found.owner.op.startswith("PowBackward")
    assert found.peak_phase == "forward and backward"
    assert max(sum(held) for _, held in found.timeline) == found.total
    assert found.step_peaks.keys() == {1, 2}
    assert max(found.step_peaks.values()) == found.total
    assert max(of[1] for _, of in found.timeline) == numbers * 4
    assert found.unseen == 0
    held = [h for h in found.holders if h.category == "optimiser"]
    assert {h.owner for h in held} == {"layers.*", "wide"}
    assert next(h for h in held if h.owner == "layers.*").bytes == 2 * (2 * 64 * 64 * 4 + 4)


def test_a_run_that_ends_while_memory_is_recorded_leaves_what_it_has(tmp_path: Path) -> None:
    profiled(tmp_path, PLAN.steps - 1)
    found = read_memory(memory_path(tmp_path, 0))
    assert found.peak["parameters"] == (2 * 64 * 64 + 64 * WIDE) * 4
    profiled(tmp_path)  # hooks and profiler are gone


def loop(folder: Path, **training: Any) -> Any:
    made = job(folder, steps=PLAN.steps, eval_every=100, **training)
    return dataclasses.replace(made, profiling=PLAN)


def of_rank(made: Any, rank: int) -> Memory:
    assert trace_path(made.folder, rank).exists()
    return read_memory(memory_path(made.folder, rank))


def test_the_loop_has_adam_twice_its_parameters_and_a_module_that_holds_most(
    tmp_path: Path,
) -> None:
    """With recomputation, whose second forward pass ends early and must close its ranges."""
    made = loop(tmp_path, strategy="single", parallel={"activation_checkpointing": "selective"})
    parameters = train(made)["parameters"]
    found = of_rank(made, 0)
    assert found.peak["parameters"] == 4 * parameters
    assert 0 <= found.peak["optimiser"] - 2 * found.peak["parameters"] < 1000
    assert 0 <= max(held[1] for _, held in found.timeline) - 4 * parameters < 4096
    assert found.category == "activations"
    assert found.owner.owner
    assert any("layers.*" in h.owner for h in found.holders if h.category == "activations")


@pytest.mark.full
def test_shards_are_half_of_the_state_and_gathered_parameters_are_parameters(
    tmp_path: Path,
) -> None:
    made = loop(tmp_path, strategy="fsdp")
    parameters = worlds.run(2, tmp_path / "world", train, made)["parameters"]
    ranks = [of_rank(made, rank) for rank in (0, 1)]
    assert [m.rank for m in ranks] == [0, 1]
    both = sum(m.peak["optimiser"] for m in ranks)
    assert 0 <= both - 8 * parameters < 1000
    for memory in ranks:
        assert memory.peak["parameters"] > 2 * parameters  # its shard, and what is gathered
