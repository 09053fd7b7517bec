"""The driver of an audit: all nodes and all devices at once, and nobody waits for one that hangs.

Knows no Ray: a member is anything with `call(method, …) → Future` (`run.LocalMember`, and the Ray
actor of `cluster.RayMember`). Phases: describe, probes of the host and of each device, challenges,
collectives.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybrid.audit.level import Level
from hybrid.audit.process import ProbeFailed
from hybrid.audit.proof import NO_TRUST, Trust
from hybrid.audit.reading import Finding, Reading
from hybrid.audit.wire import reading_from_json
from hybrid.audit.worker import DEVICE_PROBES, HOST_PROBES, LINK_PROBES

GRACE_S = 10.0
START_S = 90.0
OnProgress = Callable[[dict[str, Any]], None]


class Member(Protocol):
    """A node that takes part."""

    name: str
    node_id: str | None
    address: str
    pool: str | None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a method of the node's `Machine`; the future raises what the method does, or
        anything else when the node is lost."""

    def close(self) -> None:
        """Let the node go."""


@dataclass
class NodeResult:
    """What became of one node.

    Attributes:
        name: of the node, unique in the audit.
        node_id: Ray's; None without Ray.
        fabric_gib_s: what the node's InfiniBand or RoCE ports carry, by their own word.
        lost: why the node stopped answering; None while it does.
        findings: those of the driver (hangs, challenges, collectives, peers).
    """

    name: str
    node_id: str | None = None
    pool: str | None = None
    boot_id: str = ""
    fabric_gib_s: float | None = None
    devices: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    lost: str | None = None


class Lost(Exception):
    """The node does not answer."""


class Conductor:
    """One audit of some members."""

    def __init__(
        self,
        members: Sequence[Member],
        level: Level,
        *,
        trust: Trust = NO_TRUST,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.members = list(members)
        self.level = level
        self.trust = trust
        self._say = on_progress or (lambda record: None)
        self._speak = threading.Lock()
        self.results = [
            NodeResult(name=m.name, node_id=m.node_id, pool=m.pool) for m in self.members
        ]
        self._turns: dict[str, threading.Lock] = {}

    def run(self) -> list[NodeResult]:
        """Everything, in order of members. Raises nothing for what a node does or fails to do."""
        from hybrid.audit import judgement, network, rally

        try:
            self.everywhere(self.describe)
            # Nodes that share a machine take turns, or each would measure the other.
            hosts = Counter(r.boot_id for r in self.results)
            self._turns = {boot: threading.Lock() for boot, n in hosts.items() if n > 1}
            self.everywhere(self._probe_all)
            rally.challenge_all(self)
            network.collect_all(self)
            for result in self.results:
                result.findings += judgement.of_node(result)
            judgement.of_peers(self.results)
        finally:
            for member in self.members:
                with contextlib.suppress(Exception):
                    member.close()
        return self.results

    def everywhere(self, work: Callable[[int], None]) -> None:
        """`work(i)` for every member that still answers, all at once, to the end of all."""
        alive = [i for i, r in enumerate(self.results) if r.lost is None]
        if alive:
            with ThreadPoolExecutor(max_workers=len(alive)) as threads:
                list(threads.map(work, alive))

    def ask(self, i: int, timeout_s: float, method: str, *arguments: Any) -> Any:
        """A method's result.

        Raises:
            ProbeFailed: the node says that it had none.
            Lost: the node did not answer in time, or is gone; it is asked nothing more.
        """
        result = self.results[i]
        if result.lost is not None:
            raise Lost(result.lost)
        try:
            return self.members[i].call(method, *arguments).result(timeout_s + GRACE_S)
        except FutureTimeout:
            result.lost = f"no answer to {method} within {timeout_s + GRACE_S:.0f} s"
        except Exception as e:  # noqa: BLE001  an actor's death has many classes
            if isinstance(cause := getattr(e, "cause", e), ProbeFailed):
                raise cause from None
            result.lost = f"{method}: {str(e).strip().splitlines()[0] if str(e) else repr(e)}"
        raise Lost(result.lost)

    def note(self, i: int, device: str, step: str, outcome: str, text: str | None = None) -> None:
        """Record how a step went, and say so."""
        self.results[i].readings.append(
            Reading(
                name=f"probe.{step}.outcome", value=outcome, source="driver", fakeable=False,
                gpu=gpu_of(self.results[i], device),
                detail={"device": device, **({"error": text} if text else {})},
            )
        )  # fmt: skip
        self.progress(i, device, step, outcome)

    def progress(self, i: int, device: str, step: str, outcome: str) -> None:
        """Tell whoever watches."""
        with self._speak:
            self._say(
                {"node": self.results[i].name, "device": device, "probe": step, "outcome": outcome}
            )

    def attempt(
        self, i: int, device: str, step: str, timeout_s: float, method: str, *arguments: Any
    ) -> Any:
        """`ask`, with its outcome noted; None when there is no result. A node is lost once."""
        if self.results[i].lost is not None:
            return None
        try:
            answer = self.ask(i, timeout_s, method, *arguments)
        except ProbeFailed as e:
            self.note(i, device, step, e.outcome, str(e))
        except Lost as e:
            self.note(i, device, step, "lost", str(e))
        else:
            self.note(i, device, step, "done")
            return answer
        return None

    def describe(self, i: int) -> None:
        """Ask a member what it has: its boot and its devices."""
        told = self.attempt(i, "host", "describe", START_S, "describe")
        if told is None:
            self.results[i].lost = self.results[i].lost or "it could not say what it has"
            return
        result = self.results[i]
        result.boot_id, result.devices = told["boot_id"], told["devices"]
        result.fabric_gib_s = told["fabric_gib_s"]

    def _probe_all(self, i: int) -> None:
        """The host, then all devices at once, then the links of one device after the other."""
        result = self.results[i]
        self._proof(i)
        for name in HOST_PROBES:
            self._probe(i, "host", name)
        if result.devices:
            with ThreadPoolExecutor(max_workers=len(result.devices)) as threads:
                opened = list(threads.map(lambda d: self._probe_device(i, d), result.devices))
            for device, is_open in zip(result.devices, opened, strict=True):
                for name in LINK_PROBES if is_open else ():
                    self._probe(i, device, name)

    def _proof(self, i: int) -> None:
        """The cloud's signed word on the machine, checked here."""
        from hybrid.audit import proof

        nonce = f"{secrets.randbelow(10**10):010d}"
        signed = self.attempt(i, "host", "proof", self.level.probe_s, "proof", nonce)
        if signed is not None:
            self.results[i].readings += proof.verify(signed, self.trust, nonce)

    def _probe_device(self, i: int, device: str) -> bool:
        """Probe a device in itself. Returns whether it could be opened."""
        if self.attempt(i, device, "open", START_S, "open", device) is None:
            return False
        for name in DEVICE_PROBES:
            self._probe(i, device, name)
        return True

    def _probe(self, i: int, device: str, name: str) -> None:
        turn = self._turns.get(self.results[i].boot_id)
        started = time.monotonic()
        with turn or contextlib.nullcontext():
            found = self.attempt(i, device, name, self.level.probe_s, "probe", device, name)
        if found is not None:
            # Which GPU it is, the driver knows better than the device.
            gpu = gpu_of(self.results[i], device)
            readings = [reading_from_json(r) for r in found]
            self.results[i].readings += [
                r if r.gpu is None else replace(r, gpu=gpu) for r in readings
            ]
            self.results[i].readings.append(
                Reading(
                    name=f"probe.{name}.seconds", value=round(time.monotonic() - started, 3),
                    unit="s", source="driver", fakeable=False, gpu=gpu_of(self.results[i], device),
                )
            )  # fmt: skip


def gpu_of(result: NodeResult, device: str) -> int | None:
    """The index of a device on its node; None for the host and its CPU."""
    return None if device in ("host", "cpu") else result.devices.index(device)
