"""Probe processes: one that hangs is killed and that is the finding; the next command works."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid.audit.process import ProbeFailed, ProbeProcess
from hybrid.audit.worker import HOST_PROBES


def kill_once_asked(process: subprocess.Popen[bytes]) -> None:
    """Kill a stopped process as soon as a command waits in its pipe."""
    assert process.stdin is not None
    waiting, deadline = bytearray(4), time.monotonic() + 30
    while not any(waiting) and time.monotonic() < deadline:
        fcntl.ioctl(process.stdin, termios.FIONREAD, waiting)
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def process() -> Iterator[ProbeProcess]:
    process = ProbeProcess("lying_devices:Hanging", {"OMP_NUM_THREADS": "1"})
    yield process
    process.close()


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_hanging_probe_is_killed_and_a_finding(process: ProbeProcess) -> None:
    from dataclasses import asdict

    from lying_devices import TINY

    process.call({"do": "open"}, 60)
    assert process._process is not None
    first = process._process.pid
    probe = {"do": "probe", "level": asdict(TINY), "given": {"cores": 1}}
    start = time.monotonic()
    with pytest.raises(ProbeFailed, match="memory did not end within 1 s") as e:
        process.call({**probe, "name": "memory"}, 1)
    assert e.value.outcome == "timed-out"
    assert time.monotonic() - start < 10
    assert not alive(first)
    readings, _ = process.call({**probe, "name": "cores"}, 60)
    assert process._process.pid != first
    assert readings[0]["name"] == "cpu.cores_claimed"


def test_what_a_probe_raises_comes_back_and_the_process_lives() -> None:
    process = ProbeProcess("host")
    try:
        with pytest.raises(ProbeFailed, match="KeyError: 'level'") as e:
            process.call({"do": "probe", "name": "cores"}, 30)
        assert e.value.outcome == "failed"
        assert process._process is not None
        pid = process._process.pid
        with pytest.raises(ProbeFailed, match="AttributeError"):
            process.call({"do": "nonsense"}, 30)
        assert process._process.pid == pid
        os.kill(pid, signal.SIGSTOP)  # so that it is killed under a command, not between two
        threading.Thread(target=kill_once_asked, args=(process._process,)).start()
        with pytest.raises(ProbeFailed, match="ended") as e:
            process.call({"do": "open"}, 30)
        assert e.value.outcome == "died"
        assert process.call({"do": "open"}, 30) == ({}, b"")
    finally:
        process.close()


def test_a_node_without_torch_is_audited_by_what_needs_none(tmp_path: Path) -> None:
    from lying_devices import OTHERS, TINY

    from hybrid.audit.conduct import Conductor
    from hybrid.audit.run import LocalMember, Plan

    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('torch')")
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    plan = Plan(level=TINY, cores=1, memory_bytes=1 << 20, environment={"PYTHONPATH": path})
    (node,) = Conductor([LocalMember(plan, "agent")], TINY).run()
    assert node.devices == [] and {f.kind for f in node.findings} <= OTHERS
    values = {r.name: r.value for r in node.readings}
    assert values["cpu.cores_claimed"] == 1
    assert values["cpu.memory_errors"] == 0
    assert {values[f"probe.{p}.outcome"] for p in HOST_PROBES} == {"done"}
    assert "probe.open.outcome" not in values
