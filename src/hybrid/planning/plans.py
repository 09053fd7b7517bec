"""The plans that a workload can be carried out by, each priced with ranges and held to its limits.

A plan is a sum of parts: training, the served model, agents, model calls over an API. The parts of
a plan follow from its kind; what a part costs, from the files of that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hybrid.errors import ConfigError
from hybrid.planning import agents_cost, training_cost
from hybrid.planning.latency import QUEUE, ChainLatency, chain, hops_of
from hybrid.planning.prices import Prices
from hybrid.planning.ranges import Estimate, Range, Values, estimate, exactly, shown
from hybrid.planning.rules import Answer, gpu_memory_gb, weights_gb
from hybrid.planning.spot import CORRELATION, INTERRUPTIONS, pool_risk
from hybrid.planning.workload import AgentsPart, ClusterPart, Hop, Workload

SERVING_SHARE = Range(0.05, 0.15, 0.35, "assumed: share of matmul speed that serving reaches")
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """One item of a plan's bill.

    Attributes:
        name: what is paid for.
        inputs: what its cost follows from.
        usd: its cost, from one value of each input.
        monthly: whether it is paid every month of the horizon, or once.
        notes: what a reader should know of it.
    """

    name: str
    inputs: dict[str, Range]
    usd: Callable[[Values], float]
    monthly: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to carry the workload out.

    Attributes:
        kind: which.
        usd: what it costs in all, over the horizon.
        parts: (name, USD of it, notes) of each part.
        training_hours: wall hours of the training; None: there is none.
        latency: of one request; None: nothing is served.
        misses: limits of the workload that it does not keep, each a sentence.
    """

    kind: Answer
    usd: Estimate
    parts: tuple[tuple[str, Estimate, tuple[str, ...]], ...]
    training_hours: Estimate | None
    latency: ChainLatency | None
    misses: tuple[str, ...]


@dataclass
class Planner:
    """Prices the plans of one workload."""

    workload: Workload
    prices: Prices
    notes: list[str] = field(default_factory=list)

    def plan(self, kind: Answer) -> Plan | None:
        """The plan of that kind; None where it cannot be made, as agents that train a base.

        Raises:
            ConfigError: a price or a speed that it needs is not known; the key is named.
        """
        w = self.workload
        if w.train and kind in ("agents", "single"):
            return None
        parts: list[Part] = []
        hours: Estimate | None = None
        if kind in ("cluster", "hybrid") and (w.train or not w.serve) and (w.train or w.cluster):
            part, hours = self._gpus()
            parts.append(part)
        if w.serve and w.serve.weights == "own":
            parts.append(self._replicas())
        if w.serve and w.serve.usd_per_call:
            parts.append(self._calls(w.serve.usd_per_call))
        if kind in ("agents", "hybrid") and (w.serve or w.agents):
            parts.append(self._nodes())
        if not parts:
            return None
        latency = self._latency(kind) if w.serve else None
        usd = estimate(
            lambda v: sum(p.usd(v) for p in parts),
            {k: r for p in parts for k, r in p.inputs.items()},
        )
        return Plan(
            kind=kind,
            usd=usd,
            parts=tuple((p.name, estimate(p.usd, p.inputs), p.notes) for p in parts),
            training_hours=hours,
            latency=latency,
            misses=self._misses(parts, hours, latency),
        )

    def _gpu_price(self, cluster: ClusterPart, market: Literal["on-demand", "spot"]) -> Range:
        product = cluster.product()
        usual = self.prices.of(product.product, market)
        if cluster.usd_per_hour is None:
            return self.prices.gpu(product.product, market)
        each = cluster.usd_per_hour / cluster.gpus
        self._note(f"${shown(cluster.usd_per_hour)}/h for {cluster.gpus} GPUs is"
                   f" ${each:.2f} per {product.product}-hour")  # fmt: skip
        if odd := self.prices.odd(each, f"{product.product}-hour", usual):
            self._note(f"cluster.usd_per_hour {odd}")
        return exactly(each)

    def _gpus(self) -> tuple[Part, Estimate | None]:
        """The gpu pool for the training, or for as long as it is rented."""
        w = self.workload
        cluster = w.cluster or ClusterPart()
        market = self._market(cluster)
        paid = f"USD a GPU-hour, {market}"  # a plan may pay two prices: serving is on demand
        price = {paid: self._gpu_price(cluster, market)}
        gpus = cluster.gpus
        if w.train is None or cluster.hours is not None:
            held = cluster.hours or w.horizon_hours
            name = f"{gpus} GPUs for {shown(held)} h"
            part = Part(name=name, inputs=price, usd=lambda v: gpus * held * v[paid])
            if w.train is None:
                return part, None
        try:
            given = training_cost.inputs(w.train, cluster, market == "spot")
        except ValueError as e:
            raise ConfigError(str(e)) from None
        nodes, zones = cluster.nodes, cluster.zones
        hours = estimate(lambda v: training_cost.training_time(v, nodes, zones).wall, given)
        mids = {name: figure.mid for name, figure in given.items()}
        at_mid = training_cost.training_time(mids, nodes, zones)
        notes = (
            f"{shown(at_mid.compute)} h at full speed, {shown(at_mid.saving)} h saving every"
            f" {shown(at_mid.interval_s / 60)} min, {shown(at_mid.lost)} h lost to"
            f" {shown(at_mid.failures)} failures",
        )
        if cluster.hours is not None:
            if hours.value.mid > cluster.hours:
                self._note(
                    f"cluster.hours: {cluster.hours:g} h are paid for, and the training takes"
                    f" about {shown(hours.value.mid)} h"
                )
            return Part(name=part.name, inputs=price, usd=part.usd, notes=notes), hours
        return (
            Part(
                name=f"training on {gpus} GPUs",
                inputs=price | given,
                usd=lambda v: gpus * v[paid] * training_cost.training_time(v, nodes, zones).wall,
                notes=notes,
            ),
            hours,
        )

    def _replicas(self) -> Part:
        """GPUs that answer the model calls, for the horizon."""
        w = self.workload
        serve, cluster = w.serve, w.cluster or ClusterPart()
        assert serve is not None
        assert serve.parameters is not None
        weights, memory = weights_gb(w), gpu_memory_gb(w)
        each = 2 ** math.ceil(math.log2(max(1.0, weights / (0.8 * memory))))
        calls = serve.requests_per_s * w.steps
        paid = "USD a GPU-hour, on-demand"
        inputs = {paid: self._gpu_price(cluster, "on-demand")}
        if serve.calls_per_replica_s is not None:
            inputs["calls a replica-second"] = exactly(serve.calls_per_replica_s, "measured")
        else:
            try:
                matmuls = training_cost.matmul_tflops(cluster)
            except ValueError as e:
                raise ConfigError(str(e)) from None
            flops = 2 * serve.parameters * serve.tokens_per_call
            scale = each * 1e12 / flops
            inputs["calls a replica-second"] = Range(
                scale * matmuls.low * SERVING_SHARE.low,
                scale * matmuls.mid * SERVING_SHARE.mid,
                scale * matmuls.high * SERVING_SHARE.high,
                f"2 FLOPs a parameter and token; {SERVING_SHARE.source}",
            )
        hours = w.horizon_hours

        def replicas(v: Values) -> int:
            return max(1, math.ceil(calls / (0.7 * v["calls a replica-second"])))

        mids = {name: figure.mid for name, figure in inputs.items()}
        return Part(
            name=f"{replicas(mids)} x {each} GPUs that serve",
            inputs=inputs,
            usd=lambda v: replicas(v) * each * hours * v[paid],
            monthly=True,
            notes=(
                f"{shown(calls)} calls/s at 70 % of {shown(mids['calls a replica-second'])}"
                " a replica",
            ),
        )

    def _calls(self, usd: float) -> Part:
        w = self.workload
        assert w.serve is not None
        calls = w.serve.requests_per_s * w.steps * 3600 * w.horizon_hours
        return Part(
            name=f"{shown(calls)} calls over an API",
            inputs={"USD a call": exactly(usd)},
            usd=lambda v: calls * v["USD a call"],
            monthly=True,
            notes=("as if the busiest rate went on all the time",),
        )

    def _nodes(self) -> Part:
        """Agents' nodes: as many as are given, or as Little's law asks for."""
        w = self.workload
        agents = w.agents or AgentsPart()
        market = self._market(agents)
        hours = agents.hours or w.horizon_hours
        given = agents_cost.inputs(w.serve, agents) if w.serve else {}
        notes: list[str] = []
        count = agents.nodes or 0
        if w.serve:
            mids = {name: figure.mid for name, figure in given.items()}
            need = agents_cost.capacity(mids, w.steps, agents)
            count = need.nodes
            notes.append(
                f"{shown(need.calls_per_s)} calls/s x {shown(mids['model call, s'])} s ="
                f" {shown(need.in_flight)} in flight; {100 * need.utilisation:.0f} % busy"
            )
            if need.utilisation > agents.ceiling:
                self._note(
                    f"agents.nodes: {agents.nodes} are {100 * need.utilisation:.0f} % busy, over"
                    f" the ceiling of {100 * agents.ceiling:.0f} %: {need.needed} are needed"
                )
        elif not count:
            raise ConfigError("agents.nodes: missing; without `serve` nothing says how many")
        usual = self.prices.node(agents.vcpus, agents.memory_gb, market)
        if agents.usd_per_hour is None:
            if usual is None:
                raise ConfigError(
                    f"agents.usd_per_hour: missing, and the price table has no {market} price of"
                    " vCPU and GB; give it, or a table with --prices"
                )
            price = usual
        else:
            price = exactly(agents.usd_per_hour / count)
            self._note(
                f"${shown(agents.usd_per_hour)}/h for {count} nodes is ${price.mid:.3f} per"
                f" node-hour of {agents.vcpus:g} vCPU and {agents.memory_gb:g} GB"
            )
            if odd := self.prices.odd(price.mid, f"{market} node-hour", usual):
                self._note(f"agents.usd_per_hour {odd}")
        if market == "spot":
            notes.append(self._risk(agents, count, hours))
        fixed = agents.nodes

        def nodes(v: Values) -> float:
            return fixed or agents_cost.capacity(v, w.steps, agents).nodes

        return Part(
            name=f"{count} nodes of agents ({market})",
            inputs=given | {"USD a node-hour": price},
            usd=lambda v: nodes(v) * hours * v["USD a node-hour"],
            monthly=agents.hours is None,
            notes=tuple(notes),
        )

    def _risk(self, agents: AgentsPart, nodes: int, hours: float) -> str:
        rate = agents.interruptions_per_node_hour or INTERRUPTIONS.mid
        share = CORRELATION.mid if agents.correlation is None else agents.correlation
        risk = pool_risk(rate, share, nodes, agents.zones, hours, agents.replace_s)
        return (
            f"spot: {shown(risk.zone_shocks)} times in {shown(hours)} h a zone goes and takes"
            f" {risk.taken_at_once} nodes at once; half of all are gone at some moment with"
            f" probability {risk.half_gone:.2g} (if nodes went independently:"
            f" {risk.half_gone_independent:.2g})"
        )

    def _market(self, pool: ClusterPart | AgentsPart) -> Literal["on-demand", "spot"]:
        """A pool's market; what may not be interrupted is not put on spot."""
        if self.workload.interruptible is False and pool.market == "spot":
            which = "cluster" if isinstance(pool, ClusterPart) else "agents"
            self._note(f"interruptible: no, so that {which} is priced on demand, not on spot")
            return "on-demand"
        budget = self.workload.budget
        return "spot" if budget is not None and budget.market == "spot" else pool.market

    def _latency(self, kind: Answer) -> ChainLatency:
        """A plan's chain: agents add a queue before every call unless the hops are given."""
        w = self.workload
        hops: tuple[Hop, ...] = hops_of(w)
        if not w.latency.hops:
            calls = tuple(h for h in hops if h is not QUEUE)
            hops = (
                tuple(h for call in calls for h in (QUEUE, call))
                if kind in ("agents", "hybrid")
                else calls
            )
        return chain(hops)

    def _misses(
        self, parts: list[Part], hours: Estimate | None, latency: ChainLatency | None
    ) -> tuple[str, ...]:
        w, missed = self.workload, []
        if hours and w.train:
            cluster = w.cluster or ClusterPart()
            needs = training_cost.MEMORY_BYTES * w.train.parameters / 1e9
            has = cluster.gpus * gpu_memory_gb(w)
            if needs > has:
                missed.append(f"cluster.gpus: {cluster.gpus} hold {shown(has)} GB; parameters,"
                              f" gradients and optimiser take {shown(needs)} GB")  # fmt: skip
        deadline = w.train.deadline_hours if w.train else None
        if hours and deadline and hours.value.mid > deadline:
            missed.append(f"train.deadline_hours: {deadline:g}; it takes"
                          f" {shown(hours.value.mid)} h")  # fmt: skip
        limit = w.latency.limit_ms
        if latency and limit and latency.p99_ms.mid > limit:
            missed.append(f"latency.limit_ms: {limit:g}; 1 in 100 takes over"
                          f" {shown(latency.p99_ms.mid)} ms")  # fmt: skip
        if w.budget and w.budget.usd:
            total = sum(self._charged(p) for p in parts)
            if total > w.budget.usd:
                of = "a month" if w.budget.per == "month" else "in all"
                missed.append(f"budget.usd: ${shown(w.budget.usd)} {of}; it costs ${shown(total)}")
        return tuple(missed)

    def _charged(self, part: Part) -> float:
        """What counts against the budget: of monthly parts a month's share, of others all."""
        usd = part.usd({name: figure.mid for name, figure in part.inputs.items()})
        if part.monthly and self.workload.budget and self.workload.budget.per == "month":
            return usd * min(1.0, HOURS_PER_MONTH / self.workload.horizon_hours)
        return usd

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
