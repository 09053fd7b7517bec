"""What an audit amounts to: JSON, money, what changed, and a letter to the seller."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybrid.audit import history
from hybrid.audit.conduct import NodeResult
from hybrid.audit.facts import as_number, finding
from hybrid.audit.figures import FORMAT
from hybrid.audit.reading import Finding, Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import GpuVerdict, NodeVerdict
from hybrid.audit.wire import finding_to_json
from hybrid.errors import DataError

FIGURES = (
    "measured.matmul_tflops.bf16", "measured.matmul_tflops.fp16", "measured.matmul_tflops.fp32",
    "cpu.matmul_gflops",
)  # fmt: skip
"""By which nodes are compared in money: the first that a node has."""
ORDER = ("contradicted", "unfit", "degraded", "note")
CHANGED = 0.05
"""Share by which a measured figure must differ to be shown as changed: genuine cards vary by it."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One audited node: readings, verdict, and its earlier audit where there is one."""

    result: NodeResult
    verdict: NodeVerdict
    previous: NodeResult | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a node's shortfall costs.

    Attributes:
        share: of what its peers, or the best measured of its product, reach.
        against: who that is.
        usd_lost_per_hour: of the node's price; None where no price is known.
    """

    node: str
    reading: str
    value: float
    expected: float
    unit: str
    share: float
    against: str
    usd_lost_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A reading that is not what it was at the earlier audit."""

    gpu: int | None
    name: str
    before: Any
    now: Any
    ratio: float | None


def costs(nodes: Sequence[NodeReport], usd_per_hour: float | None = None) -> list[Cost]:
    """Each node's main figure against the median of the others, else against the best known.

    Args:
        nodes: of one audit.
        usd_per_hour: price of one node.
    """
    figures = {n.result.name: _figure(n) for n in nodes}
    found = []
    for node in nodes:
        mine = figures[node.result.name]
        if mine is None:
            continue
        name, value, unit = mine
        like = [
            f[1]
            for other in nodes
            if other is not node
            and (f := figures[other.result.name]) is not None
            and f[0] == name
            and _products(other) == _products(node)
        ]
        expected, against = _best_known(node, name)
        if len(like) >= 2 or (like and expected is None):
            expected, against = statistics.median(like), f"the median of {len(like)} like it"
        if not expected:
            continue
        share = value / expected
        lost = None if usd_per_hour is None else max(0.0, 1 - share) * usd_per_hour
        found.append(
            Cost(
                node=node.result.name, reading=name, value=value, expected=expected, unit=unit,
                share=share, against=against, usd_lost_per_hour=lost,
            )
        )  # fmt: skip
    return found


def _figure(node: NodeReport) -> tuple[str, float, str] | None:
    """(name, sum over GPUs, unit) of a node's main figure."""
    for name in FIGURES:
        found = [r for r in node.result.readings if r.name == name and as_number(r) is not None]
        if found:
            return name, sum(as_number(r) or 0.0 for r in found), found[0].unit
    return None


def _products(node: NodeReport) -> tuple[str | None, ...]:
    return tuple(g.product or g.name for g in node.verdict.gpus)


def _best_known(node: NodeReport, name: str) -> tuple[float | None, str]:
    """What the node's products were measured to do at best, where somebody has."""
    total = 0.0
    if name != FIGURES[0]:
        return None, ""
    for gpu in node.verdict.gpus:
        sku = load_specs().by_product(gpu.product) if gpu.product else None
        if sku is None or sku.measured_matmul_tflops is None:
            return None, ""
        total += sku.measured_matmul_tflops
    return (total, "the best that was measured of its products (gpus.csv)") if total else (None, "")


def changes(now: Sequence[Reading], before: Sequence[Reading]) -> list[Change]:
    """Measured figures that differ by more than genuine cards do, and claims that differ at all."""
    earlier: dict[tuple[int | None, str, str], Reading] = {}
    for r in before:
        earlier.setdefault((r.gpu, r.name, r.source), r)
    found = []
    for r in now:
        old = earlier.pop((r.gpu, r.name, r.source), None)
        if old is None or r.value is None or old.value is None or old.value == r.value:
            continue
        a, b = as_number(old), as_number(r)
        if not r.name.startswith(("measured.", "cpu.", "disk.", "collective.", "challenge.s")):
            settled = ("claimed.name", "claimed.uuid", "claimed.serial", "claimed.driver_version",
                       "claimed.memory_mib", "claimed.vbios", "claimed.power_limit_w",
                       "claimed.ecc_mode", "claimed.mig_mode", "kernel.driver_version")  # fmt: skip
            if r.name not in settled:
                continue  # temperatures, clocks and states of the moment
        ratio = b / a if a and b is not None else None
        if ratio is not None and abs(ratio - 1) <= CHANGED:
            continue
        found.append(Change(gpu=r.gpu, name=r.name, before=old.value, now=r.value, ratio=ratio))
    return found


def handed_back(node: NodeResult, earlier: Sequence[NodeReport]) -> list[Finding]:
    """A note for GPUs that an earlier audit, of a node of any name, has already found wanting."""
    uuids = {r.value for r in node.readings if r.name == "claimed.uuid"}
    found = []
    for old in earlier:
        same = [r for r in old.result.readings if r.name == "claimed.uuid" and r.value in uuids]
        bad = old.verdict.identity == "contradicted" or old.verdict.health == "unfit"
        if same and bad:
            found.append(
                finding(
                    "handed-back", "health", "note",
                    f"{len(same)} GPUs were audited before, as {old.result.name}, and found"
                    f" {old.verdict.identity} and {old.verdict.health}",
                    [dataclasses.replace(r, gpu=None) for r in same[:1]],
                )
            )  # fmt: skip
    return found


def earlier_of(node: NodeResult, earlier: Sequence[NodeReport]) -> NodeResult | None:
    """The earlier audit of a node: of its name, else of its GPUs."""
    for old in earlier:
        if old.result.name == node.name:
            return old.result
    uuids = {r.value for r in node.readings if r.name == "claimed.uuid"}
    for old in earlier:
        if uuids & {r.value for r in old.result.readings if r.name == "claimed.uuid"}:
            return old.result
    return None


def to_document(
    nodes: Sequence[NodeReport],
    *,
    level: str,
    when: float,
    usd_per_hour: float | None = None,
) -> dict[str, Any]:
    """All of an audit as plain data: `hybrid audit --json`. `from_document` reads it."""
    data = history.document([n.result for n in nodes], level=level, when=when)
    for entry, node in zip(data["nodes"], nodes, strict=True):
        entry["verdict"] = {
            "identity": node.verdict.identity,
            "health": node.verdict.health,
            "gpus": [dataclasses.asdict(g) for g in node.verdict.gpus],
        }
        entry["findings"] = [finding_to_json(f) for f in node.verdict.findings]
        if node.previous is not None:
            entry["changes"] = [
                dataclasses.asdict(c) for c in changes(node.result.readings, node.previous.readings)
            ]
    found = costs(nodes, usd_per_hour)
    data["costs"] = [dataclasses.asdict(c) for c in found]
    clean: dict[str, Any] = _finite(data)
    return clean


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_document(data: dict[str, Any]) -> list[NodeReport]:
    """The nodes of `to_document`'s data.

    Raises:
        DataError: it is none.
    """
    found = []
    try:
        if data["format"] != FORMAT:
            raise DataError(f"an audit of format {data['format']}, not {FORMAT}")
        for entry in data["nodes"]:
            result = history.from_json(entry)
            told = entry["verdict"]
            gpus = tuple(
                GpuVerdict(
                    **{**g, "also_fits": tuple(g["also_fits"]), "missing": tuple(g["missing"])}
                )
                for g in told["gpus"]
            )
            verdict = NodeVerdict(
                identity=told["identity"], health=told["health"],
                findings=tuple(result.findings), gpus=gpus,
            )  # fmt: skip
            found.append(NodeReport(result=result, verdict=verdict))
    except (KeyError, TypeError, AttributeError) as e:
        raise DataError(f"not an audit: {type(e).__name__}: {e}") from None
    return found


def read_document(path: Path) -> list[NodeReport]:
    """An earlier audit that `hybrid audit --json` wrote.

    Raises:
        DataError: the file cannot be read or is none; the message names it.
    """
    try:
        return from_document(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, DataError) as e:
        raise DataError(f"{path}: {e}") from None


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Findings by severity."""
    return sorted(findings, key=lambda f: ORDER.index(f.severity))


def letter(node: NodeReport, cost: Cost | None = None, *, when: float) -> str:
    """A text that a renter can send to the seller: findings, readings, who says what to expect."""
    day = datetime.fromtimestamp(when, UTC).strftime("%d %B %Y, %H:%M UTC")
    serious = [f for f in worst_first(node.verdict.findings) if f.severity != "note"]
    if not serious:
        return f"Node {node.result.name}, audited on {day}: nothing to complain about.\n"
    lines = [
        f"Node {node.result.name} was audited on {day}.",
        f"Identity: {node.verdict.identity}. Health: {node.verdict.health}.",
        "",
    ]
    for i, f in enumerate(serious, 1):
        lines.append(f"{i}. {f.text}.")
        for r in f.readings[:4]:
            lines.append(f"   read: {shown(r)} ({r.source}, {forgeable(r)})")
        if f.expected is not None:
            lines.append(f"   expected: {expectation(f)}")
    if cost is not None and cost.share < 1 - CHANGED:
        money = (
            f", which is {cost.usd_lost_per_hour:.2f} USD of every hour that is paid for"
            if cost.usd_lost_per_hour is not None
            else ""
        )
        lines += [
            "",
            f"It reaches {100 * cost.share:.0f} % of {cost.against} in {cost.reading}"
            f" ({cost.value:.4g} against {cost.expected:.4g} {cost.unit}){money}.",
        ]
    uuids = [str(r.value) for r in node.result.readings if r.name == "claimed.uuid"]
    if uuids:
        lines += ["", "GPUs: " + ", ".join(dict.fromkeys(uuids))]
    lines += ["", "Please replace the node, or say why these readings are right."]
    return "\n".join(lines) + "\n"


def shown(r: Reading) -> str:
    """ "measured.sm_count of GPU 0: 70 count"."""
    value = f"{r.value:.4g}" if isinstance(r.value, float) else str(r.value)
    gpu = "" if r.gpu is None else f" of GPU {r.gpu}"
    return f"{r.name}{gpu}: {value}{' ' + r.unit if r.unit else ''}"


def forgeable(r: Reading) -> str:
    """Whether a seller could set a reading."""
    return "could be faked" if r.fakeable else "cannot be faked"


def expectation(f: Finding) -> str:
    """What a finding's reading was held against, and who says so."""
    if f.expected is None:
        return ""
    e = f.expected
    parts = [", ".join(str(a) for a in e.allowed)] if e.allowed else []
    if e.low is not None:
        parts.append(f"at least {e.low:.6g}")
    if e.high is not None:
        parts.append(f"at most {e.high:.6g}")
    return f"{', '.join(parts)} ({e.source})" if parts else e.source
