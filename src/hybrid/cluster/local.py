"""Both pools on one machine: a supervisor process owns a small Ray cluster and the store.

    python -m hybrid.cluster.local SPEC.json     (started by `LocalCluster.start`, not by hand)

The supervisor starts a head, one gpu-pool node and some agents-pool nodes (for training only, the
gpu-pool node is the head and alone), writes its state file and waits. It ends on SIGTERM, SIGINT,
or when the process it was bound to is gone, and takes every process beneath it along: it is the
subreaper of all of them, so nothing a raylet leaves behind (HAProxy, a worker in the middle of a
start) can outlive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.config import ProjectConfig
from hybrid.errors import Conflict, HybridError, Unavailable
from hybrid.pools import AGENTS, GPU, HEAD

if TYPE_CHECKING:
    from hybrid.agents.store import EmbeddedStore

_LOOK_S = 0.25
_OBJECT_STORE = 128 * 1024 * 1024
_PR_SET_CHILD_SUBREAPER = 36
ENVIRONMENT = {
    # Serve's defaults are an order of magnitude slower; its controller reads these at its start.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
QUIET = {
    "RAY_num_workers_soft_limit": "0",  # an idle worker wakes a hundred times a second
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # nobody will drain one of these nodes
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
"""Of the nodes of a cluster for training only: Ray's own processes took a tenth of two cores. Never
of the command's own process, which may start a whole cluster next."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a running local cluster tells the commands: kept in a file only its owner can read."""

    pid: int
    started: float
    ray_address: str
    dashboard: str | None
    token_path: str
    store_url: str | None
    bound: bool
    training_only: bool = False


class LocalCluster:
    """The client's side: start, find, enter and stop the local cluster of one project."""

    def __init__(self, config: ProjectConfig) -> None:
        self.config = config
        self.dir = config.run.dir / "local"
        self._bond: Any = None

    @property
    def state_file(self) -> Path:
        """Where the supervisor writes its state once everything is up."""
        return self.dir / "state.json"

    def state(self) -> State | None:
        """The running cluster's state; None when none runs (a stale file is removed)."""
        try:
            state = State(**json.loads(self.state_file.read_text()))
        except FileNotFoundError:
            return None
        if _is_supervisor(state.pid):
            return state
        self.state_file.unlink(missing_ok=True)
        return None

    def start(
        self, *, bound: bool = False, training_only: bool = False, timeout_s: float = 120
    ) -> State:
        """Start the supervisor and wait until the nodes and the store are up.

        Args:
            bound: the cluster ends when this process does, however it ends.
            training_only: without agents pool, store and dashboard, see `QUIET`.
            timeout_s: seconds to wait.

        Raises:
            Conflict: one runs already.
            Unavailable: it did not come up; the message ends with its log's last lines.
        """
        if self.state() is not None:
            raise Conflict(f"a local cluster runs already ({self.state_file}); `hybrid down` first")
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        spec = self.dir / "spec.json"
        spec.write_text(json.dumps(self._spec(bound, training_only)))
        log_path = self.dir / "supervisor.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hybrid.cluster.local", str(spec)],
                stdin=subprocess.PIPE if bound else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._bond = process.stdin
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise Unavailable(
                        f"the local cluster did not start (exit {process.returncode}):\n"
                        f"{_tail(log_path)}"
                    )
                state = self.state()
                if state is not None:
                    return state
                time.sleep(0.1)
            raise Unavailable(
                f"the local cluster is not up after {timeout_s:g} s:\n{_tail(log_path)}"
            )
        except BaseException:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
            raise

    def enter(self, state: State) -> None:
        """Set the environment through which Ray's clients find and may enter this cluster."""
        os.environ.update(ENVIRONMENT)
        os.environ["RAY_AUTH_TOKEN_PATH"] = state.token_path
        os.environ["RAY_ADDRESS"] = state.ray_address

    def stop(self, timeout_s: float = 60) -> bool:
        """End the supervisor and all beneath it. False when none runs."""
        state = self.state()
        if state is None:
            return False
        os.kill(state.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while _is_supervisor(state.pid) and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(state.pid, os.WNOHANG)
            time.sleep(0.05)
        if _is_supervisor(state.pid):
            raise Unavailable(f"the local cluster (pid {state.pid}) does not end; see {self.dir}")
        return True

    def _spec(self, bound: bool, training_only: bool) -> dict[str, Any]:
        training, serving = self.config.training, self.config.serving
        slots = training.most_workers + serving.replicas
        return {
            "dir": str(self.dir),
            "code": str(self.config.run.dir.parent),
            "bound": bound,
            "gpu": {
                "slots": slots,
                "cpus": int(
                    training.most_workers * training.cpus_per_worker + serving.replicas + 1
                ),
            },
            "training_only": training_only,
            "agents": {"nodes": 0 if training_only else max(1, self.config.agents.swarm.hosts)},
            "store": None
            if self.config.store.url or training_only
            else {"dir": str(self.config.run.dir / "store"), "fsync": self.config.store.fsync},
        }


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _is_supervisor(pid: int) -> bool:
    """Whether `pid` is one of ours: a number alone may have been given to another process."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"hybrid.cluster.local" in line and stat.rsplit(")", 1)[1].split()[0] != "Z"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# --- the supervisor's side ------------------------------------------------------------------


class _Stop(Exception):
    """SIGTERM or SIGINT arrived."""


def supervise(spec: dict[str, Any]) -> None:
    """Run the cluster that `spec` describes until told to stop."""

    def on_signal(signum: int, frame: object) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(spec["dir"])
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(ENVIRONMENT)
    if spec["training_only"]:
        os.environ.update(QUIET)
    # Behaviours beside the project file can be named by dotted path.
    paths = [spec["code"], *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ.pop("RAY_ADDRESS", None)
    # Serve's HAProxy has fixed ports for its metrics and its statistics: with them a second
    # runtime on this machine would not serve.
    for name in ("METRICS", "STATS"):
        os.environ[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(free_port())
    # Unix socket paths are at most 107 bytes, so Ray's session cannot live below the project.
    temp = Path(tempfile.mkdtemp(prefix="hybrid-"))
    os.environ["RAY_TMPDIR"] = str(temp)  # ours alone: /tmp/ray may belong to another cluster
    (temp / "ray").mkdir()
    state_file = folder / "state.json"
    store = None
    try:
        if spec["store"]:
            from hybrid.agents.store import EmbeddedStore

            store = EmbeddedStore(Path(spec["store"]["dir"]), fsync=spec["store"]["fsync"])
            store.start()
        address, dashboard = _start_nodes(spec)
        state = State(
            pid=os.getpid(),
            started=time.time(),
            ray_address=address,
            dashboard=dashboard,
            token_path=str(token),
            store_url=store.url if store else None,
            bound=spec["bound"],
            training_only=spec["training_only"],
        )
        new = state_file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(state)))
        new.replace(state_file)
        _wait(spec["bound"], store)
    except _Stop:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        state_file.unlink(missing_ok=True)
        if store is not None:
            store.stop()
        _end_descendants()
        shutil.rmtree(temp, ignore_errors=True)


def _wait(bound: bool, store: EmbeddedStore | None) -> None:
    """Until a signal arrives or, when bound, the other end of stdin is closed. A store that died is
    started again on what it had written."""
    while True:
        if bound:
            ready, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
            if ready and not os.read(sys.stdin.fileno(), 1):
                raise _Stop
        else:
            time.sleep(_LOOK_S)
        if store is not None and not store.alive:
            sys.stderr.write("hybrid: the store ended; it is started again\n")
            with contextlib.suppress(HybridError):  # next time, perhaps
                store.restart()
        with contextlib.suppress(ChildProcessError):  # orphans that came to us and ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _start_nodes(spec: dict[str, Any]) -> tuple[str, str | None]:
    """Head, gpu node, agents nodes; for training only, the gpu node alone.

    Returns:
        (GCS address, dashboard URL if there is one).
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=False)
    port, alone, gpu = free_port(), spec["training_only"], spec["gpu"]
    node = {
        "num_cpus": gpu["cpus"],
        "num_gpus": _visible_gpus(),
        "object_store_memory": _OBJECT_STORE,
        "labels": GPU.labels(),
        "resources": GPU.resources(gpu["slots"]),
    }
    head = {
        "num_cpus": 1,
        "object_store_memory": _OBJECT_STORE,
        "labels": HEAD.labels(),
        "resources": HEAD.resources(1),
    }
    cluster.add_node(
        **(node if alone else head),  # a second node's processes would take from the ranks
        include_dashboard=not alone,
        include_log_monitor=not alone,
        no_monitor=alone,
        dashboard_host="127.0.0.1",
        dashboard_port=port,
        # The default port is another cluster's, if one runs here; without it no job is taken.
        dashboard_agent_listen_port=free_port(),
    )
    if not alone:
        cluster.add_node(wait=False, **node)
    for _ in range(spec["agents"]["nodes"]):
        cluster.add_node(
            wait=False,
            num_cpus=1,
            object_store_memory=_OBJECT_STORE,
            labels={**AGENTS.labels(), "ray.io/market-type": "spot"},
            resources=AGENTS.resources(1),
        )
    cluster.wait_for_nodes(timeout=60)
    return cluster.address, None if alone else f"http://127.0.0.1:{port}"


def _visible_gpus() -> int:
    """GPUs of this machine, by the device files of the kernel driver."""
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])


def _descendants(pid: int) -> list[int]:
    found = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    for child in map(int, children):
        found += [child, *_descendants(child)]
    return found


def _end_descendants(grace_s: float = 3.0) -> None:
    """SIGTERM, a short grace, SIGKILL: every process beneath this one, and reap them.

    Children of other threads than the main one would be missed by /proc/…/children; the
    supervisor starts all of its processes from the main thread.
    """
    deadline = time.monotonic() + grace_s
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        rest = _descendants(os.getpid())
        if not rest:
            return
        if time.monotonic() > deadline:
            for pid in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    supervise(json.loads(Path(sys.argv[1]).read_text()))
