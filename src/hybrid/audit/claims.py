"""A node's claims from all sources that do not depend on one another, with GPUs aligned.

nvidia-smi, NVML behind its back, the kernel's lists and the PCI bus are asked separately, so that a
lie has to be told everywhere at once; verdict.py compares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hybrid.audit.kernel import filesystem_type, read_kernel
from hybrid.audit.nvml import LIBRARY
from hybrid.audit.reading import Reading
from hybrid.audit.smi import parse_smi
from hybrid.audit.smi_tables import read_kernel_log, read_topology
from hybrid.audit.wire import reading_from_json
from hybrid.errors import DataError

TIMEOUT_S = 20.0


def gather(
    root: Path = Path("/"),
    *,
    environ: Mapping[str, str] | None = None,
    library: str = LIBRARY,
    filesystem: Callable[[Path], int] = filesystem_type,
    timeout_s: float = TIMEOUT_S,
) -> list[Reading]:
    """Every claim that this node makes; a source that is absent says nothing.

    Args:
        root: where /proc, /sys, /etc and /var/log lie.
        environ: its PATH finds nvidia-smi; None: this process's.
        library: NVML.
        filesystem: see `kernel.read_kernel`.
        timeout_s: for each program that is run; who hangs longer is ended, and that is a reading.
    """
    environment = dict(os.environ if environ is None else environ)
    smi = _smi(environment, timeout_s)
    found = [
        *smi,
        *_nvml(environment, library, timeout_s),
        *read_kernel(root, environ=environment, filesystem=filesystem),
    ]
    if sum(r.name == "claimed.uuid" for r in smi) > 1:
        found += read_topology(_run(["nvidia-smi", "topo", "-m"], environment, timeout_s)[0])
    if root == Path("/"):
        found += read_kernel_log(_run(["dmesg"], environment, timeout_s)[0])
    return align(found)


def _run(
    command: list[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[str, str | None]:
    """(stdout with stderr, why there is no answer) of a program; ("", None) where it is absent."""
    try:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return "", None
    except OSError as e:
        return "", f"{command[0]}: {e.strerror}"
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a wrapper's children too
        process.communicate()
        return "", f"{command[0]} did not answer within {timeout_s:g} s"
    text = (output + errors).decode("utf-8", "replace")
    if process.returncode != 0:
        last = text.strip().splitlines()[-1] if text.strip() else "no output"
        return text, f"{command[0]} ended with {process.returncode}: {last[:200]}"
    return text, None


def _failed(source: str, why: str) -> Reading:
    return Reading(name="claimed.tool_failed", value=why, source=source, fakeable=True)


def _smi(environment: Mapping[str, str], timeout_s: float) -> list[Reading]:
    text, why = _run(["nvidia-smi", "-q", "-x"], environment, timeout_s)
    found: list[Reading] = []
    if text:
        try:
            found = parse_smi(text.encode())
        except DataError as e:
            why = why or f"nvidia-smi: {e}"
    if why is not None and not any(r.name == "claimed.tool_failed" for r in found):
        found.append(_failed("nvidia-smi -q -x", why))
    return found


def _nvml(environment: Mapping[str, str], library: str, timeout_s: float) -> list[Reading]:
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (package, environment.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "hybrid.audit.nvml", library]
    text, why = _run(command, {**environment, "PYTHONPATH": path}, timeout_s)
    if why is not None:
        absent = "cannot open shared object file" in text
        return [] if absent else [_failed("nvml", why)]
    return [reading_from_json(json.loads(x)) for x in text.splitlines() if x.startswith("{")]


def align(readings: list[Reading]) -> list[Reading]:
    """Number every source's GPUs as the first source does that lists them, by PCI address.

    GPUs that the first source does not list keep none of their readings: the counts tell of them.
    Readings that carry a `bus` in their detail get their GPU.
    """
    places: dict[str, dict[int, str]] = {}
    for r in readings:
        if r.name == "claimed.pci_bus_id" and r.gpu is not None and isinstance(r.value, str):
            places.setdefault(r.source, {})[r.gpu] = r.value
    if not places:
        return readings
    numbers = {place: i for i, place in next(iter(places.values())).items()}
    slots = {place.partition(".")[0]: i for place, i in numbers.items()}
    groups = {"kernel": "kernel", "sysfs": "sysfs", "nvml": "nvml"}
    found = []
    for r in readings:
        own = places.get(
            "kernel" if r.source.startswith("/proc/driver") else groups.get(r.source, r.source)
        )
        if r.gpu is None:
            i = slots.get(str(r.detail.get("bus", "")).partition(".")[0])
            found.append(r if i is None else dataclasses.replace(r, gpu=i))
        elif own is None:
            found.append(r)
        elif (i := numbers.get(own.get(r.gpu, ""))) is not None:
            found.append(dataclasses.replace(r, gpu=i))
    return found
