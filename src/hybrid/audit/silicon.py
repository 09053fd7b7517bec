"""What the silicon is: compute capability, SMs, L2 and products of every kind, all measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hybrid.audit.device import KINDS, Device, NotOnThisDevice
from hybrid.audit.level import Level
from hybrid.audit.naming import reading
from hybrid.audit.reading import Reading
from hybrid.audit.timing import MIB, Times, measure

_ENOUGH_S = 0.01  # a product this long hides the launch
_FOOTPRINTS_MIB = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)


def probe_silicon(device: Device, level: Level) -> list[Reading]:
    """Compute capability by binaries that run, and SMs (cores) by where work was seen.

    The attributes that torch reports are kept in `detail`: they come from the driver, which may
    lie, and are only good for contradicting.
    """
    attributes = device.attributes()
    seen = device.units()
    found = [
        reading(
            device, "sm_count" if device.kind == "cuda" else "core_ids_seen", len(seen), "count",
            source="%smid" if device.kind == "cuda" else "/proc", detail={"attributes": attributes},
        )
    ]  # fmt: skip
    if device.kind == "cuda":
        found.append(
            reading(
                device, "compute_capability", device.capability(), source="binaries that run",
                detail={"attributes": attributes},
            )
        )  # fmt: skip
    return found


def probe_cache(device: Device, level: Level) -> list[Reading]:
    """The last-level cache by the time of dependent loads over growing footprints."""
    free = device.memory()[0]
    largest = 256 if device.kind == "cuda" else 64
    curve = tuple(
        (float(size * MIB), _latency_ns(device, size * MIB, level))
        for size in _FOOTPRINTS_MIB
        if size <= largest and size * MIB * 8 < free
    )
    size = cache_size(curve)
    return [
        reading(
            device, "l2_bytes" if device.kind == "cuda" else "cache_bytes", size, "byte",
            source="pointer chase", curve=curve,
        )
    ]  # fmt: skip


def _latency_ns(device: Device, footprint: int, level: Level) -> float:
    """The shortest of three: whoever interrupts only makes it longer."""
    return min(device.load_latency(footprint, level.latency_loads) for _ in range(3)) * 1e9


def cache_size(curve: Sequence[tuple[float, float]]) -> float | None:
    """The size of the cache behind a latency curve of (footprint in bytes, ns).

    A random load in a footprint F beyond a cache of L bytes hits with probability L / F, so that
    latency = hit x fast + (1 - hit) x slow. With fast and slow from the curve's ends, each point
    in between gives an estimate of L; the median of them counts. (The method of measuring by
    latency is that of Saavedra and Smith 1995, and Jia et al. 2018 for GPUs.)

    Returns:
        Bytes; None where the curve has no step (a footprint too small, a virtual cache).
    """
    if len(curve) < 4:
        return None
    latencies = [y for _, y in curve]
    fast, slow = min(latencies[:3]), max(latencies[-3:])
    if slow < 1.3 * fast:
        return None
    estimates = sorted(
        size * (slow - ns) / (slow - fast)
        for size, ns in curve
        if 0.1 < (slow - ns) / (slow - fast) < 0.9
    )
    if estimates:
        return estimates[len(estimates) // 2]
    return max(size for size, ns in curve if (slow - ns) / (slow - fast) >= 0.9)


def probe_matmul(device: Device, level: Level) -> list[Reading]:
    """Products of every kind that the device has, at a size that fills it; the best of each.

    The ratios tell dies apart: fp64 is half of fp32 or better on GA100 and GH100, and 1/32 or 1/64
    of it on their consumer cousins; fp8 exists from 8.9 on; bf16 without tensor cores is slow.
    """
    found = []
    for kind in KINDS:
        try:
            rows, times = _product_times(device, kind, level)
        except NotOnThisDevice as e:
            found.append(
                reading(device, f"matmul_tflops.{kind}", None, "TFLOP/s", detail={"absent": str(e)})
            )
            continue
        work = 2 * rows**3 / 1e12
        found.append(
            reading(
                device, f"matmul_tflops.{kind}", work / times.best, "TFLOP/s",
                detail={
                    "rows": rows, "median": work / times.median,
                    "sustained_over_best": times.best / times.median,
                },
                curve=tuple((float(i), work / s) for i, s in enumerate(times.seconds[:200])),
            )
        )  # fmt: skip
    if device.kind == "cpu":
        best = next(r for r in found if r.name.endswith("fp32"))
        value = None if not isinstance(best.value, float) else 1000 * best.value
        found.append(
            Reading(
                name="cpu.matmul_gflops", value=value, unit="GFLOP/s", source="torch",
                fakeable=False, detail=best.detail,
            )
        )  # fmt: skip
    return found


def _product_times(device: Device, kind: str, level: Level) -> tuple[int, Times]:
    """(rows, times) of the smallest square product that takes long enough to be timed."""
    rows = 256
    while True:
        a, b = device.operands(kind, rows)
        work = partial(device.matmul, a, b, kind)
        times = measure(work, device.synchronize, budget_s=0, fewest=2)
        if times.best >= _ENOUGH_S or 2 * rows > device.largest:
            break
        rows *= 2
    return rows, measure(work, device.synchronize, budget_s=level.work_s)
