"""Verdicts on a node: is it the hardware that is paid for (identity), and is it well (health)?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hybrid.audit.clouds import of_proof
from hybrid.audit.contradictions import claimed_product, contradictions
from hybrid.audit.facts import Facts, finding
from hybrid.audit.health import claimed_health, measured_health, node_health
from hybrid.audit.measured import Check, against_product, also_fits, checks, without_product
from hybrid.audit.reading import Finding, Reading
from hybrid.audit.specs import Sku, Specs

Identity = Literal["genuine", "contradicted", "unknown"]
Health = Literal["fit", "degraded", "unfit"]


@dataclass(frozen=True, kw_only=True)
class GpuVerdict:
    """Of one GPU.

    Attributes:
        product: the claimed product in our table; None where it is none of it.
        also_fits: other products that what was measured does not exclude.
        missing: readings without which identity stays unknown.
    """

    gpu: int
    name: str | None
    product: str | None
    identity: Identity
    health: Health
    also_fits: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeVerdict:
    """Of a node: the worst of its GPUs and of itself."""

    identity: Identity
    health: Health
    findings: tuple[Finding, ...]
    gpus: tuple[GpuVerdict, ...]


def judge(
    readings: Sequence[Reading],
    specs: Specs,
    previous: Sequence[Reading] | None = None,
    *,
    findings: Iterable[Finding] = (),
    sold_as: str | None = None,
) -> NodeVerdict:
    """Judge a node by its readings.

    Args:
        readings: of the node (gpu None) and its GPUs, claims and measurements together.
        specs: the table of products.
        previous: readings of an earlier audit of the same node.
        findings: those that the driver made (challenges, collectives, peers); they count.
        sold_as: what the renter pays for, e.g. "A100 80GB"; None: what the node claims to be.
    """
    facts = Facts(readings)
    before = None if previous is None else Facts(previous)
    found = [
        *findings,
        *contradictions(facts, specs, before, sold_as),
        *of_proof(facts),
        *node_health(facts),
    ]
    products: dict[int, Sku | None] = {}
    for gpu in facts.gpus:
        sku = products[gpu] = claimed_product(facts, gpu, specs)
        found += without_product(facts, gpu)
        if sku is not None:
            found += against_product(facts, gpu, sku, specs)
        found += claimed_health(facts, gpu, sku)
        found += measured_health(facts, gpu, sku)
    gpus = []
    for gpu, sku in products.items():
        verdict = _gpu(facts, gpu, sku, specs, found)
        gpus.append(verdict)
        if verdict.identity == "genuine" and verdict.also_fits:
            found.append(_twins(facts, verdict))
    return NodeVerdict(
        identity=_worst_identity(found, [g.identity for g in gpus]),
        health=_health(found),
        findings=tuple(found),
        gpus=tuple(gpus),
    )


def _gpu(
    facts: Facts, gpu: int, sku: Sku | None, specs: Specs, found: Sequence[Finding]
) -> GpuVerdict:
    """One GPU. What contradicts the node as a whole contradicts each of its GPUs."""
    own = [f for f in found if f.gpu == gpu or f.gpu is None or gpu in {r.gpu for r in f.readings}]
    missing: tuple[str, ...] = ()
    fits: tuple[str, ...] = ()
    identity: Identity = "unknown"
    if sku is not None:
        done = checks(facts, gpu, sku)
        missing = tuple(c.reading for c in done if c.says != "agrees" and _needed(c, sku))
        fits = also_fits(facts, gpu, sku, specs)
        if not missing:
            identity = "genuine"
    if any(f.severity == "contradicted" for f in own):
        identity = "contradicted"
    return GpuVerdict(
        gpu=gpu,
        name=facts.text("claimed.name", gpu),
        product=sku.product if sku is not None else None,
        identity=identity,
        health=_health(own),
        also_fits=fits,
        missing=missing,
    )


def _needed(check: Check, sku: Sku) -> bool:
    """A property without which identity stays unknown.

    SMs and memory are always needed, also where the table has no figure to hold them against; the
    others where it has one.
    """
    if check.says == "differs":
        return True
    cells = {
        "measured.compute_capability": sku.compute_capability,
        "measured.memory_gib_s": sku.mem_bw_gbs,
        "measured.matmul_tflops.bf16": sku.tensor_tflops,
        "measured.matmul_tflops.fp16": sku.tensor_tflops,
    }
    return cells.get(check.reading, True) is not None


def _twins(facts: Facts, verdict: GpuVerdict) -> Finding:
    sms = facts.all("measured.sm_count", verdict.gpu)
    return finding(
        "twin-not-excluded", "identity", "note",
        f"what was measured of GPU {verdict.gpu} also fits {', '.join(verdict.also_fits)}: they"
        " differ from it in NVLink, power or price only",
        sms,
    )  # fmt: skip


def _worst_identity(found: Sequence[Finding], gpus: Sequence[Identity]) -> Identity:
    if any(f.severity == "contradicted" for f in found):
        return "contradicted"
    return "genuine" if gpus and all(g == "genuine" for g in gpus) else "unknown"


def _health(found: Sequence[Finding]) -> Health:
    severities = {f.severity for f in found if f.axis == "health"}
    if "unfit" in severities:
        return "unfit"
    return "degraded" if "degraded" in severities else "fit"
