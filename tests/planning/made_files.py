"""Files as runs, audits and the served model write them, with figures that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENS, STEP_S = 4096, 0.5


def write_run(folder: Path, *, steps: int = 40, starts: int = 1, parameters: int = 1_000_000,
              finished: bool = True) -> Path:  # fmt: skip
    """A run's progress as training/progress.py writes it: slow first steps, an eval every 10."""
    records: list[dict[str, Any]] = []
    now, step = 1000.0, 0
    for start in range(starts):
        now += 10_000 * start  # it lay still in between
        records.append({"event": "launch", "time": now - 20, "began": now - 21, "workers": 2})
        records.append({"event": "start", "device": "cpu", "time": now, "step": step,
                        "steps": steps, "world_size": 2, "parameters": parameters,
                        "peak_flops": 1e11})  # fmt: skip
        while step < steps * (start + 1) // starts:
            step += 1
            warm = step - steps * start // starts
            now += STEP_S * (4 if warm <= 2 else 1)
            records.append({"event": "step", "time": now, "step": step, "tokens": TOKENS})
            if step % 10 == 0:
                now += 3.0
                records.append({"event": "eval", "time": now, "step": step, "eval_loss": 1.0})
    if finished:
        records.append({"event": "finished", "time": now + 2, "step": step, "metrics": {}})
        records.append({"event": "ended", "time": now + 9, "outcome": "finished"})
    folder.mkdir(parents=True)
    (folder / "progress.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def audit_file(path: Path, nodes: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"format": 1, "nodes": nodes}))
    return path


def node(name: str, tflops: float, severity: str = "note") -> dict[str, Any]:
    """A node as docs/audit.md says that the audit writes it."""
    return {
        "name": name,
        "findings": [{"severity": severity}],
        "readings": [
            {"name": "measured.matmul_tflops.bf16", "value": tflops, "device": "cuda:0"},
            {"name": "measured.copy_gbs", "value": 2000.0, "device": "cuda:0"},
        ],
    }


METRICS = """# HELP ray_hybrid_adapter_answered See docs/serving.md, Metrics.
# TYPE ray_hybrid_adapter_answered gauge
ray_hybrid_adapter_answered{base="b",adapter=""} 6.0
ray_hybrid_adapter_answered{base="b",adapter="citation"} 4.0
ray_hybrid_adapter_first_token_s{base="b",adapter=""} 5.0
ray_hybrid_adapter_decode_s{base="b",adapter="citation"} 1.5e+01
ray_hybrid_adapter_prompt_tokens{base="b",adapter=""} 900.0
ray_hybrid_adapter_cached_tokens{base="b",adapter=""} 100.0
ray_hybrid_adapter_output_tokens{base="b",adapter=""} 500.0
ray_node_cpu_count{ip="x"} 2
"""
