"""Findings of the driver: hung steps, wrong answers, cores that are not there, slow peers.

What a node says of its GPUs, and what was measured of each, is `verdict.py`'s to judge.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hybrid.audit.conduct import NodeResult
from hybrid.audit.reading import Axis, Expectation, Finding, Reading, Severity

CORES_SHORT = 0.85
"""Share of the claimed cores below which they are missing."""
MEMORY_SHORT = 0.90
"""Share of the claimed host memory: the kernel keeps a few per cent for itself."""
BUSY = 0.75
"""Share of the cores that busy threads must get, or other work is noted."""
STOLEN = 0.10
"""Share of the time that a hypervisor may give to others before the node is degraded."""
SHARED_CARD = 1.7
"""By how much a GPU may slow down when its neighbours work too; two sharing one card: 2."""
GPU_PEERS = 0.85
"""Share of the peers' median below which a GPU is slow: genuine ones of a node spread by 5 %."""
CPU_PEERS = 0.70
"""The same for what other work on a machine disturbs."""
PAIR_SHORT = 0.5
"""Share of the median exchange between two nodes below which a node's links are slow."""
PEER_READINGS = (
    "matmul_gflops", "matmul_tflops.fp64", "matmul_tflops.fp32", "matmul_tflops.tf32",
    "matmul_tflops.bf16", "matmul_tflops.fp16", "matmul_tflops.fp8", "matmul_tflops.int8",
    "memory_gib_s", "h2d_gib_s", "d2h_gib_s",
)  # fmt: skip
_OUTCOMES: dict[Any, tuple[Severity, str]] = {
    "timed-out": ("unfit", "hung"),
    "died": ("unfit", "ended its process"),
    "lost": ("unfit", "was not answered"),
    "failed": ("note", "failed"),
}


def of_node(result: NodeResult) -> list[Finding]:
    """Findings of one node's own readings."""
    found = [f for r in result.readings if (f := _of_outcome(r)) is not None]
    for judge in (_of_host_memory, _of_challenge):
        found += [f for r in result.readings if (f := judge(r)) is not None]
    found += _of_host(result)
    found += _of_collectives(result)
    return found


def _finding(
    kind: str,
    axis: Axis,
    severity: Severity,
    text: str,
    readings: Iterable[Reading],
    expected: Expectation | None = None,
) -> Finding:
    given = tuple(readings)
    return Finding(
        kind=kind, axis=axis, severity=severity, text=text, readings=given, expected=expected,
        gpu=given[0].gpu if given else None,
    )  # fmt: skip


def _of_outcome(r: Reading) -> Finding | None:
    if not (r.name.startswith("probe.") and r.name.endswith(".outcome")) or r.value == "done":
        return None
    severity, what = _OUTCOMES[r.value]
    error = str(r.detail.get("error", ""))
    step = r.name.split(".")[1]
    if r.value == "failed" and "CUDA error" in error:
        severity = "unfit"
    elif r.value == "failed" and step == "collectives":
        severity = "degraded"  # it may only have waited for another, who is found by name
    where = r.detail.get("device", "the node")
    return _finding(
        f"probe-{r.value}", "health", severity, f"{step} on {where} {what}: {error}", [r]
    )


def _of_host_memory(r: Reading) -> Finding | None:
    if not (r.name.startswith("cpu.") and r.name.endswith("_errors")) or not r.value:
        return None
    text = f"the host's memory did not keep what was written: {r.value} places"
    return _finding("host-memory-errors", "health", "unfit", text, [r])


def _of_challenge(r: Reading) -> Finding | None:
    gpu = "the device" if r.gpu is None else f"GPU {r.gpu}"
    if r.name == "challenge.correct" and r.value is False:
        text = f"{gpu} answered a challenge wrongly: {r.detail.get('error')}"
        return _finding("challenge-wrong", "health", "unfit", text, [r])
    if r.name == "challenge.repeat_identical" and r.value is False:
        text = f"{gpu} gave other bits for the same exact products than before or than its peers"
        return _finding("challenge-not-repeatable", "health", "unfit", text, [r])
    if r.name == "challenge.answer_of_another" and r.value is not None:
        text = f"{gpu} gave the answer of {r.value}, whose seed was another"
        return _finding("challenge-repeated-answer", "identity", "contradicted", text, [r])
    if r.name == "challenge.at_once_over_alone" and isinstance(r.value, float):
        if r.value < SHARED_CARD:
            return None
        text = (
            f"{gpu} took {r.value:.1f} times as long when all {r.detail.get('devices')} of its node"
            " worked at once: they are not that many"
        )
        expected = Expectation(high=SHARED_CARD, source="devices of their own do not slow down")
        return _finding("challenge-shared-card", "identity", "contradicted", text, [r], expected)
    return None


def _of_host(result: NodeResult) -> list[Finding]:
    by_name = {r.name: r for r in result.readings if r.gpu is None}
    found = []
    for what, share, unit in (("cores", CORES_SHORT, ""), ("memory_bytes", MEMORY_SHORT, " bytes")):
        claimed, there = (by_name.get(f"cpu.{what}_{n}") for n in ("claimed", "measured"))
        if claimed is None or there is None or claimed.value is None or there.value is None:
            continue
        paid, got = float(claimed.value), float(there.value)
        if got < share * paid:
            label = what.removesuffix("_bytes")
            found.append(
                _finding(
                    f"{label}-missing", "identity", "contradicted",
                    f"{paid:g}{unit} of {label} are claimed, {got:g} are there", [there, claimed],
                    Expectation(low=share * paid, source="claim"),
                )
            )  # fmt: skip
    there, got_now = (by_name.get(f"cpu.cores_{n}") for n in ("measured", "obtained"))
    if there is not None and got_now is not None and there.value and got_now.value is not None:
        share = float(got_now.value) / float(there.value)
        if share < BUSY:
            found.append(
                _finding(
                    "busy", "health", "note",
                    f"other work took {100 * (1 - share):.0f} % of its cores meanwhile: figures are"
                    " of what was left", [got_now, there],
                )
            )  # fmt: skip
    steal = by_name.get("cpu.steal_fraction")
    if steal is not None and isinstance(steal.value, float) and steal.value > STOLEN:
        found.append(
            _finding(
                "stolen-time", "health", "degraded",
                f"the hypervisor gave {100 * steal.value:.0f} % of the cores' time to others",
                [steal], Expectation(high=STOLEN, source="docs/audit.md"),
            )
        )  # fmt: skip
    return found


def _of_collectives(result: NodeResult) -> list[Finding]:
    found = []
    for r in result.readings:
        if r.name == "collective.class" and r.value in ("collapse", "early-plateau", "socket"):
            over = f" over {r.detail['nodes']} nodes" if "nodes" in r.detail else ""
            text = f"all-reduce{over}: {r.value}, {r.detail['why']}"
            found.append(_finding(f"collective-{r.value}", "health", "degraded", text, [r]))
        if r.name == "collective.errors" and r.value:
            text = f"all-reduce gave wrong sums for {r.value} sizes"
            found.append(_finding("collective-wrong", "health", "unfit", text, [r]))
    return found


def of_peers(results: list[NodeResult]) -> None:
    """Add findings on nodes and devices that are slower than their like in the same audit."""
    _of_pairs(results)
    by_name: dict[tuple[str | None, str], list[tuple[NodeResult, Reading]]] = defaultdict(list)
    for result in results:
        for r in result.readings:
            prefix, _, rest = r.name.partition(".")
            known = prefix in ("measured", "cpu") and rest in PEER_READINGS
            if known and isinstance(r.value, int | float):
                by_name[result.pool, r.name].append((result, r))
    for (_, name), entries in by_name.items():
        if len(entries) < 3:
            continue
        least = GPU_PEERS if name.startswith("measured.") else CPU_PEERS
        for result, r in entries:
            others = [float(x.value or 0) for _, x in entries if x is not r]
            usual = statistics.median(others)
            share = float(r.value or 0) / usual if usual else 1.0
            if share < least:
                expected = Expectation(low=least * usual, source="median of its peers")
                where = result.name if r.gpu is None else f"GPU {r.gpu} of {result.name}"
                text = (
                    f"{where} reaches {100 * share:.0f} % of its peers in {name}:"
                    f" {float(r.value or 0):.3g} against {usual:.3g} {r.unit}"
                )
                result.findings.append(
                    _finding("slower-than-peers", "health", "degraded", text, [r], expected)
                )


def _of_pairs(results: list[NodeResult]) -> None:
    rates = {
        result.name: (result, r)
        for result in results
        for r in result.readings
        if r.name == "collective.pair_gib_s" and isinstance(r.value, float)
    }
    if len(rates) < 3:
        return
    usual = statistics.median(float(r.value or 0) for _, r in rates.values())
    for name, (result, r) in rates.items():
        if float(r.value or 0) < PAIR_SHORT * usual:
            slowest = " and ".join(r.detail["slowest_pair"])
            text = (
                f"{name} exchanges {float(r.value or 0):.3g} GiB/s with the others, who have"
                f" {usual:.3g}; the slowest pair is {slowest}"
            )
            expected = Expectation(low=PAIR_SHORT * usual, source="median of all nodes")
            result.findings.append(
                _finding("slow-links", "health", "degraded", text, [r], expected)
            )
