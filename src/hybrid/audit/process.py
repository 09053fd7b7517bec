"""A probe process and its clock: commands with a time-out after which the process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

_LAST_WORDS = 2000


class ProbeFailed(Exception):
    """A command had no result; `outcome` is "timed-out", "died" or "failed"."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(outcome, text)
        self.outcome = outcome
        self.text = text

    def __str__(self) -> str:
        """What happened, without the outcome's name."""
        return self.text


class ProbeProcess:
    """One worker process; started by the first command, and again after it was killed.

    Commands of one process run one after the other, whoever asks.
    """

    def __init__(self, spec: str, environment: dict[str, str] | None = None) -> None:
        self.spec = spec
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._lock = threading.Lock()

    def call(self, command: dict[str, Any], timeout_s: float) -> tuple[Any, bytes]:
        """The worker's result and bytes.

        Args:
            timeout_s: from now, the start of the process and waiting for its turn included.

        Raises:
            ProbeFailed: it took too long (and was killed), died, or raised.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise ProbeFailed("timed-out", f"{command['do']}: the device is still busy")
        try:
            process = self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()
                line = self._read(process, deadline)
                head = json.loads(line)
                payload = self._read(process, deadline, int(head["payload"]))
            except TimeoutError:
                self._kill()
                what = command.get("name", command["do"])
                raise ProbeFailed(
                    "timed-out", f"{what} did not end within {timeout_s:.0f} s and was killed"
                ) from None
            except (EOFError, BrokenPipeError, ValueError):
                words = self._last_words()
                self._kill()
                raise ProbeFailed("died", f"the probe process ended: {words}") from None
            if "error" in head:
                raise ProbeFailed("failed", str(head["error"]))
            return head["ok"], payload
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._kill()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by _kill
        environment = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # What this process can import, the worker can: a job's working directory, for one.
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **self._environment,
        }
        environment.pop("OMP_NUM_THREADS", None)  # Ray's, for tasks that hold a CPU
        if environment.get("CUDA_VISIBLE_DEVICES") == "":
            environment.pop("CUDA_VISIBLE_DEVICES")  # Ray's, for tasks that hold no GPU
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybrid.audit.worker", self.spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        return self._process

    def _read(
        self, process: subprocess.Popen[bytes], deadline: float, count: int | None = None
    ) -> bytes:
        """A line, or `count` bytes. Raises TimeoutError, EOFError."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while count is None or len(found) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                # A line is short and read byte by byte, so that none of the payload is taken.
                part = os.read(descriptor, 1 if count is None else min(count - len(found), 1 << 20))
                if not part:
                    raise EOFError
                found += part
                if count is None and part == b"\n":
                    break
        return bytes(found)

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LAST_WORDS))
        text = self._log.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "without a word"

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process stuck in a driver cannot be killed before the driver returns: do not wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
