"""A node of an audit within the test's process: the real `Machine` and `Worker`.

The processes between them are `test_process.py`'s and `test_cluster.py`'s subject; here many
devices are audited in a second.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import lying_devices

from hybrid.audit.process import ProbeFailed
from hybrid.audit.run import LocalMember, Plan
from hybrid.audit.worker import Worker


class InProcess:
    """Has a worker do its commands here; what travels between processes is JSON here too."""

    def __init__(self, spec: str, environment: dict[str, str] | None = None) -> None:
        self.worker = Worker(spec)
        self.lock = threading.Lock()
        if spec.startswith("lying_devices:"):  # whatever import mode these tests are run in
            self.worker._device = getattr(lying_devices, spec.partition(":")[2])()

    def call(self, command: dict[str, Any], timeout_s: float) -> tuple[Any, bytes]:
        with self.lock:
            try:
                result, payload = self.worker.do(json.loads(json.dumps(command)))
            except Exception as e:  # noqa: BLE001  as the worker does
                raise ProbeFailed("failed", f"{type(e).__name__}: {e}") from None
            return json.loads(json.dumps(result)), payload

    def close(self) -> None:
        pass


def member(name: str, *devices: str, level: Any = lying_devices.TINY, **claims: Any) -> LocalMember:
    """A node with devices named by class."""
    plan = Plan(level=level, devices=tuple(f"lying_devices:{d}" for d in devices), **claims)
    return LocalMember(plan, name, start=InProcess)
