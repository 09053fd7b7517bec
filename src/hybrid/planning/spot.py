"""Spot interruptions that are not independent: what a zone's common shock does to a pool.

Model: A. W. Marshall and I. Olkin, "A multivariate exponential distribution", JASA 62 (1967) 30.
A node is taken away at rate r; a share c of that are shocks that take every node of its zone at
once, the rest are its own. In a study of 2,635 interruptions, those of one instance type in one
zone fell within three minutes of each other in 92 % of cases ("Spot-and-Scoot", arXiv 2604.16457,
2026), which independent nodes would hardly ever do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid.planning.ranges import Range

INTERRUPTIONS = Range(0.002, 0.02, 0.1, "assumed: a node is taken every 10 to 500 hours")
CORRELATION = Range(0.2, 0.5, 0.9, "assumed: 20 to 90 % of interruptions take a whole zone")


def event_rate(rate: float, correlation: float, nodes: int, zones: int) -> float:
    """Interruptions an hour that a job over all nodes sees.

    Args:
        rate: of one node, an hour.
        correlation: share of them that take the whole zone, 0 to 1.
        nodes: of the pool, spread evenly over `zones`.
    """
    return nodes * rate * (1 - correlation) + min(zones, nodes) * rate * correlation


@dataclass(frozen=True, kw_only=True)
class PoolRisk:
    """What interruptions mean for a pool of hosts.

    Attributes:
        lost_node_hours: node-hours an hour of the pool that are missing on average, as a share.
        zone_shocks: expected number in the time asked for.
        taken_at_once: nodes that one shock takes.
        half_gone: probability that half of the nodes are missing at some moment.
        half_gone_independent: the same if nodes went independently of one another.
    """

    lost_node_hours: float
    zone_shocks: float
    taken_at_once: int
    half_gone: float
    half_gone_independent: float


def pool_risk(
    rate: float, correlation: float, nodes: int, zones: int, hours: float, replace_s: float
) -> PoolRisk:
    """The risk over `hours`, a lost node being replaced after `replace_s` seconds."""
    used = min(zones, nodes)
    at_once = -(-nodes // used)
    shocks = used * rate * correlation * hours
    missing = rate * replace_s / 3600
    share = missing / (1 + missing)
    half = -(-nodes // 2)
    gone = 0.0
    for zones_gone in range(used + 1):
        shocked = _exactly(used, zones_gone, share * correlation)
        left = nodes - min(nodes, zones_gone * at_once)
        gone += shocked * _tail(left, half - (nodes - left), share * (1 - correlation))
    gone = _at_some_time(gone, hours, replace_s)
    alone = _at_some_time(_tail(nodes, half, share), hours, replace_s)
    return PoolRisk(
        lost_node_hours=share,
        zone_shocks=shocks,
        taken_at_once=at_once,
        half_gone=gone,
        half_gone_independent=alone,
    )


def _tail(n: int, k: int, p: float) -> float:
    """P(at least k of n), each with probability p."""
    return sum(_exactly(n, i, p) for i in range(max(0, k), n + 1))


def _exactly(n: int, k: int, p: float) -> float:
    """P(k of n), each with probability p; by logarithms, as n may be thousands."""
    if p in (0.0, 1.0):
        return float(k == n * p)
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p))


def _at_some_time(p: float, hours: float, replace_s: float) -> float:
    """P(it happens in one of the windows of one replacement time), windows independent."""
    windows = hours * 3600 / replace_s
    return -math.expm1(windows * math.log1p(-min(p, 1 - 1e-12)))
