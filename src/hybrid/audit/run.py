"""One machine under audit: its devices, a probe process for each, and the audit of it alone.

`Machine` is what works on a node; `conduct.py` tells it what to do, over Ray (`cluster.py`) or,
here for one machine, over threads.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from hybrid.audit import host
from hybrid.audit.conduct import Conductor, NodeResult
from hybrid.audit.level import Level
from hybrid.audit.process import ProbeFailed, ProbeProcess
from hybrid.audit.proof import NO_TRUST, Trust

_START_S = 60.0  # torch may be read from a cold disk


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a node is told once.

    Attributes:
        level: the budgets.
        folder: for the disk probe; None: the node's folder for temporary files.
        devices: specs of `device.open_device`; None: what the node finds.
        cores, memory_bytes: what is paid for; None: what the node says of itself.
        slots: see `cpu.cores`.
        environment: added to the probe processes'.
    """

    level: Level
    folder: str | None = None
    devices: tuple[str, ...] | None = None
    cores: float | None = None
    memory_bytes: int | None = None
    slots: float | None = None
    environment: dict[str, str] | None = None


class Caller(Protocol):
    """What runs commands: a probe process."""

    def call(self, command: dict[str, Any], timeout_s: float) -> tuple[Any, bytes]:
        """The command's result and bytes. Raises ProbeFailed."""

    def close(self) -> None:
        """End it, whatever it is doing."""


Start = Callable[[str, dict[str, str] | None], Caller]


class Machine:
    """A node's side of the audit. Every method returns plain data and raises only ProbeFailed."""

    def __init__(self, plan: Plan, start: Start = ProbeProcess) -> None:
        self.plan = plan
        self._start = start
        self._level = asdict(plan.level)
        self._processes = {"host": start("host", plan.environment)}

    def describe(self) -> dict[str, Any]:
        """The host's name and boot, and the devices to audit."""
        here = host.host()
        devices: Sequence[str]
        if self.plan.devices is not None:
            devices = self.plan.devices
        else:
            devices, _ = self._processes["host"].call({"do": "devices"}, _START_S)
        for n, spec in enumerate(devices):
            self._processes[_key(n, spec)] = self._start(spec, self.plan.environment)
        return {
            **asdict(here),
            "fabric_gib_s": host.fabric_gib_s(),
            "devices": [_key(n, spec) for n, spec in enumerate(devices)],
        }

    def open(self, device: str) -> dict[str, Any]:
        """Load what a device needs, so that no probe pays for it. Returns its attributes."""
        attributes: dict[str, Any] = self._call(device, {"do": "open"}, _START_S)[0]
        return attributes

    def proof(self, nonce: str) -> dict[str, str]:
        """What the cloud signs for this machine, see `proof.fetch`."""
        command = {"do": "proof", "nonce": nonce}
        signed: dict[str, str] = self._call("host", command, self.plan.level.probe_s)[0]
        return signed

    def probe(self, device: str, name: str) -> list[dict[str, Any]]:
        """Readings of one probe."""
        plan = self.plan
        given = {
            "cores": plan.cores,
            "slots": plan.slots,
            "memory_bytes": plan.memory_bytes,
            "folder": plan.folder or tempfile.gettempdir(),
        }
        command = {"do": "probe", "name": name, "level": self._level, "given": given}
        readings: list[dict[str, Any]] = self._call(device, command, plan.level.probe_s)[0]
        return readings

    def challenge(self, device: str, seed: int, shape: dict[str, int]) -> bytes:
        """The fingerprints of a challenge."""
        command = {"do": "challenge", "seed": seed, "shape": shape}
        return self._call(device, command, self.plan.level.probe_s)[1]

    def reveal(self, device: str, seed: int, shape: dict[str, int], t: int) -> bytes:
        """One product of a challenge in full."""
        command = {"do": "reveal", "seed": seed, "shape": shape, "t": t}
        return self._call(device, command, self.plan.level.probe_s)[1]

    def meeting_point(self, address: str) -> str:
        """Where the ranks of a process group meet: a free port of this node."""
        try:
            with socket.socket() as probe:
                probe.bind((address, 0))
                return f"tcp://{address}:{probe.getsockname()[1]}"
        except OSError as e:
            raise ProbeFailed("failed", f"no port to meet at on {address}: {e}") from None

    def sweep(self, device: str, ring: dict[str, Any], address: str) -> dict[str, Any]:
        """This rank's part of the collectives."""
        ring = {**ring, "interface": interface_of(address)}
        command = {"do": "sweep", "ring": ring, "level": self._level}
        result: dict[str, Any] = self._call(device, command, ring["timeout_s"] + 10)[0]
        return result

    def close(self) -> None:
        """End every probe process."""
        for process in self._processes.values():
            process.close()

    def _call(self, device: str, command: dict[str, Any], timeout_s: float) -> tuple[Any, bytes]:
        return self._processes[device].call(command, timeout_s)


def _key(n: int, spec: str) -> str:
    """A name for a device that is one of its own even when a test lists a class eight times."""
    return spec if spec == "cpu" or spec.startswith("cuda:") else f"{spec}#{n}"


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where none has it."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class LocalMember:
    """This machine as a member of an audit: calls run on threads."""

    def __init__(self, plan: Plan, name: str | None = None, start: Start = ProbeProcess) -> None:
        self.machine = Machine(plan, start)
        self.name = name or host.host().name
        self.node_id: str | None = None
        self.address = "127.0.0.1"
        self.pool: str | None = None
        self._threads = ThreadPoolExecutor(max_workers=64)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a method of the machine."""
        return self._threads.submit(getattr(self.machine, method), *arguments)

    def close(self) -> None:
        """End the machine's processes, which also ends what waits for them."""
        self.machine.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def audit_here(
    level: Level,
    *,
    devices: tuple[str, ...] | None = None,
    cores: float | None = None,
    memory_bytes: int | None = None,
    trust: Trust = NO_TRUST,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> list[NodeResult]:
    """Audit this machine alone, without Ray.

    Args:
        level: the budgets.
        devices: specs; None: every GPU, else the CPU.
        cores, memory_bytes: what is paid for; None: what the machine says of itself.
        trust: with what the seller's own proof is checked.
        on_progress: called with {"node", "device", "probe", "outcome"} after each step.
    """
    plan = Plan(level=level, devices=devices, cores=cores, memory_bytes=memory_bytes)
    member = LocalMember(plan)
    return Conductor([member], level, trust=trust, on_progress=on_progress).run()


__all__ = ["LocalMember", "Machine", "Plan", "ProbeFailed", "audit_here", "interface_of"]
