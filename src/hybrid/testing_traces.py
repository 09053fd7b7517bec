"""Traces of GPU steps whose every microsecond is known, written as PyTorch's profiler writes them.

For tests and for comparisons with other readers of such traces: one file a rank, with steps marked
on the host, kernels and copies on streams, and for each the op and the call that launched it,
linked by a correlation id (https://pytorch.org/docs/stable/profiler.html; the events are Kineto's).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
)
READ = "Memcpy HtoD (Pinned -> Device)"
WRITE = "Memcpy DtoH (Device -> Pageable)"
FILL = "Memset (Device)"
WAIT = "cudaStreamSynchronize"
NCCL = (
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",  # 2.7
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",  # 2.10
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",  # 2.20
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(ncclSymkDevWorkArgs4K)",  # 2.27
)
"""The kernel of a ring's or tree's all-reduce, by NCCL's version."""
SYMMETRIC = (
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
)
"""The kernel of PyTorch's all-reduce over symmetric memory."""
COMPUTE, OTHER, TALK, COPY = 7, 13, 20, 21
"""Streams."""
HOST_PID, HOST_TID = 4000, 4001
BEGIN = 1_000_000
"""Where the first step begins, in µs."""

Piece = tuple[str, float, float, int]
"""What happens in a step: its name, start and end in µs from the step's start, and its stream.

The name `collective` becomes a kernel of the shape's collectives; on stream 0 it is the host's, a
call where it is `WAIT`, else a range.
"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a step goes to, in µs, as `hybrid.planning.trace.StepTime` names it."""

    compute: float
    exposed: float = 0.0
    overlapped: float = 0.0
    copies: float = 0.0
    host_wait: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A run whose steps are all alike, rank by rank.

    Attributes:
        ranks: what happens in a step of each.
        answers: what a step of each goes to.
        collectives: names of the kernels that talk, one a step in turn.
        steps: how many.
        step_us: how long one takes.
        lead_us: how long before it starts a kernel is launched; the host's op takes half of that.
    """

    name: str
    ranks: tuple[tuple[Piece, ...], ...]
    answers: tuple[Answer, ...]
    collectives: tuple[str, ...] = NCCL
    steps: int = 4
    step_us: float = 1000
    lead_us: float = 20

    def events(self, rank: int) -> list[dict[str, Any]]:
        """The trace's events of a rank."""
        found: list[dict[str, Any]] = []
        ids = iter(range(1, 1 << 40))
        for number in range(self.steps):
            start = BEGIN + number * self.step_us
            name = f"ProfilerStep#{number}"
            found.append(_host("user_annotation", name, start, start + self.step_us))
            talk = self.collectives[number % len(self.collectives)]
            for piece, begin, end, stream in self.ranks[rank]:
                at, until = start + begin, start + end
                if not stream:
                    cat = "cuda_runtime" if piece == WAIT else "user_annotation"
                    found.append(_host(cat, piece, at, until))
                    continue
                name = talk if piece == "collective" else piece
                found.extend(_launched(name, at, until, stream, next(ids), self.lead_us))
        return found

    def write(self, folder: Path) -> list[Path]:
        """One file a rank in `folder`, gzipped."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"rank-{rank}.json.gz" for rank in range(len(self.ranks))]
        for rank, path in enumerate(paths):
            write_trace(path, self.events(rank), rank, len(self.ranks))
        return paths


def write_trace(path: Path, events: Sequence[dict[str, Any]], rank: int, size: int) -> None:
    """A gzipped trace: what the file says of the run, then an event a line."""
    about = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(event) for event in events)
    text = f'{head},\n "traceEvents": [\n{lines}\n]}}\n'
    path.write_bytes(gzip.compress(text.encode(), compresslevel=1))


def _host(cat: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST_PID, "tid": HOST_TID, "ts": start,
            "dur": end - start, "args": args}  # fmt: skip


def _launched(
    name: str, start: float, end: float, stream: int, number: int, lead: float
) -> Iterator[dict[str, Any]]:
    """Work of the device, and what of the host launched it."""
    cat, call, op = "kernel", "cudaLaunchKernel", "aten::mm" if name == GEMM else "aten::add"
    if name.startswith("Memcpy"):
        cat, call, op = "gpu_memcpy", "cudaMemcpyAsync", "aten::copy_"
    elif name.startswith("Memset"):
        cat, call, op = "gpu_memset", "cudaMemsetAsync", "aten::zero_"
    elif stream == TALK:
        call, op = "cudaLaunchKernelExC", "c10d::allreduce_"
    at, link = start - lead, {"External id": number, "correlation": number}
    yield _host("cpu_op", op, at, at + lead / 2, **{"External id": number})
    yield _host("cuda_runtime", call, at + lead / 10, at + lead * 4 / 10, **link)
    flow = {"cat": "ac2g", "name": "ac2g", "id": number}
    yield {"ph": "s", "pid": HOST_PID, "tid": HOST_TID, "ts": at + lead / 10, **flow}
    yield {"ph": "f", "pid": 0, "tid": stream, "ts": start, "bp": "e", **flow}
    where = {"ph": "X", "pid": 0, "tid": stream, "ts": start, "dur": end - start}
    yield {"cat": cat, "name": name, "args": {"device": 0, "stream": stream, **link}, **where}
    if stream == TALK:  # the kernel's time told once more
        told = {"External id": number}
        yield {"cat": "gpu_user_annotation", "name": "nccl:all_reduce", "args": told, **where}


def _on(stream: int, *pieces: tuple[str, float, float]) -> tuple[Piece, ...]:
    return tuple((name, start, end, stream) for name, start, end in pieces)


SHAPES = (
    Shape(
        name="no communication",
        ranks=(
            _on(COMPUTE, (GEMM, 0, 600), (ELEMENTWISE, 600, 1000)),
            _on(COMPUTE, (GEMM, 0, 300), (ELEMENTWISE, 500, 1000)),
        ),
        answers=(Answer(compute=1000), Answer(compute=800, host_wait=10, idle=190)),
    ),
    Shape(
        name="communication hidden",
        ranks=(
            _on(COMPUTE, (GEMM, 0, 1000))
            + _on(TALK, ("collective", 200, 500), ("collective", 600, 800)),
            _on(COMPUTE, (GEMM, 0, 500), (GEMM, 500, 1000)) + _on(TALK, ("collective", 100, 900)),
        ),
        answers=(Answer(compute=1000, overlapped=500), Answer(compute=1000, overlapped=800)),
    ),
    Shape(
        name="communication exposed",
        ranks=(
            _on(COMPUTE, (GEMM, 0, 600)) + _on(TALK, ("collective", 600, 1000)),
            _on(COMPUTE, (GEMM, 0, 300)) + _on(TALK, ("collective", 300, 1000)),
        ),
        answers=(Answer(compute=600, exposed=400), Answer(compute=300, exposed=700)),
    ),
    Shape(
        name="partly hidden",
        ranks=(
            # Talk 400..850 is behind compute at 400..500 and 700..850.
            _on(COMPUTE, (GEMM, 0, 500), (GEMM, 700, 900), (ELEMENTWISE, 950, 1000))
            + _on(TALK, ("collective", 400, 800), ("collective", 800, 850)),
            # Two streams compute: 0..800; talk 700..1000.
            _on(COMPUTE, (GEMM, 0, 500))
            + _on(OTHER, (ELEMENTWISE, 300, 800))
            + _on(TALK, ("collective", 700, 1000)),
        ),
        answers=(
            Answer(compute=750, exposed=200, overlapped=250, host_wait=10, idle=40),
            Answer(compute=800, exposed=200, overlapped=100),
        ),
    ),
    Shape(
        name="waits",
        ranks=(
            # A batch is made 200..500; at 700..900 the host sleeps in a call, then launches.
            _on(COMPUTE, (GEMM, 0, 200), (GEMM, 500, 700), (ELEMENTWISE, 900, 1000))
            + _on(0, ("data", 200, 500), (WAIT, 600, 870)),
            _on(COMPUTE, (GEMM, 0, 100), (GEMM, 900, 1000)) + _on(0, ("optimizer", 100, 900)),
        ),
        answers=(
            Answer(compute=500, host_wait=310, idle=190),
            Answer(compute=200, host_wait=800),
        ),
    ),
    Shape(
        name="copies",
        ranks=(
            # Read 300..500 beside compute; written 550..750, of it 600..700 alone.
            _on(COMPUTE, (GEMM, 0, 600), (GEMM, 900, 1000))
            + _on(COPY, (READ, 300, 500), (WRITE, 550, 750))
            + _on(TALK, ("collective", 700, 900)),
            _on(COMPUTE, (GEMM, 100, 1000)) + _on(COPY, (READ, 0, 80), (FILL, 80, 120)),
        ),
        answers=(
            Answer(compute=700, exposed=200, copies=100),
            Answer(compute=900, copies=100),
        ),
    ),
    Shape(
        name="late start",
        # The device begins after the step does, and ends before it: idle at both ends of a trace.
        ranks=(
            _on(COMPUTE, (GEMM, 60, 560)) + _on(TALK, ("collective", 460, 900)),
            _on(COMPUTE, (GEMM, 60, 960)) + _on(TALK, ("collective", 500, 900)),
        ),
        answers=(
            Answer(compute=500, exposed=340, overlapped=100, host_wait=10, idle=150),
            Answer(compute=900, overlapped=400, host_wait=10, idle=90),
        ),
    ),
)
"""What every reader should agree on; times in whole µs."""

SHORT_KERNELS = Shape(
    name="short kernels, in nanoseconds",
    # 250 kernels of 2.4 µs, every other one half a µs late; of each second gap the host's op, which
    # takes 1.5 µs from 3 before its kernel, has 0.6.
    ranks=(
        tuple((ELEMENTWISE, 4 * i + i % 2 / 2, 4 * i + i % 2 / 2 + 2.4, COMPUTE)
              for i in range(250)),
    ),
    answers=(Answer(compute=600, host_wait=75, idle=325),),
    lead_us=3,
)  # fmt: skip
OTHER_NAMES = Shape(
    name="communication over symmetric memory",
    ranks=(
        _on(COMPUTE, (GEMM, 0, 600)) + _on(TALK, ("collective", 500, 1000)),
        _on(COMPUTE, (GEMM, 0, 900)) + _on(TALK, ("collective", 800, 1000)),
    ),
    answers=(
        Answer(compute=600, exposed=400, overlapped=100),
        Answer(compute=900, exposed=100, overlapped=100),
    ),
    collectives=SYMMETRIC,
)
HARD_SHAPES = (SHORT_KERNELS, OTHER_NAMES)
"""What a reader gets wrong that rounds to whole µs, or that knows NCCL's names only."""


def big(kernels: int) -> Shape:
    """Two ranks of four steps with so many kernels each in all; five events a kernel or more.

    Every tenth kernel talks, half of it behind the next one; it has no answers.
    """
    pieces: list[Piece] = []
    for i in range(kernels // 4):
        at = 10 * i
        if i % 10 == 9:
            pieces.append(("collective", at, at + 12.5, TALK))
        else:
            pieces.append((GEMM if i % 3 else ELEMENTWISE, at, at + 8.25, COMPUTE))
    ranks = (tuple(pieces), tuple(pieces))
    return Shape(name="big", ranks=ranks, answers=(), step_us=10 * (kernels // 4) + 5, lead_us=6)
