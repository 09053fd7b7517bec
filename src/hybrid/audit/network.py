"""Collectives over the whole audit: a process group of all devices, its curve, its slowest pair."""

from __future__ import annotations

import statistics
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from hybrid.audit.conduct import GRACE_S
from hybrid.audit.curves import bus_bandwidth, classify
from hybrid.audit.rally import has_torch, last_words, ready_devices
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.timing import GIB

if TYPE_CHECKING:
    from hybrid.audit.conduct import Conductor


def collect_all(conductor: Conductor) -> None:
    """All-reduce over every device that still answers, and exchanges between every two nodes."""
    ready = ready_devices(conductor)
    # One process group has one backend: NCCL where there are GPUs, else gloo.
    if any(d.startswith("cuda:") for _, d in ready):
        ready = [(i, d) for i, d in ready if d.startswith("cuda:")]
    if len(ready) < 2 or not conductor.level.reduce_bytes:
        return
    if not has_torch(conductor, ready, "collectives"):
        return
    leader = ready[0][0]
    address = conductor.members[leader].address
    store = conductor.attempt(leader, "host", "meeting", GRACE_S, "meeting_point", address)
    if store is None:
        return
    nodes = list(dict.fromkeys(i for i, _ in ready))
    group = tuple(nodes.index(i) for i, _ in ready)
    timeout_s = conductor.level.probe_s
    futures = []
    for rank, (i, device) in enumerate(ready):
        ring = {
            "rank": rank, "world": len(ready), "store": store, "interface": None,
            "timeout_s": timeout_s, "group": group,
        }  # fmt: skip
        member = conductor.members[i]
        futures.append(member.call("sweep", device, ring, member.address))
    wait(futures, timeout=timeout_s + 2 * GRACE_S)
    answers: dict[int, dict[str, Any]] = {}
    for rank, ((i, device), future) in enumerate(zip(ready, futures, strict=True)):
        if not future.done():
            conductor.results[i].lost = "no end of the collectives"
            conductor.note(i, device, "collectives", "lost", "no answer")
        elif (error := future.exception()) is not None:
            outcome = getattr(getattr(error, "cause", error), "outcome", "failed")
            conductor.note(i, device, "collectives", outcome, last_words(error))
        else:
            conductor.note(i, device, "collectives", "done")
            answers[rank] = future.result()
    if not answers:
        return
    curve = next(iter(answers.values()))["curve"]
    bus = [(size, bus_bandwidth(int(size), seconds, len(ready))) for size, seconds in curve]
    alg = tuple((size, size / GIB / seconds) for size, seconds in curve)
    nominal = _nominal(conductor, nodes)
    kind, why = classify(bus, nominal)
    used = {a["transport"] for a in answers.values() if a["transport"]}
    if nominal is not None and len(nodes) > 1 and used == {"Socket"}:
        kind, why = "socket", "NCCL's own log: it uses sockets, though the nodes have a fabric"
    pairs = {(int(a), int(b)): rate for r in answers.values() for a, b, rate in r["pairs"]}
    for n, i in enumerate(nodes):
        theirs = [rate for pair, rate in pairs.items() if n in pair]
        wrong = sorted({s for rank, a in answers.items() if group[rank] == n for s in a["wrong"]})
        detail = {
            "ranks": len(ready), "nodes": len(nodes), "nominal_gib_s": nominal,
            "backend": next(iter(answers.values()))["backend"], "transport": sorted(used),
        }  # fmt: skip
        add = conductor.results[i].readings.append
        for name, value, unit, points, more in (
            ("collective.algbw_gib_s", max(y for _, y in alg), "GiB/s", alg, {}),
            ("collective.busbw_gib_s", max(y for _, y in bus), "GiB/s", tuple(bus), {}),
            ("collective.class", kind, "", (), {"why": why}),
            ("collective.errors", len(wrong), "count", (), {"sizes": wrong}),
            ("collective.pair_gib_s", statistics.median(theirs) if theirs else None, "GiB/s", (),
             _named(conductor, nodes, pairs)),
        ):  # fmt: skip
            add(
                Reading(
                    name=name, value=value, unit=unit, source="torch.distributed", fakeable=False,
                    curve=points, detail={**detail, **more},
                )
            )  # fmt: skip


def _nominal(conductor: Conductor, nodes: list[int]) -> float | None:
    """What the slowest link that all-reduce must cross carries, in GiB/s; None: not known.

    Between nodes that is the fabric, within one the NVLink of its product (one direction).
    """
    results = [conductor.results[i] for i in nodes]
    if len(results) > 1:
        fabrics = [r.fabric_gib_s for r in results]
        return min((f for f in fabrics if f is not None), default=None) if all(fabrics) else None
    names = [str(r.value) for r in results[0].readings if r.name == "claimed.name" and r.value]
    products = [sku for name in names for sku in load_specs().by_name(name)]
    links = [sku.nvlink_total_gbs for sku in products if sku.nvlink_total_gbs is not None]
    return min(links) * 1e9 / 2 / GIB if links else None


def _named(
    conductor: Conductor, nodes: list[int], pairs: dict[tuple[int, int], float]
) -> dict[str, Any]:
    """The slowest pair by name, and every pair's GiB/s."""
    if not pairs:
        return {}
    names = [conductor.results[i].name for i in nodes]
    slowest = min(pairs, key=pairs.__getitem__)
    return {
        "slowest_pair": [names[n] for n in slowest],
        "slowest_gib_s": pairs[slowest],
        "pairs": [[names[a], names[b], rate] for (a, b), rate in sorted(pairs.items())],
    }
