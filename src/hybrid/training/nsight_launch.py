"""Starts a worker's Python under Nsight Systems: `python -m hybrid.training.nsight_launch DIR …`.

Ray starts worker processes itself, so an `nsys` around the driver sees none of a running cluster.
Ray's own `nsight` runtime environment would wrap them, but with the first `python` of PATH and not
the one that Ray runs, and a node without nsys starts no worker. So this is what workers are started
by (`py_executable`): it becomes `nsys profile … python …`, or plain Python where that cannot be,
and leaves word of which in the environment.

Options: https://docs.nvidia.com/nsight-systems/UserGuide/ (CLI, profile command).
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

OPTIONS = {
    "trace": "cuda,nvtx,osrt",
    "sample": "none",
    "cpuctxsw": "none",
    "capture-range": "cudaProfilerApi",
    # By default the end of the range ends the session and signals the process group: the worker.
    "capture-range-end": "stop",
    "kill": "none",
    "force-overwrite": "true",
}
SUFFIX = ".nsys-rep"
REPORT, WHY_NOT = "HYBRID_NSIGHT_REPORT", "HYBRID_NSIGHT_WHY_NOT"
"""In a worker's environment: where its report will be, or why there will be none."""
_SESSION = "NSYS_PROFILING_SESSION_ID"
_CHECK_S = 60.0


def command(output: Path, run: Sequence[str], nsys: str = "nsys") -> list[str]:
    """The command that runs another under Nsight Systems.

    Args:
        output: the report, with or without its suffix.
        run: the command and its arguments.
    """
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    return [nsys, "profile", *options, f"--output={str(output).removesuffix(SUFFIX)}", *run]


def launcher(folder: Path) -> str:
    """What Ray is to start workers by, as text for a shell; reports are left in `folder`."""
    return shlex.join([sys.executable, "-m", __name__, str(folder.resolve())])


def resolve(
    folder: Path, run: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command to become, and what its environment has besides.

    Args:
        folder: of reports; must be seen by who reads them.
        run: the command without nsys.
        environment: of this process; its PATH is where nsys is looked for.
    """
    if environment.get(_SESSION):
        return list(run), {WHY_NOT: "it runs under an nsys of the caller's, which has the report"}
    nsys = shutil.which("nsys", path=environment.get("PATH"))
    if nsys is None:
        return list(run), {WHY_NOT: "nsys is not on PATH"}
    try:
        subprocess.run([nsys, "--version"], check=True, capture_output=True, timeout=_CHECK_S)
    except (OSError, subprocess.SubprocessError) as e:
        return list(run), {WHY_NOT: f"`nsys --version` fails: {e}"}
    report = folder / f"{socket.gethostname()}-{os.getpid()}{SUFFIX}"
    return command(report, run, nsys), {REPORT: str(report)}


def main() -> None:
    """Become the worker."""
    folder, *arguments = sys.argv[1:]
    run, more = resolve(Path(folder), [sys.executable, *arguments], os.environ)
    os.execve(run[0], run, {**os.environ, **more})


if __name__ == "__main__":
    main()
