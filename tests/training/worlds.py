"""Run a function on gloo processes of their own: real process groups without Ray.

They are forked from one process that has imported torch and transformers and done nothing else, so
that a rank begins after a tenth of a second instead of five.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_IMPORTED = ["hybrid.training.loop", "hybrid.training.lora", "transformers.models.llama"]
mp.set_forkserver_preload(_IMPORTED)


def _rank(
    rank: int, env: dict[str, str], size: int, store: str, function: Callable[..., Any], args: Any
) -> None:
    os.environ.clear()
    os.environ.update(env)  # the caller's, which may have changed since the first world
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
    context = _begin(size, folder, function, args)
    while not context.join():
        pass
    return pickle.loads((folder / "rendezvous.result").read_bytes())


def start(size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same without waiting: the processes, which the caller must end."""
    return list(_begin(size, folder, function, args).processes)


def _begin(size: int, folder: Path, function: Callable[..., Any], args: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return mp.start_processes(
        _rank,
        args=(dict(os.environ), size, str(folder / "rendezvous"), function, args),
        nprocs=size,
        join=False,
        start_method="forkserver",
    )


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
