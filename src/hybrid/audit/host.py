"""What the operating system says of a node: cores, memory, limits of its cgroup, stolen time.

Linux only. Every function takes the root of the file system, so that tests read a made one.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Host:
    """What a node is called, and by what two nodes on one machine are told to share it.

    Attributes:
        name: the host's name.
        boot_id: the kernel's id of this boot; the same for all containers of one machine.
    """

    name: str
    boot_id: str


def host(root: Path = ROOT) -> Host:
    """This node."""
    boot = _text(root / "proc/sys/kernel/random/boot_id")
    return Host(name=platform.node() or "unknown", boot_id=(boot or "unknown").strip())


def _text(path: Path) -> str | None:
    """A small file of /proc or /sys; None where it is not there or not ours to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _cgroups(root: Path) -> tuple[str, dict[str, str]]:
    """The cgroup of this process: its path in v2, and its path for each v1 controller."""
    unified, legacy = "/", {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = path
        for controller in filter(None, controllers.split(",")):
            legacy[controller] = path
    return unified, legacy


def _upwards(base: Path, group: str) -> list[Path]:
    """The folders of a cgroup and of all above it: a limit anywhere on the way holds."""
    here = base / group.strip("/")
    return [p for p in (here, *here.parents) if p == base or base in p.parents]


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores that the cgroup lets this process use (cpu.max, or v1's cfs quota); None: no limit."""
    unified, legacy = _cgroups(root)
    found = []
    for folder in _upwards(root / "sys/fs/cgroup", unified):
        words = (_text(folder / "cpu.max") or "").split()
        quota, period = map(_whole, words) if len(words) == 2 else (None, None)
        if quota is not None and period:
            found.append(quota / period)
    for folder in _upwards(root / "sys/fs/cgroup/cpu", legacy.get("cpu", "/")):
        quota, period = (_number(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
        if quota and period:
            found.append(quota / period)
    return min(found, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroup lets this process use; None: no limit."""
    unified, legacy = _cgroups(root)
    files = [f / "memory.max" for f in _upwards(root / "sys/fs/cgroup", unified)]
    base = root / "sys/fs/cgroup/memory"
    files += [f / "memory.limit_in_bytes" for f in _upwards(base, legacy.get("memory", "/"))]
    found = [n for n in map(_number, files) if n is not None and n < _UNLIMITED]
    return min(found, default=None)


def memory_used(root: Path = ROOT) -> int | None:
    """Bytes charged to the cgroup now; None where no cgroup limits memory."""
    unified, legacy = _cgroups(root)
    folder = root / "sys/fs/cgroup" / unified.strip("/")
    base = root / "sys/fs/cgroup/memory" / legacy.get("memory", "/").strip("/")
    for path in (folder / "memory.current", base / "memory.usage_in_bytes"):
        if (used := _number(path)) is not None:
            return used
    return None


def _number(path: Path) -> int | None:
    return _whole((_text(path) or "").strip())


def _whole(word: str) -> int | None:
    """A number of the kernel's, of 64 bits at most; None for -1 (no limit) and all else."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 20 else None


def memory_total(root: Path = ROOT) -> int | None:
    """Bytes of memory that the kernel says there are."""
    return _meminfo(root, "MemTotal")


def memory_available(root: Path = ROOT) -> int | None:
    """Bytes that can be taken without swapping, as the kernel and the cgroup see it."""
    found = [_meminfo(root, "MemAvailable")]
    limit, used = memory_limit(root), memory_used(root)
    if limit is not None and used is not None:
        found.append(max(0, limit - used))
    return min((f for f in found if f is not None), default=None)


def _meminfo(root: Path, key: str) -> int | None:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name == key and words and (kib := _whole(words[0])) is not None:
            return kib * 1024
    return None


def affinity() -> int:
    """Cores that this process may be scheduled on (cpuset and sched_setaffinity)."""
    return len(os.sched_getaffinity(0))


def online_cores(root: Path = ROOT) -> int:
    """Cores that the kernel has: what a process without limits would see."""
    listed = (_text(root / "sys/devices/system/cpu/online") or "").strip()
    count = 0
    for part in filter(None, listed.split(",")):
        ends = part.partition("-")
        first, last = _whole(ends[0]), _whole(ends[2] or ends[0])
        if first is None or last is None or last < first:
            return os.cpu_count() or 1
        count += last - first + 1
    return count or os.cpu_count() or 1


def fabric_gib_s(root: Path = ROOT) -> float | None:
    """What this node's InfiniBand and RoCE ports carry together, one way; None without any.

    By the rate that each active port has trained to: "400 Gb/sec (4X NDR)".
    """
    total = 0.0
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        words = (_text(port / "rate") or "").split()
        active = "ACTIVE" in (_text(port / "state") or "")
        if active and len(words) > 1 and words[1] == "Gb/sec":
            with contextlib.suppress(ValueError):
                total += float(words[0]) * 1e9 / 8 / 2**30
    return total or None


@dataclass(frozen=True)
class CpuTimes:
    """Ticks since boot, summed over all cores: /proc/stat's first line."""

    total: int
    idle: int
    steal: int


def cpu_times(root: Path = ROOT) -> CpuTimes | None:
    """The counters now; None where there is no /proc/stat."""
    lines = (_text(root / "proc/stat") or "").splitlines()
    words = lines[0].split() if lines else []
    ticks = [n for n in map(_whole, words[1:]) if n is not None]
    if len(words) < 9 or words[0] != "cpu" or len(ticks) != len(words) - 1:
        return None
    # user and nice hold guest time already (proc(5)), so the last two columns are left out.
    return CpuTimes(total=sum(ticks[:8]), idle=ticks[3] + ticks[4], steal=ticks[7])


def stolen(before: CpuTimes, after: CpuTimes) -> float | None:
    """The share of all cores' time that the hypervisor gave to others in between."""
    total = after.total - before.total
    return (after.steal - before.steal) / total if total > 0 else None


def busy(before: CpuTimes, after: CpuTimes) -> float:
    """The share of all cores' time in between that somebody used."""
    total = after.total - before.total
    return 1 - (after.idle - before.idle) / total if total > 0 else 0.0
