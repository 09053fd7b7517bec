"""Challenges over the whole audit: all devices in one window, timed and checked by the driver."""

from __future__ import annotations

import importlib.util
import secrets
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid.audit import host
from hybrid.audit.conduct import GRACE_S, gpu_of
from hybrid.audit.reading import Reading

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


def ready_devices(conductor: Conductor) -> list[tuple[int, str]]:
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


def has_torch(conductor: Conductor, ready: list[tuple[int, str]], step: str) -> bool:
    """Whether the driver can check answers; where it cannot, that is noted of every device."""
    if importlib.util.find_spec("torch") is not None:
        return True
    for i, device in ready:
        text = "the driver has no torch to check answers with (pip install 'hybrid[train]')"
        conductor.note(i, device, step, "failed", text)
    return False


def challenge_all(conductor: Conductor) -> None:
    """Seeds to all devices at the same moment; answers timed by this clock and checked here."""
    from hybrid.audit import challenges

    ready = ready_devices(conductor)
    if not ready or not has_torch(conductor, ready, "challenge"):
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
        entry.error, entry.seconds = last_words(error), None


def last_words(error: BaseException) -> str:
    """The last line of what a node raised, out of Ray's wrapping."""
    text = str(getattr(error, "cause", None) or error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _check(conductor: Conductor, entries: list[Entry]) -> None:
    """Have one product of each answer sent, chosen only now, and check it."""
    from hybrid.audit import challenges

    def check(entry: Entry) -> None:
        if entry.fingerprints is None:
            return
        t = secrets.randbelow(entry.shape.products)
        revealed = conductor.attempt(
            entry.i, entry.device, "reveal", conductor.level.probe_s, "reveal", entry.device,
            entry.seed, vars(entry.shape), t,
        )  # fmt: skip
        if revealed is None:
            entry.error = "it could not show a product that it had committed to"
            return
        given = challenges.Answer(entry.fingerprints)
        entry.error = challenges.check(entry.seed, entry.shape, given, t, revealed)

    with ThreadPoolExecutor(max_workers=host.affinity()) as threads:
        list(threads.map(check, entries))


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
