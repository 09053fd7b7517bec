"""All-reduce over all nodes (NCCL or gloo) and exchanges between pairs: one rank's part."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybrid.audit.device import Device
from hybrid.audit.level import Level
from hybrid.audit.timing import GIB, MIB

_REPEATS = 20
_WORDS = 251  # a prime, so that the pattern fits no power of two


@dataclass(frozen=True)
class Ring:
    """One rank's place in a process group.

    Attributes:
        rank, world: of this process.
        store: `tcp://host:port` where the ranks meet.
        interface: network interface of the node's own address, for gloo and NCCL's bootstrap.
        timeout_s: after which a collective that lacks a rank fails.
        group: index of the node each rank is on, for naming pairs of nodes.
    """

    rank: int
    world: int
    store: str
    interface: str | None
    timeout_s: float
    group: tuple[int, ...]


def sweep(device: Device, ring: Ring, level: Level) -> dict[str, Any]:
    """Run this rank's part: all-reduce of growing sizes, then exchanges between pairs of nodes.

    Returns:
        `curve`: [[bytes, seconds]], the median of each size, of the slowest rank; `wrong`: sizes
        whose result was not the sum; `pairs`: [[node, node, GiB/s]] of this rank's exchanges.
        Every rank returns the same curve.
    """
    backend = "nccl" if device.place.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=ring.store,
        rank=ring.rank,
        world_size=ring.world,
        timeout=timedelta(seconds=ring.timeout_s),
        device_id=device.place if backend == "nccl" else None,
    )
    try:
        most = level.cpu_reduce_bytes if backend == "gloo" else device.memory()[0] // 4
        curve, wrong = [], []
        for size in (s for s in level.reduce_bytes if s <= most):
            seconds, correct = _all_reduce(device, ring, size, level.reduce_s)
            curve.append([float(size), seconds])
            if not correct:
                wrong.append(size)
        return {"curve": curve, "wrong": wrong, "pairs": _pairs(device, ring), "backend": backend}
    finally:
        dist.destroy_process_group()


def _all_reduce(device: Device, ring: Ring, size: int, budget_s: float) -> tuple[float, bool]:
    """(median seconds of the slowest rank, whether the sum was right) for one size in bytes."""
    words = torch.arange(size // 4, device=device.place) % _WORDS
    buffer = (words + ring.rank).to(torch.float32)
    dist.all_reduce(buffer)
    # Whole numbers far below 2^24: the sum is exact in every order.
    expected = words * ring.world + ring.world * (ring.world - 1) // 2
    correct = bool(torch.equal(buffer, expected.to(torch.float32)))
    buffer.fill_(1.0)
    seconds: list[float] = []
    for _ in range(_REPEATS):
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        device.synchronize()
        seconds.append(time.perf_counter() - start)
        buffer.fill_(1.0)
        # All ranks stop at the same repeat: the slowest decides.
        spent = torch.tensor([sum(seconds)], device=device.place, dtype=torch.float32)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if spent.item() > budget_s and len(seconds) >= 3:
            break
    result = torch.tensor(
        [statistics.median(seconds), 0.0 if correct else 1.0],
        device=device.place,
        dtype=torch.float64 if device.place.type == "cpu" else torch.float32,
    )
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return float(result[0].item()), result[1].item() == 0.0


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """A round-robin tournament: every pair once, each node in one pair a round at most."""
    players: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    half = len(players) // 2
    found = []
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players.insert(1, players.pop())
    return found


def _pairs(device: Device, ring: Ring) -> list[list[float]]:
    """Exchanges between the first ranks of every two nodes, both ways at once, round by round."""
    first = {node: ring.group.index(node) for node in dict.fromkeys(ring.group)}
    size = 64 * MIB if device.place.type == "cuda" else 2 * MIB
    mine = torch.zeros(size // 4, device=device.place)
    theirs = torch.empty_like(mine)
    found = []
    for games in rounds(len(first)):
        dist.barrier()
        for a, b in games:
            ranks = (first[a], first[b])
            if ring.rank not in ranks:
                continue
            other = ranks[1] if ring.rank == ranks[0] else ranks[0]
            times = [_exchange(device, mine, theirs, other) for _ in range(4)][1:]
            if ring.rank == ranks[0]:
                found.append([float(a), float(b), size / GIB / min(times)])
    return found


def _exchange(device: Device, mine: torch.Tensor, theirs: torch.Tensor, other: int) -> float:
    device.synchronize()
    start = time.perf_counter()
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    )
    for request in work:
        request.wait()
    device.synchronize()
    return time.perf_counter() - start
