"""What all devices do together: challenges in one window, and collectives."""

from __future__ import annotations

import secrets
import statistics
import time
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid.audit.conduct import GRACE_S, gpu_of
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.timing import GIB

if TYPE_CHECKING:
    from hybrid.audit.challenges import Shape
    from hybrid.audit.conduct import Conductor


@dataclass
class Entry:
    """One device's part in a window: its seed, its answer and when it came."""

    i: int
    device: str
    shape: Shape
    seed: int
    fingerprints: bytes | None = None
    seconds: float | None = None
    error: str | None = None
    lost: bool = False


def _ready(conductor: Conductor) -> list[tuple[int, str]]:
    """(member, device) of all that opened and still answer."""
    found = []
    for i, result in enumerate(conductor.results):
        broken = {
            r.detail["device"]
            for r in result.readings
            if r.name == "probe.open.outcome" and r.value != "done"
        }
        if result.lost is None:
            found += [(i, d) for d in result.devices if d not in broken]
    return found


def challenge_all(conductor: Conductor) -> None:
    """Seeds to all devices at the same moment; answers timed by this clock and checked here."""
    from hybrid.audit import challenges

    ready = _ready(conductor)
    if not ready:
        return
    level = conductor.level

    def kind(i: int, device: str) -> str:
        return "cuda" if device.startswith("cuda:") else "cpu"

    def entries(seeds: list[int] | int, which: list[tuple[int, str]]) -> list[Entry]:
        made = []
        for n, (i, device) in enumerate(which):
            products = level.products if kind(i, device) == "cuda" else level.cpu_products
            seed = seeds if isinstance(seeds, int) else seeds[n]
            made.append(Entry(i, device, challenges.shape_for(kind(i, device), products), seed))
        return made

    # Libraries are loaded and clocks raised before anything is timed.
    _window(conductor, entries(challenges.new_seed(), ready))
    several = {i for i, _ in ready if sum(j == i for j, _ in ready) > 1}
    first = [(i, next(d for j, d in ready if j == i)) for i in sorted(several)]
    alone = entries([challenges.new_seed() for _ in first], first)
    _window(conductor, alone)
    together = entries([challenges.new_seed() for _ in ready], ready)
    _window(conductor, together)
    common = challenges.new_seed()
    repeats = []
    for _ in range(level.repeats):
        repeats.append(entries(common, ready))
        _window(conductor, repeats[-1])
    _check(conductor, together)
    by_node = {e.i: e for e in alone}
    for n, entry in enumerate(together):
        _record(conductor, entry, by_node.get(entry.i), together, [r[n] for r in repeats], repeats)


def _window(conductor: Conductor, entries: list[Entry]) -> None:
    """Send every seed, then wait for every answer: each is timed from the sending of its own."""
    futures = []
    for entry in entries:
        start = time.perf_counter()
        future = conductor.members[entry.i].call(
            "challenge", entry.device, entry.seed, vars(entry.shape)
        )

        def arrived(_: Any, entry: Entry = entry, start: float = start) -> None:
            entry.seconds = time.perf_counter() - start

        future.add_done_callback(arrived)
        futures.append(future)
    wait(futures, timeout=conductor.level.probe_s + GRACE_S)
    for entry, future in zip(entries, futures, strict=True):
        if not future.done():
            entry.error, entry.lost, entry.seconds = "no answer in the window", True, None
            conductor.results[entry.i].lost = "no answer to a challenge"
            continue
        error = future.exception()
        if error is None:
            entry.fingerprints = future.result()
            continue
        entry.error, entry.seconds = _why(error), None


def _why(error: BaseException) -> str:
    """The last line of what a node raised, out of Ray's wrapping."""
    text = str(getattr(error, "cause", None) or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _check(conductor: Conductor, entries: list[Entry]) -> None:
    """Have one product of each answer sent, chosen only now, and check it."""
    from hybrid.audit import challenges

    for entry in entries:
        if entry.fingerprints is None:
            continue
        t = secrets.randbelow(entry.shape.products)
        revealed = conductor.attempt(
            entry.i, entry.device, "reveal", conductor.level.probe_s, "reveal", entry.device,
            entry.seed, vars(entry.shape), t,
        )  # fmt: skip
        if revealed is None:
            entry.error = "it could not show a product that it had committed to"
            continue
        given = challenges.Answer(entry.fingerprints)
        entry.error = challenges.check(entry.seed, entry.shape, given, t, revealed)


def _record(
    conductor: Conductor,
    entry: Entry,
    alone: Entry | None,
    together: list[Entry],
    mine: list[Entry],
    repeats: list[list[Entry]],
) -> None:
    """The readings of one device's challenges."""
    result = conductor.results[entry.i]
    gpu = gpu_of(result, entry.device)
    common = _usual(entry, together, repeats)
    answered = [e.fingerprints for e in mine if e.fingerprints is not None]
    same = [
        f"{conductor.results[e.i].name} {e.device}"
        for e in together
        if e is not entry and e.fingerprints is not None and e.fingerprints == entry.fingerprints
    ]
    work = entry.shape.work / 1e12
    slower = (
        entry.seconds / alone.seconds
        if entry.seconds and alone is not None and alone.seconds
        else None
    )
    values: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
        ("challenge.correct", entry.error is None, "", {"error": entry.error}),
        ("challenge.seconds", entry.seconds, "s", {"products": entry.shape.products}),
        ("challenge.tflops", work / entry.seconds if entry.seconds else None, "TFLOP/s", {}),
        ("challenge.at_once_over_alone", slower, "ratio", {"devices": len(result.devices)}),
        ("challenge.repeat_identical",
         all(a == common for a in answered) if answered else None, "",
         {"answers": len(answered), "differing": sum(a != common for a in answered)}),
        ("challenge.answer_of_another", ", ".join(same) or None, "", {}),
    )  # fmt: skip
    for name, value, unit, detail in values:
        result.readings.append(
            Reading(
                name=name, value=value, unit=unit, source="driver", fakeable=False, gpu=gpu,
                detail=detail,
            )
        )  # fmt: skip
    conductor.progress(
        entry.i, entry.device, "challenge", "done" if entry.error is None else "failed"
    )


def _usual(entry: Entry, together: list[Entry], repeats: list[list[Entry]]) -> bytes | None:
    """The right answer to the common seed: exact numbers are the same on every device of a shape.

    Devices whose checked product was right are asked first, then the majority.
    """
    answers: list[bytes] = []
    for only_correct in (True, False):
        answers = answers or [
            e.fingerprints
            for window in repeats
            for checked, e in zip(together, window, strict=True)
            if e.fingerprints is not None
            and e.shape == entry.shape
            and not (only_correct and checked.error)
        ]
    return max(set(answers), key=answers.count, default=None)


def collect_all(conductor: Conductor) -> None:
    """All-reduce over every device that still answers, and exchanges between every two nodes."""
    ready = _ready(conductor)
    # One process group has one backend: NCCL where there are GPUs, else gloo.
    if any(d.startswith("cuda:") for _, d in ready):
        ready = [(i, d) for i, d in ready if d.startswith("cuda:")]
    if len(ready) < 2 or not conductor.level.reduce_bytes:
        return
    from hybrid.audit import collectives

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
            conductor.note(i, device, "collectives", "failed", _why(error))
        else:
            conductor.note(i, device, "collectives", "done")
            answers[rank] = future.result()
    if not answers:
        return
    curve = next(iter(answers.values()))["curve"]
    bus = [
        (size, collectives.bus_bandwidth(int(size), seconds, len(ready))) for size, seconds in curve
    ]
    alg = tuple((size, size / GIB / seconds) for size, seconds in curve)
    nominal = _nominal(conductor, nodes)
    kind, why = collectives.classify(bus, nominal)
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
