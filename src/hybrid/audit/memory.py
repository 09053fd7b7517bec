"""Device memory: how much is there, whether it keeps what it is given, how fast each part is.

Memory that is really the host's, behind a driver that pretends, is there and keeps its content: it
only runs at the speed of the link. So every chunk is timed by itself, all of them held at once.
"""

from __future__ import annotations

import random
import statistics
import time

import torch

from hybrid.audit.device import Device
from hybrid.audit.level import Level
from hybrid.audit.naming import reading
from hybrid.audit.reading import Reading
from hybrid.audit.timing import GIB, measure

_STRIP = 4 * 2**20
_MIX = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier: odd, so that no two addresses share a word


def write_pattern(chunk: torch.Tensor, first: int, seed: int) -> None:
    """Fill int64 [n] so that each word depends on its own address: (first + i) x odd + seed."""
    torch.arange(first, first + len(chunk), out=chunk)
    chunk.mul_(_MIX).add_(seed)


def wrong_words(chunk: torch.Tensor, scratch: torch.Tensor, first: int, seed: int) -> int:
    """How many words of int64 [n] are not what `write_pattern` wrote; scratch is [n] too."""
    expected = scratch[: len(chunk)]
    write_pattern(expected, first, seed)
    # In strips: a comparison of all would need memory that is no longer free.
    strips = zip(torch.split(expected, _STRIP), torch.split(chunk, _STRIP), strict=True)
    return sum(int((a != b).count_nonzero().item()) for a, b in strips)


def probe_memory(device: Device, level: Level) -> list[Reading]:
    """Take as much as the level says, write it, read it back in random order, time every chunk.

    Returns:
        measured.memory_bytes (kept its content), memory_errors (words), chunk_min_gib_s and
        chunk_median_gib_s (one read of each chunk), memory_gib_s (copies within the device).
    """
    device.release()
    free, total = device.memory()
    if device.kind == "cuda":
        size, target = level.gpu_chunk, int(total * level.gpu_memory)
    else:
        size, target = level.cpu_chunk, min(level.host_memory, free // 2)
    size = min(size, max(8, target // 4))
    seed = random.SystemRandom().getrandbits(62)
    scratch = device.allocate(size)
    held: list[torch.Tensor] = []
    refused = None
    while (len(held) + 1) * size <= target:
        try:
            held.append(device.allocate(size))
        except (torch.OutOfMemoryError, MemoryError) as e:
            refused = str(e).splitlines()[0]
            break
        write_pattern(held[-1], len(held) * size, seed)
    device.synchronize()
    order = list(range(len(held)))
    random.Random(seed).shuffle(order)
    wrong, rates = {}, {}
    for i in order:
        # The faster of two reads: a first one may pay for page tables.
        rates[i] = max(_read_rate(device, held[i]) for _ in range(2))
        if words := wrong_words(held[i], scratch, (i + 1) * size, seed):
            wrong[i] = words
    good = sum(held[i].nbytes for i in order if i not in wrong) + scratch.nbytes
    copied = _copy_rate(device, held[0], scratch, level) if held else None
    held.clear()
    del scratch
    device.release()
    curve = tuple((i * size / GIB, rates[i]) for i in sorted(rates))
    detail = {
        "chunk_bytes": size, "chunks": len(order), "total_bytes": total, "free_bytes": free,
        "refused": refused, "wrong_words_by_chunk": {str(i): n for i, n in wrong.items()},
    }  # fmt: skip
    slowest = min(rates, key=rates.__getitem__, default=None)
    return [
        reading(device, "memory_bytes", good, "byte", detail=detail),
        reading(device, "memory_errors", sum(wrong.values()), "count", detail=detail),
        reading(
            device, "chunk_min_gib_s", None if slowest is None else rates[slowest], "GiB/s",
            curve=curve, detail={"slowest_chunk": slowest, "chunk_bytes": size},
        ),
        reading(
            device, "chunk_median_gib_s",
            statistics.median(rates.values()) if rates else None, "GiB/s",
        ),
        reading(device, "memory_gib_s", copied, "GiB/s"),
    ]  # fmt: skip


def _read_rate(device: Device, chunk: torch.Tensor) -> float:
    """GiB a second of one read of a chunk, from start to end."""
    device.synchronize()
    start = time.perf_counter()
    chunk.sum()
    device.synchronize()
    return chunk.nbytes / GIB / (time.perf_counter() - start)


def _copy_rate(device: Device, a: torch.Tensor, b: torch.Tensor, level: Level) -> float:
    """GiB a second read and written by copies within the device."""
    times = measure(lambda: device.copy(a, b), device.synchronize, budget_s=level.work_s)
    return 2 * a.nbytes / GIB / times.best
