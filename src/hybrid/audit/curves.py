"""What an all-reduce curve says, measured here or saved by nccl-tests; no torch is needed.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md there): algorithm bandwidth is the size
of the buffer over the time, bus bandwidth is that times 2 (n - 1) / n, which compares with the
speed of the links whatever the number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

CurveClass = Literal["healthy", "early-plateau", "collapse", "socket", "unknown"]
_MIB = 2**20
_GIB = 2**30


def bus_bandwidth(nbytes: int, seconds: float, world: int) -> float:
    """GiB/s of an all-reduce over the links, as nccl-tests defines it."""
    return nbytes / _GIB / seconds * 2 * (world - 1) / world


def classify(
    curve: Sequence[tuple[float, float]], nominal: float | None = None
) -> tuple[CurveClass, str]:
    """What a curve of (bytes, bus bandwidth) says, and in a sentence why.

    Bus bandwidth above the nominal speed is no fault: with NVLS the switch adds, and data crosses
    the links fewer times than the definition assumes. The first 2 MiB are latency and say nothing.

    Args:
        curve: sizes ascending; any unit, the same as `nominal`'s.
        nominal: the speed of the slowest link that is paid for; None: unknown, and then only the
            curve's own shape is judged.
    """
    points = [(size, rate) for size, rate in curve if size > 0 and rate > 0]
    if len(points) < 3:
        return "unknown", "fewer than three sizes"
    top_size, top = max(points, key=lambda p: p[1])
    tail = statistics.median(rate for _, rate in points[-3:])
    mib = top_size / _MIB
    if tail < 0.5 * top and top_size < points[-1][0] and top_size >= 4 * _MIB:
        return "collapse", (
            f"it peaks at {top:.3g} with {mib:.0f} MiB and falls to {tail:.3g} for larger buffers"
        )
    if nominal is None or top >= 0.6 * nominal:
        return "healthy", f"it reaches {top:.3g}"
    share = f"{top:.3g} is {100 * top / nominal:.0f} % of {nominal:.3g}"
    if top < 0.15 * nominal:
        return "socket", f"{share}: as over an ordinary network socket instead of the fabric"
    soon = next(size for size, rate in points if rate >= 0.9 * top)
    if soon <= points[-1][0] / 16:
        return "early-plateau", f"{share}, reached with {soon / _MIB:.0f} MiB and not exceeded"
    return "healthy", f"{share}, still rising with {points[-1][0] / _MIB:.0f} MiB"


def transport(log: str) -> str | None:
    """What NCCL's own log (NCCL_DEBUG=INFO) says it uses between nodes: "IB", "Socket", …"""
    for line in log.splitlines():
        _, found, rest = line.partition("Using network ")
        if found and rest.split():
            return rest.split()[0]
    return None
