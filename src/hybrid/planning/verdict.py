"""What bounds a step: compute, memory, communication, input or the host, by its ranks' traces.

A rank that is slow makes the others wait in the next collective, which then looks like
communication. So each step is judged on the rank that waited least in it: what that rank does
otherwise is what the step waits for. How long the others waited for it is told as imbalance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid.errors import DataError
from hybrid.planning.trace import RankTrace, StepTime

Bound = Literal["compute", "memory", "communication", "input", "host"]
MUCH = 0.25
"""A share of a step from which a wait is called a cause even where compute takes longer."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    """Something to try: its name, what it is and why.

    Attributes:
        settings: what `--try` sets: dotted keys of hybrid.yaml to a value, or to "x2": twice what
            it is. Empty where no key does it.
    """

    name: str
    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What bounds the steps.

    Attributes:
        shares: of a step's time, by what it went to; they add up to one.
        seconds: of a step, the median.
        overlap: share of the communication that compute hides; None where there was none.
        imbalance: share of a step that ranks wait for the slowest, on average.
        evidence: sentences with figures.
    """

    bound: Bound
    shares: dict[str, float]
    seconds: float
    overlap: float | None
    imbalance: float
    evidence: tuple[str, ...]
    knobs: tuple[Knob, ...]
    warnings: tuple[str, ...]


def judge(ranks: Sequence[RankTrace]) -> Verdict:
    """The verdict on the steps that all `ranks` were traced in.

    Raises:
        DataError: no ranks, one twice, or no step in common.
    """
    if not ranks:
        raise DataError("profile: there are no traces to judge")
    twice = {t.rank for t in ranks if [r.rank for r in ranks].count(t.rank) > 1}
    if twice:
        raise DataError(f"profile: rank {min(twice)} was given twice")
    common = set.intersection(*({s.step for s in t.steps} for t in ranks))
    if not common:
        raise DataError("profile: the traces have no step in common: are they of one run?")
    steps = [[s for t in ranks for s in t.steps if s.step == n] for n in sorted(common)]
    critical = [min(of_step, key=lambda s: s.exposed) for of_step in steps]
    seconds = sum(s.seconds for s in critical)
    shares = {
        "matmul": _share(critical, lambda s: s.matmul),
        "other compute": _share(critical, lambda s: s.compute - s.matmul),
        "exposed communication": _share(critical, lambda s: s.exposed),
        "memory copies": _share(critical, lambda s: s.copies),
        "input": _share(critical, lambda s: s.input_wait),
        "host": _share(critical, lambda s: s.host_wait + s.idle - s.input_wait),
    }
    every = [s for of_step in steps for s in of_step]
    talked = sum(s.communication for s in every)
    waited = [s.exposed - c.exposed for of, c in zip(steps, critical, strict=True) for s in of]
    imbalance = sum(waited) / len(ranks) / seconds if seconds else 0.0
    bound = _bound(shares)
    overlap = sum(s.overlapped for s in every) / talked if talked else None
    warnings = [f"rank {t.rank}: {w}" for t in ranks for w in t.warnings]
    missing = ranks[0].world_size - len(ranks)
    if missing > 0:
        warnings.append(
            f"traces of {missing} of {ranks[0].world_size} ranks are missing: who waits for whom"
            " cannot be told from the rest"
        )
    return Verdict(
        bound=bound,
        shares=shares,
        seconds=statistics.median(s.seconds for s in critical),
        overlap=overlap,
        imbalance=imbalance,
        evidence=tuple(_evidence(bound, shares, overlap, imbalance, ranks)),
        knobs=KNOBS[bound],
        warnings=tuple(warnings),
    )


def _share(steps: Sequence[StepTime], of: Callable[[StepTime], float]) -> float:
    total = sum(s.seconds for s in steps)
    return sum(of(s) for s in steps) / total if total else 0.0


def _bound(shares: dict[str, float]) -> Bound:
    """A wait that takes much of the step bounds it, the longest first; else what is computed."""
    waits: dict[Bound, float] = {
        "communication": shares["exposed communication"],
        "input": shares["input"],
        "host": shares["host"],
    }
    moved = shares["other compute"] + shares["memory copies"]
    worst = max(waits, key=lambda bound: waits[bound])
    if waits[worst] >= MUCH and waits[worst] >= min(shares["matmul"], MUCH * 2):
        return worst
    if waits[worst] > shares["matmul"] + moved:
        return worst
    return "compute" if shares["matmul"] >= moved else "memory"


def _evidence(
    bound: Bound,
    shares: dict[str, float],
    overlap: float | None,
    imbalance: float,
    ranks: Sequence[RankTrace],
) -> list[str]:
    told = ", ".join(f"{name} {100 * s:.0f} %" for name, s in shares.items() if s >= 0.005)
    found = [f"a step goes to: {told}"]
    moved = shares["other compute"] + shares["memory copies"]
    if bound == "compute":
        found.append(
            f"products of matrices take {100 * shares['matmul']:.0f} % of the step and all other"
            f" work on tensors {100 * moved:.0f} %"
        )
    elif bound == "memory":
        found.append(
            f"work that moves memory more than it multiplies takes {100 * moved:.0f} % of the step,"
            f" products of matrices {100 * shares['matmul']:.0f} %"
        )
    elif bound == "communication":
        kinds: dict[str, float] = {}
        for trace in ranks:
            for kind, seconds in trace.collectives.items():
                kinds[kind] = kinds.get(kind, 0.0) + seconds
        longest = max(kinds, key=lambda kind: kinds[kind])
        found.append(
            f"{100 * (overlap or 0):.0f} % of the communication is hidden behind compute; most of"
            f" it is {longest}"
        )
    elif bound == "input":
        found.append(
            f"for {100 * shares['input']:.0f} % of the step nothing is computed while a batch is"
            " made"
        )
    else:
        found.append(
            f"for {100 * shares['host']:.0f} % of the step nothing is computed, sent or copied: the"
            " program between the ops (Python, launches, synchronisation) is what is waited for"
        )
    if imbalance > 0.05:
        found.append(
            f"ranks wait for the slowest of them for {100 * imbalance:.0f} % of a step, which looks"
            " like communication on those that wait"
        )
    device = ranks[0].device
    if ops := ranks[0].ops:
        name, seconds, calls = ops[0]
        found.append(
            f"the longest {'kernel' if device else 'op'} is {name[:80]}: {1e3 * seconds:.1f} ms in"
            f" {calls} calls on rank {ranks[0].rank}"
        )
    return found


_BATCH = Knob(
    name="batch",
    text="double training.micro_batch: more work between two exchanges, launches and looks at data",
    settings={"training.micro_batch": "x2"},
)
_ACCUMULATE = Knob(
    name="accumulation",
    text="double training.micro_batches: gradients are exchanged once for twice the tokens",
    settings={"training.micro_batches": "x2"},
)
_DDP = Knob(
    name="ddp",
    text="training.strategy: ddp, where the model fits one device: no parameters to gather",
    settings={"training.strategy": "ddp"},
)
_PRECISION = Knob(
    name="bfloat16",
    text="training.precision: bfloat16: half the bytes, and tensor cores",
    settings={"training.precision": "bfloat16"},
)
_THREADS = Knob(
    name="cpus",
    text="double training.cpus_per_worker: more threads for ops on the CPU and for data",
    settings={"training.cpus_per_worker": "x2"},
)
_COMPILE = Knob(
    name="compile",
    text="compile the model: fewer and larger kernels, element-wise work fused into one pass",
    settings={"training.parallel.compile": True},
)
_COMPRESSION = Knob(
    name="compression",
    text="send gradients in fewer bits",
    settings={"training.compression.kind": "bf16"},
)
_RECOMPUTE = Knob(
    name="activation checkpointing",
    text="keep only what backward needs most, where that makes room for a larger micro-batch",
    settings={
        "training.parallel.activation_checkpointing": "selective",
        "training.micro_batch": "x2",
    },
)
_TENSOR = Knob(
    name="tensor parallelism",
    text="split matrices over the GPUs of one node: what talks most stays on the fastest links",
)
_PREFETCH = Knob(
    name="prefetch",
    text="make the next batches while this one trains, in other threads or processes; put the"
    " shards on a local disk",
)
_SYNCHRONISE = Knob(
    name="synchronisation", text="look for .item(), .cpu() and prints within the step"
)
_NETWORK = Knob(
    name="network",
    text="see that RDMA or the fast interface is used: NCCL_DEBUG=INFO, `hybrid audit`",
)
_WORKERS = Knob(
    name="workers", text="the devices are busy: more of them is what helps (`hybrid scale`)"
)
KNOBS: dict[Bound, tuple[Knob, ...]] = {
    "compute": (_PRECISION, _BATCH, _COMPILE, _TENSOR, _WORKERS),
    "memory": (_PRECISION, _COMPILE, _BATCH, _RECOMPUTE),
    "communication": (_ACCUMULATE, _BATCH, _COMPRESSION, _DDP, _TENSOR, _NETWORK),
    "input": (_PREFETCH, _THREADS, _BATCH),
    "host": (_BATCH, _COMPILE, _SYNCHRONISE, _THREADS),
}
"""What to try for each, the likeliest to help first."""
