"""What a scaling curve says to do: how many workers, elastic between which, and one named check."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybrid.planning.scaling import Fit, Point

RULE = 1.8
"""Two workers that do less than this many times what one does have something wrong with them."""
MARGIN = 0.5
"""A worker is worth adding while it adds at least this share of what one alone does..."""
ELASTIC_MARGIN = 0.25
"""... and worth taking when it is there (elastic) at this share."""
FALL_BACK = 0.5
"""Elastic: the fewest workers still do this share of the recommended ones' rate."""
BEYOND = 2
"""No recommendation is for more than this many times what was measured."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: measured, against one worker.

    Attributes:
        speedup: rate over one worker's.
        efficiency: speed-up over workers.
        tokens_per_usd: None where the price is not known.
        predicted: the law's rate; None where there is none.
    """

    workers: int
    rate: float
    spread: float
    speedup: float
    efficiency: float
    tokens_per_usd: float | None
    predicted: float | None


@dataclass(frozen=True, kw_only=True)
class Check:
    """The rule that two workers do more than `RULE` times what one does.

    Attributes:
        outcome: `not measured` where one of the two was left out.
        speedup: None where it was not measured.
        causes: likely ones, the likeliest first; empty where it passes.
    """

    name: str
    outcome: Literal["passed", "failed", "not measured"]
    speedup: float | None
    text: str
    causes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Workers to use, and between which numbers to be elastic; with the reason."""

    workers: int
    elastic: tuple[int, int]
    why: str


def table(fit: Fit, usd_per_worker_hour: float | None = None) -> list[Row]:
    """Speed-up, efficiency and tokens a dollar of each count that was measured."""
    one = next((p.rate for p in fit.points if p.workers == 1), fit.gamma)
    rows = []
    for p in fit.points:
        speedup = p.rate / one
        usd_a_second = usd_per_worker_hour * p.workers / 3600 if usd_per_worker_hour else None
        rows.append(
            Row(
                workers=p.workers,
                rate=p.rate,
                spread=p.spread,
                speedup=speedup,
                efficiency=speedup / p.workers,
                tokens_per_usd=None if usd_a_second is None else p.rate / usd_a_second,
                predicted=None if fit.model == "none" else fit.rate(p.workers),
            )
        )
    return rows


def recommend(fit: Fit) -> Recommendation:
    """The most workers of which the last still adds half of what one alone does.

    With a law, up to twice what was measured; without one, among what was measured. Elastic: down
    to the fewest that do half of the recommended ones' rate, up to the most of which the last still
    adds a quarter, never beyond the knee.
    """
    rates = _rates(fit)
    best = _most(rates, MARGIN)
    most = max(best, _most(rates, ELASTIC_MARGIN))
    fewest = next(n for n in sorted(rates) if rates[n] >= FALL_BACK * rates[best])
    adds = f"at least {100 * MARGIN:.0f} % of what one alone does"
    why = (
        f"the last worker added still does {adds}"
        if best > min(rates)
        else f"one more worker would not add {adds}"
    ) + (", as measured" if fit.model == "none" else ", by the fitted law")
    if fit.knee is not None and math.isfinite(fit.knee.value):
        why += f"; the knee is at {fit.knee.value:.1f}"
    if best > fit.points[-1].workers:
        why += f"; beyond {fit.points[-1].workers} it is the law's word: measure before paying"
    return Recommendation(workers=best, elastic=(fewest, most), why=why)


def _rates(fit: Fit) -> dict[int, float]:
    """Rate by number of workers: the law's up to its knee, or what was measured."""
    if fit.model == "none":
        return {p.workers: p.rate for p in fit.points}
    top = BEYOND * fit.points[-1].workers
    if fit.knee is not None:
        top = max(1, min(top, math.floor(fit.knee.value)))
    return {n: fit.rate(n) for n in range(1, top + 1)}


def _most(rates: Mapping[int, float], share: float) -> int:
    """The last count up to which each step adds `share` of one worker's rate a worker."""
    counts = sorted(rates)
    one, best = rates[counts[0]] / counts[0], counts[0]
    for before, n in itertools.pairwise(counts):
        if (rates[n] - rates[before]) / (n - before) < share * one:
            break
        best = n
    return best


def two_worker_check(points: Sequence[Point], facts: Mapping[str, Any]) -> Check:
    """The check `two-workers`: from one to two the rate should grow more than 1.8 times.

    Args:
        points: as measured.
        facts: what is known of the runs, all optional: `unit` ("workers" or "nodes"), `mode`,
            `strategy`, `cores` (of the machine), `cpus_per_worker`, `one_machine`,
            `communication_share` (exposed, of a step, by a profile), `input_share`,
            `tokens_per_worker_step`, `network_gib_s` (audited).
    """
    rates, unit = {p.workers: p.rate for p in points}, facts.get("unit", "workers")
    name = f"two-{unit}"
    if 1 not in rates or 2 not in rates:
        return Check(
            name=name,
            outcome="not measured",
            speedup=None,
            text=f"one and two {unit} were not both measured",
            causes=(),
        )
    speedup = rates[2] / rates[1]
    if speedup > RULE:
        text = f"two {unit} do {speedup:.2f} times what one does: more than {RULE}"
        return Check(name=name, outcome="passed", speedup=speedup, text=text, causes=())
    text = f"two {unit} do only {speedup:.2f} times what one does; more than {RULE} is expected"
    causes = tuple(_causes(points, facts))
    return Check(name=name, outcome="failed", speedup=speedup, text=text, causes=causes)


def _causes(points: Sequence[Point], facts: Mapping[str, Any]) -> list[str]:
    """The likely ones: what the facts point at first, then what is usual."""
    likely, usual = [], []
    cores, each = facts.get("cores"), facts.get("cpus_per_worker", 1)
    if facts.get("one_machine") and cores is not None and cores < 2 * each + 1:
        likely.append(
            f"the workers share one machine of {cores} cores, its memory and its caches, with each"
            " other and with all else that runs there: this is not what two nodes would do"
        )
    share = facts.get("communication_share")
    if share is not None and share > 0.1:
        likely.append(
            f"{100 * share:.0f} % of a step is communication that nothing hides: a slow link, or"
            " too little work between two exchanges"
        )
    elif share is None:
        usual.append("communication is not hidden behind compute: `hybrid profile` tells how much")
    share = facts.get("input_share")
    if share is not None and share > 0.1:
        likely.append(f"{100 * share:.0f} % of a step waits for data, whatever the workers")
    link = facts.get("network_gib_s")
    if link is not None:
        usual.append(
            f"the network: the audit's all-reduce reached {link:.3g} GiB/s of bus bandwidth"
        )
    else:
        usual.append(
            "the network: TCP where RDMA was meant, or a slow interface (NCCL_SOCKET_IFNAME,"
            " NCCL_IB_HCA; NCCL_DEBUG=INFO prints the choice; `hybrid audit` measures the link)"
        )
    if facts.get("mode") == "strong":
        tokens = facts.get("tokens_per_worker_step")
        often = f" ({tokens:,} tokens a step and worker at two)" if tokens else ""
        usual.append(f"the step is too small to divide{often}: see whether weak scaling passes")
    if facts.get("strategy") == "fsdp":
        usual.append("fsdp gathers the parameters anew for each micro-batch: larger ones, or ddp")
    noisy = max(p.spread for p in points)
    if noisy > 0.1:
        likely.append(f"the steps vary by {100 * noisy:.0f} %: something else runs on the machines")
    usual.append("one worker is slower than the other: training.faults.straggler names it")
    return likely + usual
