"""What connects a device: pinned copies with the link sampled during them, peers, and its load.

An idle link rests at generation 1, so nothing is judged from one: it is sampled while data moves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hybrid.audit.device import Device, Link, Load, NotOnThisDevice
from hybrid.audit.level import Level
from hybrid.audit.memory import write_pattern, wrong_words
from hybrid.audit.naming import reading
from hybrid.audit.reading import Reading
from hybrid.audit.timing import GIB, MIB, Times, measure

_SAMPLE_S = 0.02


class Sampler:
    """Calls a function again and again on a thread of its own, for the length of a `with`."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Any] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            if (sample := self._ask()) is not None:
                self.samples.append(sample)
            self._stop.wait(_SAMPLE_S)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def _size(device: Device) -> int:
    return (256 if device.place.type == "cuda" else 16) * MIB


def probe_copies(device: Device, level: Level) -> list[Reading]:
    """Pinned copies to the device and back; generation and width of the link while they run."""
    size = _size(device)
    here, there = device.pinned(size), device.allocate(size).view(torch.uint8)
    times: dict[str, Times] = {}
    with Sampler(device.link) as sampler:
        for name, to, source in (("h2d", there, here), ("d2h", here, there)):
            times[name] = measure(
                partial(device.copy, to, source), device.synchronize, budget_s=level.work_s
            )
    links: list[Link] = sampler.samples
    found = [
        reading(device, f"{name}_gib_s", size / GIB / t.best, "GiB/s", detail={"bytes": size})
        for name, t in times.items()
    ]
    if device.kind == "cuda":
        for name, values in (
            ("pcie_gen_loaded", [k.generation for k in links]),
            ("pcie_width_loaded", [k.width for k in links]),
        ):
            known = [v for v in values if v is not None]
            found.append(
                reading(
                    device, name, max(known, default=None), "count",
                    source=links[0].source if links else "sysfs", fakeable=True,
                    detail={"samples": len(known)},
                )
            )  # fmt: skip
    return found


def probe_peers(device: Device, level: Level) -> list[Reading]:
    """Copies to every other GPU of the node: speed, and whether what arrives is what was sent.

    A patched driver may allow peer access that delivers wrong data without an error.
    """
    size = _size(device)
    sent = device.allocate(size)
    write_pattern(sent, 0, 7)
    found = []
    for peer in device.peers()[: level.peers]:
        arrived = torch.empty_like(sent, device=peer)
        back = torch.empty_like(sent)

        def both(arrived: torch.Tensor = arrived) -> None:
            device.copy(arrived, sent)
            if arrived.is_cuda:
                torch.cuda.synchronize(arrived.device)

        times = measure(both, device.synchronize, budget_s=level.work_s)
        device.copy(back, arrived)
        device.synchronize()
        wrong = wrong_words(back, torch.empty_like(back), 0, 7)
        detail = {"peer": peer.index, "direct": device.reachable_directly(peer)}
        found += [
            reading(device, "p2p_gib_s", size / GIB / times.best, "GiB/s", detail=detail),
            reading(device, "p2p_errors", wrong, "count", detail=detail),
        ]
    return found


def probe_load(device: Device, level: Level) -> list[Reading]:
    """Power, clock and reasons to throttle, while the device multiplies matrices."""
    kind = "bf16" if device.place.type == "cuda" else "fp32"
    rows = min(8192, device.largest)
    a, b = device.operands(kind, rows)
    with Sampler(device.load) as sampler:
        end = time.perf_counter() + 4 * level.work_s
        while time.perf_counter() < end:
            try:
                device.matmul(a, b, kind)
            except NotOnThisDevice:
                break
            device.synchronize()
    # The first samples are of a device that was idle a moment ago.
    loads: list[Load] = sampler.samples[len(sampler.samples) // 2 :]
    source = loads[0].source if loads else "nvml"
    power = [x.power_w for x in loads if x.power_w is not None]
    clock = [x.clock_mhz for x in loads if x.clock_mhz is not None]
    heat = [x.temperature_c for x in loads if x.temperature_c is not None]
    reasons = [x.throttled_by for x in loads if x.throttled_by is not None]
    throttled = ", ".join(sorted({r for some in reasons for r in some})) if reasons else None
    return [
        reading(
            device, name, value, unit, source=source, fakeable=True, detail={"samples": len(loads)}
        )
        for name, value, unit in (
            ("power_w_loaded", max(power, default=None), "W"),
            ("clock_mhz_loaded", max(clock, default=None), "MHz"),
            ("temperature_c_loaded", max(heat, default=None), "°C"),
            ("throttle_reasons", throttled, ""),
        )
    ]  # fmt: skip
