"""Steps made to be bound by one thing each: importable by the processes that are spawned."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid.training.parallel import World
from hybrid.training.position import Position
from hybrid.training.profiling import Profiling, watched_position

PLAN = Profiling(warmup=2, active=3)
Work = Callable[[Position], None]


def big_matmuls(position: Position) -> None:
    position.at("data")
    a = torch.ones(384, 384)
    position.at("forward and backward of micro-batch 0")
    for _ in range(12):
        a = a @ a * 1e-3


def heavy_all_reduce(position: Position) -> None:
    position.at("data")
    a, gradients = torch.ones(32, 32), torch.ones(2_000_000)
    position.at("forward and backward of micro-batch 0")
    (a @ a).sum()
    position.at("gradient norm")
    dist.all_reduce(gradients)


def slow_loader(position: Position) -> None:
    position.at("data")
    time.sleep(0.03)  # a disk, a network
    a = torch.ones(128, 128)
    position.at("forward and backward of micro-batch 0")
    a @ a


def host_bound(position: Position) -> None:
    position.at("data")
    a = torch.ones(4)
    position.at("forward and backward of micro-batch 0")
    for n in range(200):
        a = a + 1
        json.dumps(list(range(100 + n)))  # what the program does between two ops


def profiled(work: Work, folder: Path) -> None:
    with watched_position(PLAN, folder, World.current()) as position:
        for step in range(1, PLAN.steps + 1):
            position.at("step", step)
            work(position)
