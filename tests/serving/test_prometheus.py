"""The engine's counters at the metrics port of a Ray node."""

from __future__ import annotations

import time
from typing import Any

import httpx

from hybrid.serving.prometheus import Exporter


def test_counters_reach_the_metrics_port_by_base_and_adapter(ray_cluster: Any) -> None:
    import ray

    exporter = Exporter("legal-base")
    served = {"": {"requests": 3}, "d1": {"requests": 2, "queue_s": 0.25}, "gone": {"requests": 1}}
    exporter.report({"kv_blocks_used": 7}, served, {"d1": "citation"})
    exporter.report({"kv_blocks_used": 9}, served, {"d1": "citation"})
    wanted = {
        ("hybrid_model_kv_blocks_used", ""): 9.0,
        ("hybrid_adapter_requests", 'adapter=""'): 3.0,
        ("hybrid_adapter_requests", 'adapter="citation"'): 2.0,
        ("hybrid_adapter_requests", 'adapter="gone"'): 1.0,
        ("hybrid_adapter_queue_s", 'adapter="citation"'): 0.25,
    }
    nodes = [n for n in ray.nodes() if n["Alive"]]  # other tests have taken some away
    urls = [f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in nodes]
    deadline = time.monotonic() + 60
    while True:
        text = "\n".join(
            httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text for url in urls
        )
        lines = [line for line in text.splitlines() if 'base="legal-base"' in line]
        found = {
            key: float(line.rsplit(" ", 1)[1])
            for key in wanted
            for line in lines
            if key[0] in line and key[1] in line
        }
        if found == wanted:
            return
        assert time.monotonic() < deadline, lines
        time.sleep(0.5)
