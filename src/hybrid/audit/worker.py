"""The process that probes run in: python -m hybrid.audit.worker DEVICE (started by process.py).

It reads one JSON command a line and answers each with one JSON line and, where that says so, bytes.
What libraries print goes to stderr. A probe that hangs or crashes takes only this process along.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.audit.level import Level
from hybrid.audit.reading import Reading
from hybrid.audit.wire import reading_to_json

HOST_PROBES = ("claims", "cores", "bandwidth", "host_memory", "disk")
DEVICE_PROBES = ("silicon", "cache", "memory", "matmul", "load")
LINK_PROBES = ("copies", "peers")
"""One device of a node after the other: they share the host's memory, switches and one another."""
Reply = tuple[Any, bytes]


def _host_probe(name: str, level: Level, given: dict[str, Any]) -> list[Reading]:
    from hybrid.audit import claims, cpu

    if name == "claims":
        return claims.gather(timeout_s=level.probe_s / 4)
    if name == "cores":
        return cpu.cores(given.get("cores"), level.work_s, slots=given.get("slots"))
    if name == "bandwidth":
        return cpu.bandwidth(level.work_s)
    if name == "host_memory":
        return cpu.memory(given.get("memory_bytes"), level.host_memory)
    return cpu.disk(Path(given["folder"]), level.disk)


class Worker:
    """One device (or `host`, which needs no torch) and the commands on it."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._device: Any = None

    @property
    def device(self) -> Any:
        """Opened by the first command that needs it."""
        if self._device is None:
            import torch

            from hybrid.audit import host
            from hybrid.audit.device import open_device

            torch.set_num_threads(host.affinity())
            self._device = open_device(self.spec)
        return self._device

    def do(self, command: dict[str, Any]) -> Reply:
        """Carry out one command."""
        name = command["do"]
        handler: Callable[[dict[str, Any]], Reply] = getattr(self, f"do_{name}")
        return handler(command)

    def do_devices(self, command: dict[str, Any]) -> Reply:
        """What there is to audit: every GPU, else the CPU, else (without torch) nothing."""
        try:
            import torch
        except ModuleNotFoundError:
            return [], b""
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"], b""

    def do_open(self, command: dict[str, Any]) -> Reply:
        """Load torch and take hold of the device."""
        return (self.device.attributes() if self.spec != "host" else {}), b""

    def do_probe(self, command: dict[str, Any]) -> Reply:
        """Run one probe."""
        level, name = Level(**command["level"]), command["name"]
        if name in HOST_PROBES:
            readings = _host_probe(name, level, command["given"])
        else:
            from hybrid.audit import links, memory, silicon

            probes: dict[str, Callable[[Any, Level], list[Reading]]] = {
                "silicon": silicon.probe_silicon,
                "cache": silicon.probe_cache,
                "memory": memory.probe_memory,
                "matmul": silicon.probe_matmul,
                "copies": links.probe_copies,
                "peers": links.probe_peers,
                "load": links.probe_load,
            }
            readings = probes[name](self.device, level)
        return [reading_to_json(r) for r in readings], b""

    def do_proof(self, command: dict[str, Any]) -> Reply:
        """Fetch what the cloud signs for this machine."""
        from hybrid.audit import proof

        return proof.fetch(command["nonce"]), b""

    def do_challenge(self, command: dict[str, Any]) -> Reply:
        """Answer a seed with fingerprints."""
        from hybrid.audit import challenges

        shape = challenges.Shape(**command["shape"])
        given = challenges.answer(self.device, command["seed"], shape)
        return {"digest": given.digest}, given.fingerprints

    def do_reveal(self, command: dict[str, Any]) -> Reply:
        """Send one product of a challenge in full."""
        from hybrid.audit import challenges

        shape = challenges.Shape(**command["shape"])
        return {}, challenges.reveal(self.device, command["seed"], shape, command["t"])

    def do_sweep(self, command: dict[str, Any]) -> Reply:
        """Take part in the collectives."""
        from hybrid.audit import collectives, curves

        ring = collectives.Ring(**{**command["ring"], "group": tuple(command["ring"]["group"])})
        if ring.interface:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = ring.interface
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            log = Path(folder) / "nccl.log"
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=str(log))
            found = collectives.sweep(self.device, ring, Level(**command["level"]))
            text = log.read_text(errors="replace") if log.exists() else ""
        return {**found, "transport": curves.transport(text)}, b""


def _end_with_parent(parent: int) -> None:
    """A worker in the middle of a long probe does not see that its stdin ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(spec: str) -> None:
    """Serve commands until stdin ends."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # NCCL and others print; stdout is the protocol's
    worker = Worker(spec)
    for line in sys.stdin.buffer:
        try:
            result, payload = worker.do(json.loads(line))
            head: dict[str, Any] = {"ok": result, "payload": len(payload)}
        except Exception as e:  # noqa: BLE001  whatever a driver raises is the probe's result
            head, payload = {"error": f"{type(e).__name__}: {e}", "payload": 0}, b""
        answers.write(json.dumps(head).encode() + b"\n" + payload)
        answers.flush()
    # Threads of a driver that hangs must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
