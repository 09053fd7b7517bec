"""How long a chain of hops takes, from each hop's median and 99th percentile or its samples.

Independent hops: their sum, taken as lognormal with the moments of the sum (L. F. Fenton, "The
sum of log-normal probability distributions in scatter transmission systems", IRE Trans. 8 (1960)
57). Hops that are slow together, as on one loaded machine: percentiles add up. The truth lies
between the two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.planning.ranges import Range
from hybrid.planning.workload import Hop, Workload

_Z99 = 2.3263478740408408
QUEUE = Hop(name="queue", p50_ms=2.3, p99_ms=12.0)
"""A durable hop between two agents on one machine: the median as measured (docs/log.md), the 99th
percentile assumed."""
CALL_TAIL = 3.0
"""A model call of which only the mean is known is taken to need this many times its median in the
worst of a hundred."""


@dataclass(frozen=True, kw_only=True)
class ChainLatency:
    """A chain's times in ms; each `low` … `high` spans independent to fully dependent hops.

    Attributes:
        by_hop: (name, p50, p99) of each hop.
        slowest: the name of the hop with the largest 99th percentile.
    """

    p50_ms: Range
    p99_ms: Range
    by_hop: tuple[tuple[str, float, float], ...]
    slowest: str


def hops_of(w: Workload) -> tuple[Hop, ...]:
    """The hops that are given, else for every step a queue and a model call."""
    if w.latency.hops or w.serve is None:
        return w.latency.hops
    mean = w.serve.call_s * 1000
    sigma = math.log(CALL_TAIL) / _Z99
    p50 = mean / math.exp(sigma**2 / 2)
    call = Hop(name="model call", p50_ms=p50, p99_ms=CALL_TAIL * p50)
    return (QUEUE, call) * w.steps if w.steps > 1 else (call,)


def chain(hops: Sequence[Hop]) -> ChainLatency:
    """The sum of hops that follow one another. At least one hop."""
    by_hop = tuple((h.name, *_percentiles(h)) for h in hops)
    mean = variance = 0.0
    for _, p50, p99 in by_hop:
        sigma = math.log(p99 / p50) / _Z99
        hop_mean = p50 * math.exp(sigma**2 / 2)
        mean += hop_mean
        variance += hop_mean**2 * math.expm1(sigma**2)
    sigma = math.sqrt(math.log1p(variance / mean**2))
    p50 = mean * math.exp(-(sigma**2) / 2)
    p99 = p50 * math.exp(_Z99 * sigma)
    return ChainLatency(
        p50_ms=_between(p50, sum(h[1] for h in by_hop)),
        p99_ms=_between(p99, sum(h[2] for h in by_hop)),
        by_hop=by_hop,
        slowest=max(by_hop, key=lambda h: h[2])[0],
    )


def _percentiles(hop: Hop) -> tuple[float, float]:
    if hop.samples_ms:
        cuts = statistics.quantiles(hop.samples_ms, n=100, method="inclusive")
        return cuts[49], cuts[98]
    return float(hop.p50_ms or 0), float(hop.p99_ms or 0)


def _between(a: float, b: float) -> Range:
    low, high = min(a, b), max(a, b)
    return Range(low, (low + high) / 2, high, "independent to dependent hops")
