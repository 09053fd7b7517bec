"""Predicted against actual: what a run, an audit and the agents' metrics say of a workload.

Also the other way round: `calibrate` puts what a run measured in the place of assumptions.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.planning import agents_cost, training_cost
from hybrid.planning.figures import AuditFigures
from hybrid.planning.ranges import Range, estimate, exactly, within
from hybrid.planning.runs import RunFigures
from hybrid.planning.workload import AgentsPart, ClusterPart, Workload

SAME = 0.02
"""Share by which a run's parameters may differ from the workload's and be the same model."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, predicted and measured.

    Attributes:
        name, unit: what it is.
        predicted: its range, with its source.
        actual: as measured.
        source: where `actual` was read.
    """

    name: str
    unit: str
    predicted: Range
    actual: float
    source: str

    @property
    def ratio(self) -> float:
        """Actual over predicted `mid`."""
        return self.actual / self.predicted.mid if self.predicted.mid else math.inf

    @property
    def verdict(self) -> str:
        """`as predicted` within the range, else how far it is off."""
        if self.predicted.low <= self.actual <= self.predicted.high:
            return "within the range"
        over = "above" if self.actual > self.predicted.mid else "below"
        return f"{over} the range: {self.ratio:.2f} times the middle"


def run_seconds(calibration: RunFigures, steps: int, evals: int) -> Range:
    """How long a run of the same model takes on the same machine, from one calibration run.

    Args:
        calibration: a short run of it.
        steps, evals: of the run that is predicted.
    """
    seconds = calibration.step_s * steps + calibration.eval_s * evals + calibration.other_s
    return within(seconds, 1.25, f"measured: {calibration.steps_done} steps of {calibration.name}")


def whole_run(calibration: RunFigures, run: RunFigures) -> Row:
    """All of a run against what a calibration run of the same model, on as many workers, says.

    Raises:
        DataError: they are not of one model and number of workers; both are named.
    """
    here, there = calibration.work, run.work
    if here != there:
        raise DataError(
            f"{calibration.name} says nothing of {run.name}: parameters, tokens a step and workers"
            f" are {here} and {there}"
        )
    return Row(
        name=f"all of {run.name}, by {calibration.name}",
        unit="s",
        predicted=run_seconds(calibration, run.steps_done, run.evals),
        actual=run.seconds,
        source=f"{run.name}/progress.jsonl",
    )


def calibrate(w: Workload, run: RunFigures) -> tuple[Workload, str]:
    """The workload with the speed that a run reached, and a sentence on what was taken.

    A model of another size takes the run's FLOP/s, another number of workers its share of them.

    Raises:
        DataError: the workload trains nothing.
    """
    if w.train is None:
        raise DataError(f"--calibrate {run.name}: the workload has no `train` to be calibrated")
    cluster = w.cluster or ClusterPart()
    flops = 6 * run.parameters * run.tokens_per_s * cluster.gpus / run.workers
    rate = flops / (6 * w.train.parameters)
    said = f"{run.name}: {run.tokens_per_s:,.0f} tokens/s with {run.workers} workers"
    if abs(w.train.parameters / run.parameters - 1) > SAME or cluster.gpus != run.workers:
        said += (
            f"; taken as {rate:,.0f} for {w.train.parameters:,.0f} parameters on {cluster.gpus},"
            " as if FLOP/s stayed the same for each worker (`hybrid scale` measures that)"
        )
    if run.device == "cpu" and cluster.usd_per_hour is None:
        said += f"; it had no GPU: give cluster.usd_per_hour, or the price is that of {cluster.gpu}"
    changed = cluster.model_copy(update={"tokens_per_s": rate, "mfu": None})
    return w.model_copy(update={"cluster": changed}), said


def from_run(run: RunFigures, w: Workload | None) -> list[Row]:
    """A run against the workload, or without one against 6ND over its own matmul speed.

    Raises:
        DataError: the workload trains another model than the run did; both sizes are named.
    """
    source = f"{run.name}/progress.jsonl"
    if w is None:
        mfu = training_cost.MFU
        peak = run.peak_flops * run.workers
        rate = mfu.scaled(peak / (6 * run.parameters))
        return [
            Row(
                name="MFU", unit="of measured matmuls", predicted=mfu, actual=run.mfu, source=source
            ),
            Row(
                name="speed",
                unit="tokens/s",
                predicted=rate,
                actual=run.tokens_per_s,
                source=source,
            ),
            _hours(run, rate, source),
        ]
    if w.train is None:
        raise DataError(f"{run.name} is a training run, and the workload has no `train`")
    if abs(w.train.parameters / run.parameters - 1) > SAME:
        raise DataError(
            f"train.parameters: {w.train.parameters:,.0f}, and {run.name} trained"
            f" {run.parameters:,.0f}: not the same work (--calibrate takes its speed all the same)"
        )
    cluster = w.cluster or ClusterPart()
    rate = training_cost.pool_flops(w.train, cluster).scaled(1 / (6 * w.train.parameters))
    rows = [
        Row(name="speed", unit="tokens/s", predicted=rate, actual=run.tokens_per_s, source=source),
        _hours(run, rate, source),
    ]
    if run.finished:
        given = training_cost.inputs(w.train, cluster, cluster.market == "spot")
        wall = estimate(
            lambda v: training_cost.training_time(v, cluster.nodes, cluster.zones).wall, given
        ).value
        done = done_tokens(run)
        share = done / w.train.tokens
        rows.append(
            Row(
                name=f"training of {done:,.0f} tokens, with failures",
                unit="h",
                predicted=wall.scaled(share),
                actual=run.seconds / 3600,
                source=source,
            )
        )
    if run.usd is not None and cluster.usd_per_hour is not None:
        cost = rate.into(done_tokens(run) * cluster.usd_per_hour / 3600)
        rows.append(Row(name="cost", unit="USD", predicted=cost, actual=run.usd,
                        source=f"{run.name}/report.json"))  # fmt: skip
    return rows


def done_tokens(run: RunFigures) -> float:
    """Tokens of all the steps that a run did."""
    return run.steps_done * run.tokens_per_step


def _hours(run: RunFigures, rate: Range, source: str) -> Row:
    return Row(name=f"{run.steps_done} steps, and all between them", unit="h",
               predicted=rate.into(done_tokens(run) / 3600), actual=run.seconds / 3600,
               source=source)  # fmt: skip


def from_audit(audit: AuditFigures, w: Workload) -> list[Row]:
    """The audited speed of the GPUs against the one that is planned with."""
    if audit.matmul_tflops is None:
        return []
    predicted = training_cost.matmul_tflops(w.cluster or ClusterPart())
    return [Row(name="matmuls of a GPU", unit="TFLOP/s", predicted=predicted,
                actual=audit.matmul_tflops, source=str(audit.path))]  # fmt: skip


def read_metrics(path: Path) -> dict[str, float]:
    """Sums over all adapters and replicas of a saved scrape of the nodes' Prometheus ports.

    Returns:
        `hybrid_adapter_answered` and the like, without Ray's prefix, to the sum of their samples.

    Raises:
        DataError: it holds no figures of the served model.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: {e}") from None
    sums: defaultdict[str, float] = defaultdict(float)
    for found in re.finditer(
        r"^(?:ray_)?(hybrid_\w+)(?:\{.*\})? ([-+.\de]+)(?: \d+)?$", text, re.MULTILINE
    ):
        sums[found[1]] += float(found[2])
    if not sums.get("hybrid_adapter_answered"):
        raise DataError(
            f"{path}: no hybrid_adapter_answered above 0 in it; save a node's Prometheus page"
            " (docs/serving.md, Metrics) after requests were answered"
        )
    return dict(sums)


def from_metrics(sums: dict[str, float], w: Workload, source: str) -> list[Row]:
    """The served model's calls against the workload's assumptions of them.

    Raises:
        DataError: the workload serves nothing.
    """
    if w.serve is None:
        raise DataError(f"{source}: figures of a served model, and the workload has no `serve`")
    answered = sums["hybrid_adapter_answered"]
    call_s = (sums["hybrid_adapter_first_token_s"] + sums["hybrid_adapter_decode_s"]) / answered
    read = sums["hybrid_adapter_prompt_tokens"] + sums.get("hybrid_adapter_cached_tokens", 0.0)
    tokens = (read + sums["hybrid_adapter_output_tokens"]) / answered
    agents = w.agents or AgentsPart()
    given = agents_cost.inputs(w.serve, agents)
    rows = [
        Row(name="a model call", unit="s", predicted=given["model call, s"], actual=call_s,
            source=source),
        Row(name="tokens of a call", unit="tokens",
            predicted=within(w.serve.tokens_per_call, 1.5, "given or default, within 1.5 times"),
            actual=tokens, source=source),
    ]  # fmt: skip

    def nodes(v: dict[str, float] | Any) -> float:
        return agents_cost.capacity(v, w.steps, agents).needed

    predicted = estimate(nodes, given).value
    measured = {name: figure.mid for name, figure in given.items()} | {"model call, s": call_s}
    rows.append(Row(name="nodes of agents, by the measured call", unit="nodes",
                    predicted=predicted, actual=nodes(measured), source=source))  # fmt: skip
    return rows


def from_status(path: Path, w: Workload) -> list[Row]:
    """The hosts that a swarm really runs (`hybrid status --json`) against those planned.

    Raises:
        DataError: the file is none of `hybrid status --json`, or no swarm ran.
    """
    try:
        hosts = len(json.loads(path.read_text(encoding="utf-8"))["swarm"]["hosts"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(
            f"{path}: not the output of `hybrid status --json` with a running swarm:"
            f" {type(e).__name__}: {e}"
        ) from None
    agents = w.agents or AgentsPart()
    if w.serve is None:
        if agents.nodes is None:
            raise DataError(f"{path}: hosts of agents, and the workload says none")
        predicted = exactly(agents.nodes)
    else:
        given = agents_cost.inputs(w.serve, agents)
        predicted = estimate(lambda v: agents_cost.capacity(v, w.steps, agents).nodes, given).value
    return [Row(name="hosts of agents", unit="hosts", predicted=predicted, actual=float(hosts),
                source=str(path))]  # fmt: skip


def row_document(row: Row) -> dict[str, Any]:
    """A row as JSON, with its ratio and verdict."""
    return asdict(row) | {"ratio": row.ratio, "verdict": row.verdict}
