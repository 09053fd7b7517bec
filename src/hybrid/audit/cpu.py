"""Probes of a node's CPU side, with the standard library alone: agent nodes have no torch.

Cores that are really there, memory that is really there, memory bandwidth, stolen time, disk.
Hashing and memmove release Python's lock, so threads measure cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import random
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hybrid.audit import host
from hybrid.audit.reading import Reading

GIB = 2**30
MIB = 2**20
_PAGE = 4096
_ENOUGH = 0.95
"""Share of the cores claimed (of those allowed, if fewer) that ends the search for more."""


def clock_mhz(root: Path = host.ROOT) -> float | None:
    """The first core's clock as /proc/cpuinfo prints it; None where it does not."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "cpu MHz":
            try:
                return float(value)
            except ValueError:
                return None
    return None


def _threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` on `count` threads, to the end of all."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _spin(count: int, seconds: float) -> tuple[float, float]:
    """Hash on `count` threads. Returns (cores: CPU seconds a second, hashed bytes a second)."""
    block = bytes(MIB)
    begin = threading.Barrier(count)
    used, hashed, walls = [0.0] * count, [0] * count, [0.0] * count

    def work(i: int) -> None:
        begin.wait()
        start, before = time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < seconds:
            hashlib.sha256(block).digest()
            hashed[i] += MIB
        used[i], walls[i] = time.thread_time() - before, time.perf_counter() - start

    _threads(count, work)
    wall = max(walls)
    return sum(used) / wall, sum(hashed) / wall


def cores_seen(seconds: float) -> Sequence[int]:
    """The ids of the cores that busy threads were seen on, sorted."""
    seen: set[int] = set()
    end = time.perf_counter() + seconds
    block = bytes(MIB // 4)

    def work(_: int) -> None:
        stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        while time.perf_counter() < end:
            hashlib.sha256(block).digest()
            # Field 39 is the core; the command's name before it may hold spaces (proc(5)).
            seen.add(int(stat.read_text().rpartition(")")[2].split()[36]))

    _threads(2 * host.affinity(), work)
    return sorted(seen)


def cores(
    claimed: float | None,
    seconds: float,
    rounds: int = 3,
    *,
    slots: float | None = None,
    patience_s: float = 5.0,
) -> list[Reading]:
    """Whether the claimed cores do work at the same time.

    `cpu.cores_obtained` is the CPU time that as many busy threads as cores are claimed get in a
    second. `cpu.cores_measured` adds what other processes of this kernel used meanwhile, up to what
    affinity and cgroup allow: cores that are there, but busy. `cpu.parallel_speedup` is by how much
    more the threads hash than one does: cores that a hypervisor gives to two at once show there
    (two hardware threads of one core gain little, which is not a fault).

    Args:
        claimed: cores paid for; None: what the kernel shows, within the cgroup's quota.
        seconds: of each of `rounds` rounds; the best counts, for others may be working too.
        patience_s: seconds of further rounds, each twice as long as the last, while fewer cores
            than claimed were seen to work: a moment's disturbance is no missing core.
        slots: where nobody says what is paid for, a scheduler's slots: a claim as far as the kernel
            shows as many cores.
    """
    quota, online = host.cpu_quota(), host.online_cores()
    if claimed is None and slots is not None:
        claimed = min(float(online), slots)
    elif claimed is None:
        claimed = quota if quota is not None else float(online)
    count = max(1, min(online, round(claimed)))
    affinity = host.affinity()
    allowed = float(affinity) if quota is None else min(affinity, quota)
    alone = max(_spin(1, seconds)[1] for _ in range(rounds))
    obtained: list[float] = []
    working: list[float] = []
    hashed: list[float] = []
    shares: list[float | None] = []
    enough, there, until = _ENOUGH * min(count, allowed), 0.0, time.perf_counter() + patience_s
    while len(obtained) < rounds or (there < enough and time.perf_counter() + seconds < until):
        if len(obtained) >= rounds:
            seconds *= 2
        before = host.cpu_times()
        ours, rate = _spin(count, seconds)
        after = host.cpu_times()
        obtained.append(ours)
        hashed.append(rate)
        if before is not None and after is not None:
            shares.append(host.stolen(before, after))
            # Of all cores: ours, and the others', whom the kernel served in between.
            working.append(max(ours, host.busy(before, after) * online))
        there = min(allowed, max(working or obtained))
    limits = {"online": online, "affinity": affinity, "cgroup_quota": quota}
    share = max((s for s in shares if s is not None), default=None)
    return [
        Reading(
            name="cpu.cores_claimed", value=claimed, unit="count", source="claim", fakeable=True,
            detail=dict(limits),
        ),
        Reading(
            name="cpu.cores_measured", value=round(there, 2), unit="count",
            source="busy threads, affinity and cgroup", fakeable=False,
            detail={"threads": count, **limits},
        ),
        Reading(
            name="cpu.cores_obtained", value=round(max(obtained), 2), unit="count",
            source="busy threads", fakeable=False, detail={"threads": count},
        ),
        Reading(
            name="cpu.parallel_speedup", value=round(max(hashed) / alone, 2),
            unit="ratio", source="sha256", fakeable=False, detail={"threads": count},
        ),
        Reading(
            name="cpu.sha256_gib_s", value=alone / GIB, unit="GiB/s", source="sha256",
            fakeable=False,
        ),
        Reading(
            name="cpu.steal_fraction", value=share, unit="ratio", source="/proc/stat",
            fakeable=True,
        ),
    ]  # fmt: skip


def bandwidth(seconds: float) -> list[Reading]:
    """Memory bandwidth: memmove on every core between buffers that fit no cache."""
    threads = host.affinity()
    room = (host.memory_available() or GIB) // 4
    size = max(4 * MIB, min(64 * MIB, room // (2 * threads)))
    pairs = [(mmap.mmap(-1, size), mmap.mmap(-1, size)) for _ in range(threads)]
    moved, walls = [0] * threads, [1e-9] * threads
    begin = threading.Barrier(threads)

    def work(i: int) -> None:
        source, target = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in pairs[i])
        ctypes.memset(source, 1, size)
        ctypes.memmove(target, source, size)
        begin.wait()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            ctypes.memmove(target, source, size)
            moved[i] += 2 * size  # read and written
        walls[i] = time.perf_counter() - start

    _threads(threads, work)
    for pair in pairs:
        for region in pair:
            region.close()
    return [
        Reading(
            name="cpu.memory_gib_s", value=sum(moved) / max(walls) / GIB, unit="GiB/s",
            source="memmove", fakeable=False, detail={"threads": threads, "buffer_bytes": size},
        )
    ]  # fmt: skip


def memory(claimed: int | None, budget: int, seed: int | None = None) -> list[Reading]:
    """Whether the claimed memory may be used, and a part of it is really there.

    Never more than half of what is available is touched, nor more than `budget` bytes: an audit
    must not be what ends other processes. Each page gets random bytes and a stamp of its own (so
    that neither compression nor merging of like pages helps), and is read back in random order.

    Args:
        claimed: bytes paid for; None: nobody says, and what may be used is taken for it.
        budget: bytes touched at most.
        seed: of the order; None: of the system's entropy.
    """
    total, limit = host.memory_total(), host.memory_limit()
    usable = min((b for b in (total, limit) if b is not None), default=None)
    size = min(budget, (host.memory_available() or 0) // 2) // MIB * MIB
    wrong, rate = _touch(size, random.Random(seed)) if size else (0, None)
    detail = {"touched_bytes": size, "wrong_pages": wrong, "limit_bytes": limit, "total": total}
    return [
        Reading(
            name="cpu.memory_bytes_claimed", value=claimed if claimed is not None else usable,
            unit="byte", source="claim", fakeable=True,
        ),
        Reading(
            name="cpu.memory_bytes_measured", value=usable, unit="byte",
            source="cgroup and kernel; a part was touched", fakeable=True, detail=detail,
        ),
        Reading(
            name="cpu.memory_errors", value=wrong, unit="count", source="pages read back",
            fakeable=False, detail=detail,
        ),
        Reading(
            name="cpu.touch_gib_s", value=rate, unit="GiB/s", source="pages first written",
            fakeable=False, detail=detail,
        ),
    ]  # fmt: skip


def _touch(size: int, order: random.Random) -> tuple[int, float]:
    """Write and read back `size` bytes. Returns (pages that differ, GiB a second written)."""
    noise = os.urandom(MIB)
    stamps = range(0, size, _PAGE)
    with mmap.mmap(-1, size) as region:
        start = time.perf_counter()
        for at in range(0, size, MIB):
            region[at : at + MIB] = noise
        rate = size / GIB / (time.perf_counter() - start)
        for at in stamps:
            struct.pack_into("<Q", region, at, at ^ 0x5DEECE66D)
        wrong = 0
        for at in order.sample(stamps, len(stamps)):
            page = region[at : at + _PAGE]
            within = at % MIB
            good = page[8:] == noise[within + 8 : within + _PAGE]
            wrong += not (good and struct.unpack_from("<Q", page)[0] == at ^ 0x5DEECE66D)
    return wrong, rate


def disk(folder: Path, size: int) -> list[Reading]:
    """Sequential write (with fsync) and read of one file, with the page cache left out.

    Args:
        folder: on the file system to measure.
        size: bytes; at most a tenth of what is free.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = min(size, shutil.disk_usage(folder).free // 10) // MIB * MIB
    block = os.urandom(MIB)
    rates: dict[str, float | None] = {"write": None, "read": None}
    if size:
        descriptor, path = tempfile.mkstemp(prefix=".audit-", dir=folder)
        try:
            start = time.perf_counter()
            for _ in range(size // MIB):
                os.write(descriptor, block)
            os.fsync(descriptor)
            rates["write"] = size / MIB / (time.perf_counter() - start)
            with contextlib.suppress(OSError):  # file systems without a page cache refuse
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            start = time.perf_counter()
            while os.read(descriptor, MIB):
                pass
            rates["read"] = size / MIB / (time.perf_counter() - start)
        finally:
            os.close(descriptor)
            Path(path).unlink()
    return [
        Reading(
            name=f"disk.{what}_mib_s", value=rate, unit="MiB/s", source="one file", fakeable=False,
            detail={"bytes": size, "folder": str(folder)},
        )
        for what, rate in rates.items()
    ]  # fmt: skip
