"""For chaos tests: finding and killing a running system's processes, and counting effects.

sink = EffectSink(); sink.start()                 # behaviours call it with the http tool
kill(processes(supervisor_pid, "ray::HostActor")[0])
assert sink.effects == expected                   # each key once, however often it was asked
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def processes(root: int, name: str) -> list[int]:
    """Process ids beneath `root` whose command line begins with `name`, oldest first (Linux)."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if stat[0] != "Z":
                parents[int(folder.name)] = int(stat[1])
                words = (folder / "cmdline").read_bytes().split(b"\0")
                line = b" ".join(words).decode(errors="replace")
                lines[int(folder.name)] = line.rpartition("/")[2] if line[:1] == "/" else line

    def beneath(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == root:
                return True
        return False

    return sorted(pid for pid, line in lines.items() if line.startswith(name) and beneath(pid))


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class EffectSink:
    """An outside service that honours `Idempotency-Key`: POST / has its effect once a key.

    Attributes:
        effects: the bodies, by key.
        asked: how often each key was sent.
    """

    def __init__(self) -> None:
        self.effects: dict[str, Any] = {}
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(sink._take(self.headers["Idempotency-Key"], body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A caller that was killed is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where to POST."""
        return f"http://127.0.0.1:{self._server.server_port}/"

    @property
    def repeated(self) -> int:
        """How many calls had no effect because their key had come before."""
        return sum(self.asked.values()) - len(self.asked)

    def _take(self, key: str, body: Any) -> dict[str, int]:
        with self._lock:
            self.asked[key] += 1
            self.effects.setdefault(key, body)
            return {"number": list(self.effects).index(key)}

    def __enter__(self) -> EffectSink:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
