"""A real Chromium without a window, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
"""None where there is none."""
_DEADLINE_S = 60.0
# Chromium reads commands from descriptor 3 and writes answers to 4, each ended by a NUL.
_START = (
    "import fcntl, os, sys; a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]);"
    "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One browser with one tab. A context manager; `folder` is for its profile.

    Attributes:
        events: (method, parameters) of what it told since `show` was called last.
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._folder, self._count, self._read, self._session = folder, 0, b"", ""
        self._said = folder / "said.txt"

    def __enter__(self) -> Browser:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        arguments = [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={self._folder / 'profile'}", "about:blank",
        ]  # fmt: skip
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *arguments],
                pass_fds=(theirs_in, theirs_out), stdout=said, stderr=said,
            )  # fmt: skip
        os.close(theirs_in), os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        try:
            tab = self.ask("Target.createTarget", url="about:blank")["targetId"]
            attached = self.ask("Target.attachToTarget", targetId=tab, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        os.close(self._out)  # it ends when nobody is there to command it
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._count += 1
        call: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while (message := self._next()).get("id") != self._count:
            if "method" in message:
                self.events.append((message["method"], message["params"]))
        assert "error" not in message, f"{method}: {message['error']}"
        found: dict[str, Any] = message["result"]
        return found

    def show(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Load a page on a screen so many CSS pixels wide, and wait until it is there."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=2 if phone else 1, mobile=phone)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            message = self._next()
            self.events.append((message["method"], message["params"]))

    def value(self, script: str) -> Any:
        """What a JavaScript expression is within the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {_DEADLINE_S:.0f} s"
            more = os.read(self._in, 1 << 16)
            assert more, f"the browser ended: {self._said.read_text()[-2000:]}"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
