"""Every HTML page the product writes, with content as real runs give it and a text woven in."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from honest import claims_of, measured_of, sku

from hybrid.audit.conduct import NodeResult
from hybrid.audit.reading import Reading
from hybrid.audit.report import NodeReport
from hybrid.audit.report_html import to_html as audit_html
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import judge as judge_node
from hybrid.planning.actual import Row
from hybrid.planning.advise import advise
from hybrid.planning.memory_timeline import Holder, Memory
from hybrid.planning.page import to_html as advice_html
from hybrid.planning.prices import load_prices
from hybrid.planning.profile_page import to_html as profile_html
from hybrid.planning.ranges import Range
from hybrid.planning.scaling import usl
from hybrid.planning.scaling_page import to_html as scaling_html
from hybrid.planning.sweep import Measured, assess
from hybrid.planning.trace import RankTrace, StepTime
from hybrid.planning.verdict import judge as judge_steps
from hybrid.planning.workload import parse
from hybrid.training.report import series, summarise
from hybrid.training.report_page import page as training_html
from hybrid.training.trials import HEADS

WHEN = 1_764_700_000.0
MIB, GIB = 2**20, 2**30


def audit(text: str) -> str:
    """A node that is as sold and one that is not, with curves, money and an earlier audit."""
    product = sku("A100-SXM4-80GB")
    l2 = tuple((MIB * 2.0**n, 250.0 if n < 5 else 480.0 + n) for n in range(9))
    chunks = [1500 + 20 * math.sin(n) for n in range(150)]
    nodes = []
    for name, sms in (("10.0.0.11", product.sm_count), (text, 70)):
        readings: list[Reading] = []
        for gpu in range(2):
            readings += claims_of(product, gpu, name=f"{product.names[0]} {text}".strip())
            readings += [
                r if r.name != "measured.l2_bytes" else Reading(**{**vars(r), "curve": l2})
                for r in measured_of(product, gpu, sm_count=sms, chunks=chunks)
            ]
        before = [Reading(**{**vars(r), "value": 1.3 * r.value if isinstance(r.value, float)
                             else r.value}) for r in readings]  # fmt: skip
        nodes.append(
            NodeReport(
                result=NodeResult(name=name, readings=readings),
                verdict=judge_node(readings, load_specs()),
                previous=NodeResult(name=name, readings=before),
            )
        )
    return audit_html(nodes, level="full", when=WHEN, usd_per_hour=12.5)


def advice(text: str) -> str:
    """A base that is trained once, specialists on it, and what came true of it."""
    workload = parse(
        {
            "name": text, "train": {"parameters": "7B", "tokens": "140B", "specialists": 12},
            "serve": {"parameters": "7B", "requests_per_s": 20, "tokens_per_call": 800},
            "steps": 3, "changes_per_month": 2, "latency": {"limit_ms": 15000},
            "budget": {"usd": 150000, "per": "total"}, "agents": {"zones": 3},
            "cluster": {"gpu": "H100 80GB HBM3", "gpus": 64},
        }
    )  # fmt: skip
    row = Row(
        name="MFU", unit="%", predicted=Range(30, 40, 50, "assumed"), actual=37.2, source=text
    )
    return advice_html(advise(workload, load_prices(None)), [row])


def scaling(text: str) -> str:
    """Both modes; two workers do too little in one of them."""

    def runs(mode: Any, sigma: float) -> list[Measured]:
        return [
            Measured(
                mode=mode, workers=n, tokens_per_step=32_768 * n, nodes=n, machines=n, when=WHEN,
                step_s=tuple(32_768 * n / usl(n, 180_000, sigma, 0.004) * (1 + 0.02 * (i % 5 - 2))
                             for i in range(20)),
            )
            for n in (1, 2, 4, 8, 16)
        ]  # fmt: skip

    sweeps = [assess(runs("strong", 0.15), {}, 2.5), assess(runs("weak", 0.01), {}, 2.5)]
    return scaling_html(sweeps, name=text, when=WHEN)


def profile(text: str) -> str:
    """Two ranks, one of which the other waits for; with knobs tried and a memory timeline."""
    kernels = ("void at::native::vectorized_elementwise_kernel<4>", "ncclDevKernel_AllReduce", text)
    ranks, memories = [], []
    for rank in range(2):
        wait = 0.12 if rank == 0 else 0.02
        steps = [
            StepTime(step=n, seconds=0.31 + wait, compute=0.2, matmul=0.15, exposed=0.06 + wait,
                     overlapped=0.05, copies=0.01, host_wait=0.03, idle=0.01, input_wait=0.01)
            for n in (3, 4, 5)
        ]  # fmt: skip
        ranks.append(
            RankTrace(
                path=Path("t.json"), rank=rank, world_size=3, backend="nccl", device=True,
                steps=tuple(steps), collectives={"all_reduce": 0.3}, phases={}, warnings=(),
                ops=tuple((name, 0.1 / (n + 1), 48 * (n + 1)) for n, name in enumerate(kernels)),
            )
        )  # fmt: skip
        moments = []
        for n in range(200):
            grown = n % 66 / 66
            rising = grown if grown < 0.5 else 1 - grown
            moments.append(
                (n * 0.005, (2 * GIB, int(rising * 2 * GIB), 4 * GIB, int(rising * 12 * GIB),
                             40 * MIB, 200 * MIB))
            )  # fmt: skip
        at, held = max(moments, key=lambda m: sum(m[1]))
        names = ("parameters", "gradients", "optimiser", "activations", "input", "other")
        memories.append(
            Memory(
                path=Path("m.json"), rank=rank, timeline=tuple(moments), peak_at=at, peak_step=3,
                peak=dict(zip(names, held, strict=True)), peak_phase="forward and backward",
                step_peaks={3: sum(held), 4: sum(held), 5: sum(held)}, unseen=GIB,
                holders=tuple(
                    Holder(category=name, owner=f"model.layers.*.{text}", op="aten::linear",
                           bytes=size, blocks=24)
                    for name, size in zip(names, held, strict=True)
                ),
            )
        )  # fmt: skip
    tried = [("batch", "measured", "1.18", "training.micro_batch 8"), (text, "failed", "", text)]
    return profile_html(ranks, judge_steps(ranks), name=text, tried=tried, memories=memories)


def training(text: str) -> str:
    """A run that was restarted once and failed in the end."""
    records: list[dict[str, Any]] = [
        {"event": "launch", "began": WHEN, "time": WHEN + 1, "workers": 4, "usd_per_hour": 2.5}
    ]
    now = WHEN + 30
    for first, last in ((1, 600), (501, 1200)):
        now += 40
        records.append(
            {"event": "start", "time": now, "step": first - 1, "steps": 2000, "world_size": 4,
             "strategy": "fsdp", "device": text, "parameters": 7_000_000, "flops_per_token": 4.2e7,
             "peak_flops": 6.9e14, "peak_source": "measured: bfloat16", "sheet_flops": 9.89e14}
        )  # fmt: skip
        for step in range(first, last + 1):
            now += 0.52
            records.append(
                {"event": "step", "time": now, "step": step, "steps": 2000, "tokens": 131_072,
                 "loss": 2 + 9 / (step + 3) ** 0.5 + 0.05 * math.sin(step), "lr": 1.5e-7 * step,
                 "grad_norm": 1 + 0.2 * math.sin(step / 3), "spent": {"step": 0.5, "data": 0.02}}
            )  # fmt: skip
            if step % 200 == 0:
                now += 6
                records.append({"event": "eval", "time": now, "step": step,
                                "eval_loss": 2.1 + 9 / step**0.5})  # fmt: skip
    records.append({"event": "ended", "time": now + 2, "outcome": "failed", "error": text})
    trials = {
        "picked": f"fsdp, as the fastest: {text}", "heads": list(HEADS),
        "rows": [["*", "fsdp", "8 x 4", "251,256", "61.20 GiB", "68,200,000", "measured"],
                 ["", "ddp", "8 x 4", "-", "-", "-", f"rejected: {text}"]],
    }  # fmt: skip
    figures = {**summarise(text, records), "trials": trials}
    return training_html(figures, series(records))


PAGES: dict[str, Callable[[str], str]] = {
    "audit": audit,
    "advice": advice,
    "scaling": scaling,
    "profile": profile,
    "training": training,
}
"""By name: makes the page with a text in all places that take one from outside."""
