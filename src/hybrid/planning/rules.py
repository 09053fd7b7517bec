"""The rule table that decides between cluster, agents, hybrid and one served model.

Every rule is one question to the workload. It needs a cluster, needs agents, or rules agents out;
`decide` counts needs and nothing else, so that the answer follows from the printed table alone:

    needs a cluster and agents       hybrid
    needs a cluster                  cluster
    needs agents                     agents
    needs agents, they are ruled out cluster
    needs nothing                    single: one served model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from hybrid.planning.latency import chain, hops_of
from hybrid.planning.workload import ClusterPart, Workload

Answer = Literal["cluster", "agents", "hybrid", "single"]
Effect = Literal["needs cluster", "needs agents", "rules agents out"]

CLUSTER_MS = 500.0
"""End to end below this, a chain of durable hops over a network leaves no time for the model."""
CHANGES_PER_MONTH = 4.0
"""From one new type a week on, a model that is trained anew for each is always behind."""
MEMORY_SHARE = 0.8
"""Share of a GPU's memory that weights may take; the rest is keys and values, and work space."""
WEIGHT_BYTES = 2.0
"""Of a served parameter, bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table.

    Attributes:
        name: unique.
        field: the key of workload.yaml that it asks.
        effect: what follows when it applies.
        applies: whether it does.
        why: the reason, of a workload to which it applies.
        else_why: what is the case where it does not.
        change: what would change the rule's answer.
    """

    name: str
    field: str
    effect: Effect
    applies: Callable[[Workload], bool]
    why: Callable[[Workload], str]
    else_why: str
    change: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule said of a workload."""

    rule: str
    field: str
    effect: Effect
    applies: bool
    why: str
    change: str


def weights_gb(w: Workload) -> float:
    """GB of the served model's own weights in bfloat16; 0 over an API."""
    own = w.serve and w.serve.weights == "own"
    return WEIGHT_BYTES * (w.serve.parameters or 0) / 1e9 if own and w.serve else 0.0


def gpu_memory_gb(w: Workload) -> float:
    """Memory of one GPU of the pool; 80 where the table does not know it."""
    return (w.cluster or ClusterPart()).product().memory_gb or 80.0


def _serves_large(w: Workload) -> bool:
    return weights_gb(w) > MEMORY_SHARE * gpu_memory_gb(w)


def _busy_replicas(w: Workload) -> float:
    """Replicas kept busy, by what one was measured to do; 0 where nobody measured."""
    if w.serve is None or w.serve.calls_per_replica_s is None:
        return 0.0
    return w.serve.requests_per_s * w.steps / w.serve.calls_per_replica_s


def _chain_too_slow(w: Workload) -> bool:
    """Whether given hops add up to more than the limit at the 99th percentile."""
    limit = w.latency.limit_ms
    return limit is not None and bool(w.latency.hops) and chain(hops_of(w)).p99_ms.mid > limit


def _spot(w: Workload) -> bool:
    return w.budget is not None and w.budget.market == "spot"


RULES: tuple[Rule, ...] = (
    Rule(
        name="train",
        field="train",
        effect="needs cluster",
        applies=lambda w: w.train is not None,
        why=lambda w: (
            f"a base of {_big(w.train.parameters if w.train else 0)} parameters is trained: every"
            " step sums gradients over all workers, which only tightly coupled machines do"
        ),
        else_why="no base is trained",
        change="no `train`: take a base that somebody has trained",
    ),
    Rule(
        name="rented-gpus",
        field="cluster.gpus",
        effect="needs cluster",
        applies=lambda w: w.cluster is not None and not (w.train or w.serve),
        why=lambda w: (
            f"{w.cluster.gpus if w.cluster else 0} GPUs are asked for by name, and no work that"
            " would say otherwise"
        ),
        else_why="the work itself says what it needs, or no GPUs are asked for",
        change="say what is done: `train`, `serve`",
    ),
    Rule(
        name="rented-nodes",
        field="agents.nodes",
        effect="needs agents",
        applies=lambda w: w.agents is not None and not (w.train or w.serve),
        why=lambda w: "nodes of agents are asked for by name, and no work that would say otherwise",
        else_why="the work itself says what it needs, or no nodes are asked for",
        change="say what is done: `train`, `serve`",
    ),
    Rule(
        name="large-model",
        field="serve.parameters",
        effect="needs cluster",
        applies=_serves_large,
        why=lambda w: (
            f"weights of {weights_gb(w):,.0f} GB do not fit one GPU of {gpu_memory_gb(w):,.0f} GB:"
            " several must answer together, over fast links"
        ),
        else_why="the served model fits one GPU, or is called over an API",
        change="a smaller model, a GPU with more memory, or `serve.weights: api`",
    ),
    Rule(
        name="busy-replicas",
        field="serve.calls_per_replica_s",
        effect="needs cluster",
        applies=lambda w: _busy_replicas(w) > 1,
        why=lambda w: f"the calls keep {_busy_replicas(w):.1f} replicas of the model busy",
        else_why="one replica carries the calls, or what one carries was not measured",
        change="fewer requests or steps, or a faster replica",
    ),
    Rule(
        name="steps",
        field="steps",
        effect="needs agents",
        applies=lambda w: w.steps > 1,
        why=lambda w: (
            f"{w.steps} model calls build on one another"
            + (f" over {w.skill_count} skills" if w.skill_count > 1 else "")
            + ": each is journalled on its own, waits without holding a GPU, and is retried alone"
        ),
        else_why="one model call answers a request: input to output",
        change="`steps: 1`: one call that does it all",
    ),
    Rule(
        name="specialists",
        field="train.specialists",
        effect="needs agents",
        applies=lambda w: w.train is not None and w.train.specialists > 1,
        why=lambda w: (
            f"{w.train.specialists if w.train else 0} specialists on one base: each is an adapter"
            " with an agent of its own, added without touching the others"
        ),
        else_why="no specialists are trained, or only one",
        change="`train.specialists: 0`: one model for all of it",
    ),
    Rule(
        name="changes",
        field="changes_per_month",
        effect="needs agents",
        applies=lambda w: w.changes_per_month >= CHANGES_PER_MONTH,
        why=lambda w: (
            f"{w.changes_per_month:g} new types a month: an agent is added in a second, where one"
            " global model is trained and judged again for each"
        ),
        else_why=f"fewer than {CHANGES_PER_MONTH:g} new types a month: one model can keep up",
        change=f"fewer than {CHANGES_PER_MONTH:g} new types a month",
    ),
    Rule(
        name="spot-budget",
        field="budget.market",
        effect="needs agents",
        applies=lambda w: _spot(w) and w.train is None and not _serves_large(w),
        why=lambda w: (
            "the budget pays for spot machines only: work in small durable steps loses one step"
            " when a machine goes, a tightly coupled group stops as a whole"
        ),
        else_why="on-demand machines can be paid for, or the work cannot be taken apart",
        change="`budget.market: on-demand`",
    ),
    Rule(
        name="latency",
        field="latency.limit_ms",
        effect="rules agents out",
        applies=lambda w: w.latency.limit_ms is not None and w.latency.limit_ms < CLUSTER_MS,
        why=lambda w: (
            f"{w.latency.limit_ms:g} ms end to end, less than {CLUSTER_MS:g}: no time for hops"
            " between machines; the model and its adapters answer where the request arrives"
        ),
        else_why=f"no limit, or one of {CLUSTER_MS:g} ms and more",
        change=f"a limit of {CLUSTER_MS:g} ms or more",
    ),
    Rule(
        name="chain-latency",
        field="latency.hops",
        effect="rules agents out",
        applies=_chain_too_slow,
        why=lambda w: (
            f"the hops take {chain(hops_of(w)).p99_ms.mid:,.0f} ms at the 99th percentile,"
            f" over the limit of {w.latency.limit_ms:g}"
        ),
        else_why="the given hops keep the limit, or there is no limit or no hop",
        change="fewer or faster hops, or a higher limit",
    ),
)


def findings(w: Workload) -> tuple[Finding, ...]:
    """What every rule says, in the table's order."""
    return tuple(
        Finding(
            rule=rule.name,
            field=rule.field,
            effect=rule.effect,
            applies=(applies := rule.applies(w)),
            why=rule.why(w) if applies else rule.else_why,
            change=rule.change,
        )
        for rule in RULES
    )


def decide(found: Iterable[Finding]) -> Answer:
    """The answer that the findings that apply lead to; see the head of this file."""
    effects = {f.effect for f in found if f.applies}
    wanted = "needs agents" in effects
    agents = wanted and "rules agents out" not in effects
    if "needs cluster" in effects:
        return "hybrid" if agents else "cluster"
    if agents:
        return "agents"
    return "cluster" if wanted else "single"


def _big(count: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:g}{suffix}"
    return f"{count:g}"
