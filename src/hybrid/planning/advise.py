"""`hybrid advise`: the rule table's answer, what would change it, and the plans side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic import ValidationError

from hybrid.errors import ConfigError
from hybrid.planning.plans import Plan, Planner
from hybrid.planning.prices import Prices
from hybrid.planning.rules import (
    CHANGES_PER_MONTH,
    CLUSTER_MS,
    Answer,
    Finding,
    decide,
    findings,
)
from hybrid.planning.workload import Workload

ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "latency.limit_ms": (CLUSTER_MS - 1, CLUSTER_MS, 10_000.0, None),
    "steps": (1, 2, 5),
    "changes_per_month": (0.0, CHANGES_PER_MONTH),
    "budget.market": ("on-demand", "spot"),
    "train": (None,),
    "train.specialists": (0, 2),
    "serve.parameters": (7e9, 70e9, 400e9),
    "serve.weights": ("api",),
}
"""Values that are tried, one key at a time, to find what would change the answer."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One change to the workload, alone, that changes the answer."""

    field: str
    value: Any
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All that `hybrid advise` says.

    Attributes:
        answer: cluster, agents, hybrid, or single: one served model.
        findings: every rule, whether it applies, and why.
        turns: single changes that would lead to another answer.
        plans: the priced plans, that of the answer first.
        notes: inputs that look off, and how unclear ones were read.
        warnings: stale or missing prices.
    """

    workload: Workload
    answer: Answer
    findings: tuple[Finding, ...]
    turns: tuple[Turn, ...]
    plans: tuple[Plan, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def advise(w: Workload, prices: Prices) -> Advice:
    """Decide, and price every plan that could carry the workload out.

    Raises:
        ConfigError: a price or a speed that the answer's plan needs is not known; the key is
            named. Another plan that lacks one is left out, with a note.
    """
    found = findings(w)
    answer = decide(found)
    planner = Planner(w, prices)
    plans = [plan] if (plan := planner.plan(answer)) is not None else []
    for kind in get_args(Answer):
        if kind == answer or not _possible(kind, w):
            continue
        try:
            if (plan := planner.plan(kind)) is not None:
                plans.append(plan)
        except ConfigError as e:  # an alternative without a price takes nothing from the answer
            planner.notes.append(f"no plan for {kind}: {e.message}")
    if w.cluster and (others := w.cluster.product().others):
        planner.notes.append(
            f"cluster.gpu: {w.cluster.gpu!r} is read as {w.cluster.product().product}; it may also"
            f" mean {', '.join(others)}"
        )
    return Advice(
        workload=w,
        answer=answer,
        findings=found,
        turns=turning_points(w),
        plans=tuple(plans),
        notes=tuple(planner.notes),
        warnings=tuple(prices.warnings),
    )


def turning_points(w: Workload) -> tuple[Turn, ...]:
    """The single changes to the workload, of ALTERNATIVES, that lead to another answer.

    Of a key's values only the first that leads to an answer is kept.
    """
    now = decide(findings(w))
    turns: list[Turn] = []
    for key, values in ALTERNATIVES.items():
        seen: set[Answer] = set()
        for value in values:
            changed = _changed(w, key, value)
            if changed is None:
                continue
            answer = decide(findings(changed))
            if answer != now and answer not in seen:
                seen.add(answer)
                turns.append(Turn(field=key, value=value, answer=answer))
    return tuple(turns)


def to_document(advice: Advice) -> dict[str, Any]:
    """All of it as JSON."""
    data = asdict(advice)
    data["workload"] = advice.workload.model_dump(mode="json")
    return data


def _possible(kind: Answer, w: Workload) -> bool:
    """Whether a plan of that kind can do the work, and differs from the plainer ones."""
    large = any(f.rule == "large-model" and f.applies for f in findings(w))
    single = w.serve is not None and w.train is None and w.steps == 1 and not large
    match kind:
        case "single":
            return single
        case "cluster":
            return not single and (
                w.serve is not None or w.train is not None or w.cluster is not None
            )
        case "agents":
            return w.train is None and not large and (w.serve is not None or w.agents is not None)
        case "hybrid":
            return w.serve is not None and (w.train is not None or large)


def _changed(w: Workload, key: str, value: Any) -> Workload | None:
    """The workload with one key set; None where it has no such section or would be refused."""
    raw = w.model_dump()
    at = raw
    *parents, last = key.split(".")
    for parent in parents:
        if at[parent] is None:
            return None
        at = at[parent]
    if at[last] == value:
        return None
    at[last] = value
    try:
        return Workload.model_validate(raw)
    except ValidationError:
        return None
