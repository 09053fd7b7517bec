"""How long training takes: 6ND over the FLOP/s that are reached, checkpoints, failures, restarts.

- FLOPs: 6 a parameter and token (Kaplan et al., "Scaling laws for neural language models", 2020).
- When to save, and what failures cost: J. T. Daly, "A higher order estimate of the optimum
  checkpoint interval for restart dumps", FGCS 22 (2006) 303: his interval (equation 37) and his
  expected wall time under failures that are exponentially distributed (equation 20). To first
  order it is J. W. Young's sqrt(2 x cost x MTBF), CACM 17 (1974) 530.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid.planning.ranges import Range, Values, exactly, within
from hybrid.planning.spot import CORRELATION, INTERRUPTIONS, event_rate
from hybrid.planning.workload import ClusterPart, TrainPart

FLOPS_PER_PARAMETER_TOKEN = 6.0
STATE_BYTES = 14.0
"""Of a parameter in a checkpoint: float32 weight, two float32 moments, and the bfloat16 copy."""
MEMORY_BYTES = 16.0
"""Of a parameter while it is trained in mixed precision with Adam, activations not counted
(Rajbhandari et al., "ZeRO", SC 2020)."""
NODE_BYTES_PER_S = 1e9
MFU = Range(0.30, 0.42, 0.55, "assumed: share of big matmuls' speed; 0.38 to 0.43 of the data sheet"
            " is published for 405B on 8,192 to 16,384 H100 (Llama 3, 2024)")  # fmt: skip
NODE_MTBF_HOURS = within(6300, 3, "assumed: 419 unexpected stops in 54 days of 2,048 nodes (Llama"
                         " 3, 2024)")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Where the hours of a run go.

    Attributes:
        compute: at full speed.
        saving: held up by checkpoints.
        lost: computed again, and restarting, after failures.
        interval_s: seconds of work between checkpoints.
        failures: how many are expected.
    """

    compute: float
    saving: float
    lost: float
    interval_s: float
    failures: float

    @property
    def wall(self) -> float:
        """All hours."""
        return self.compute + self.saving + self.lost


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints of that cost (Daly 2006, equation 37)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def wall_seconds(
    work_s: float, interval_s: float, cost_s: float, mtbf_s: float, restart_s: float
) -> float:
    """Expected wall time of `work_s` of work (Daly 2006, equation 20); inf where it never ends."""
    exponent = (interval_s + cost_s) / mtbf_s
    if exponent > 700 or restart_s / mtbf_s > 700:
        return math.inf
    segment = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    return segment * work_s / interval_s


def training_time(v: Values, nodes: int, zones: int) -> TrainingTime:
    """A run's hours from one value of each input; see `inputs` for their names and units."""
    work_s = FLOPS_PER_PARAMETER_TOKEN * v["parameters"] * v["tokens"] / v["FLOP/s of the pool"]
    rate = nodes / v["node MTBF, h"]
    if "interruptions a node-hour" in v:
        rate += event_rate(v["interruptions a node-hour"], v["correlation"], nodes, zones)
    mtbf_s = 3600 / rate
    cost_s, restart_s = v["checkpoint, s"], v["restart, s"]
    interval_s = min(work_s, daly_interval(cost_s, mtbf_s))
    wall_s = wall_seconds(work_s, interval_s, cost_s, mtbf_s, restart_s)
    saving_s = cost_s * work_s / interval_s
    return TrainingTime(
        compute=work_s / 3600,
        saving=saving_s / 3600,
        lost=max(0.0, wall_s - work_s - saving_s) / 3600,
        interval_s=interval_s,
        failures=wall_s / mtbf_s,
    )


def inputs(train: TrainPart, cluster: ClusterPart, spot: bool) -> dict[str, Range]:
    """The inputs of `training_time`, each with its range and where it comes from.

    Raises:
        ValueError: the table knows no speed of the GPU, and none is given.
    """
    nodes = cluster.nodes
    given: dict[str, Range] = {
        "parameters": exactly(train.parameters),
        "tokens": exactly(train.tokens),
        "FLOP/s of the pool": pool_flops(train, cluster),
        "node MTBF, h": (
            exactly(cluster.node_mtbf_hours) if cluster.node_mtbf_hours else NODE_MTBF_HOURS
        ),
        "checkpoint, s": (
            exactly(cluster.checkpoint_s)
            if cluster.checkpoint_s
            else within(
                STATE_BYTES * train.parameters / (NODE_BYTES_PER_S * nodes),
                3,
                f"assumed: {STATE_BYTES:g} bytes a parameter, 1 GB/s a node, work held up by all"
                " of it",
            )
        ),
        "restart, s": exactly(cluster.restart_s, "given or default"),
    }
    if spot:
        rate, share = cluster.interruptions_per_node_hour, cluster.correlation
        given["interruptions a node-hour"] = exactly(rate) if rate else INTERRUPTIONS
        given["correlation"] = exactly(share) if share is not None else CORRELATION
    return given


def pool_flops(train: TrainPart, cluster: ClusterPart) -> Range:
    """FLOP/s that training reaches on the whole pool: measured, else matmul speed times MFU."""
    if cluster.tokens_per_s is not None:
        flops = FLOPS_PER_PARAMETER_TOKEN * train.parameters * cluster.tokens_per_s
        return within(flops, 1.1, "measured: tokens a second of this model")
    mfu = exactly(cluster.mfu) if cluster.mfu else MFU
    each = matmul_tflops(cluster)
    source = f"{each.source}; MFU {mfu.source}"
    pool = cluster.gpus * 1e12
    return Range(
        pool * each.low * mfu.low, pool * each.mid * mfu.mid, pool * each.high * mfu.high, source
    )


def matmul_tflops(cluster: ClusterPart) -> Range:
    """Dense bfloat16 TFLOP/s of one GPU's big matmuls: measured here, published, or from its sheet.

    Raises:
        ValueError: none of them is known.
    """
    gpu = cluster.product()
    if cluster.matmul_tflops is not None:
        return exactly(cluster.matmul_tflops, "measured matmuls")
    if gpu.measured_tflops is not None:
        return Range(
            0.9 * gpu.measured_tflops,
            gpu.measured_tflops,
            gpu.measured_tflops,
            f"published matmuls of {gpu.product}",
        )
    if gpu.sheet_tflops is not None and gpu.matmul_tflops is not None:
        return Range(
            0.7 * gpu.sheet_tflops,
            gpu.matmul_tflops,
            0.87 * gpu.sheet_tflops,
            f"data sheet of {gpu.product}, of which matmuls reach 70 to 87 %",
        )
    raise ValueError(
        f"cluster.matmul_tflops: missing, and the table of GPUs has no speed of {gpu.product};"
        " measure it with `hybrid audit --json audit.json` and pass --audit audit.json"
    )
