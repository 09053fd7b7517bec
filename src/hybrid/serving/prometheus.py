"""The engine's counters for Prometheus, through Ray's metrics: each node's exporter serves them.

`hybrid_model_*` are of a replica (its base), `hybrid_adapter_*` of one adapter's requests, by name;
the base's own have adapter "". Sums only grow while a replica lives, as `rate()` wants them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PERIOD_S = 5.0
"""Between two reports of a replica; Ray's exporter has its own period besides."""


class Exporter:
    """Gauges of one replica, made when a value is first reported.

    Args:
        base: name of the base, a label of every value.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._gauges: dict[str, Any] = {}

    def report(
        self,
        counters: Mapping[str, float],
        served: Mapping[str, Mapping[str, float]],
        names: Mapping[str, str],
    ) -> None:
        """Publish.

        Args:
            counters: of the replica, by name.
            served: of each adapter, by digest; "" is the base.
            names: of adapters, by digest; one that is no longer served keeps its digest.
        """
        for name, value in counters.items():
            self._set(f"hybrid_model_{name}", value)
        for digest, values in served.items():
            for name, value in values.items():
                self._set(f"hybrid_adapter_{name}", value, names.get(digest, digest))

    def _set(self, name: str, value: float, adapter: str | None = None) -> None:
        from ray.util.metrics import Gauge

        labels = {"base": self._base} | ({} if adapter is None else {"adapter": adapter})
        gauge = self._gauges.get(name)
        if gauge is None:
            what = "See docs/serving.md, Metrics."
            gauge = self._gauges[name] = Gauge(name, what, tag_keys=tuple(labels))
        gauge.set(value, tags=labels)
