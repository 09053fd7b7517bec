"""Run a function on spawned gloo processes: real process groups without Ray."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, size: int, store: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        result = function(*args)
        if rank == 0:
            Path(f"{store}.result").write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()
    # gloo's threads may outlive the group, and an interpreter that ends under them aborts.
    os._exit(0)


def run(size: int, folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` on `size` ranks of one process group; what rank 0 returned."""
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "rendezvous"
    mp.spawn(_rank, args=(size, str(store), function, args), nprocs=size)
    return pickle.loads(Path(f"{store}.result").read_bytes())


def start(size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same without waiting: the processes, which the caller must end."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (size, str(folder / "rendezvous"), function, args)
    context = mp.spawn(_rank, args=arguments, nprocs=size, join=False)
    return list(context.processes)


class _Stop(Exception):
    """Ends a loop from its report."""


def train_until(made: Any, step: int) -> None:
    """Train until `step` is committed, then vanish."""
    from hybrid.training import checkpoint
    from hybrid.training.loop import train

    save = checkpoint.Checkpoints.save

    def stopping(self: Any, done: int, *args: Any, **options: Any) -> None:
        save(self, done, *args, **options)
        if done == step:
            self.close()
            raise _Stop

    checkpoint.Checkpoints.save = stopping  # type: ignore[method-assign]
    try:
        train(made)
    except _Stop:
        return
