"""How thorough an audit is: `quick` ends within a minute, `full` takes what certainty takes."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.audit.timing import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class Level:
    """Budgets of an audit. Seconds, bytes and counts; plain data that travels to the nodes.

    Attributes:
        name: "quick" or "full".
        probe_s: seconds after which a probe is killed, and that is the finding.
        work_s: seconds spent on each kind of product, copy or stream.
        host_memory: bytes of host memory touched at most.
        cpu_chunk, gpu_chunk: bytes of one timed chunk of memory.
        gpu_memory: share of a GPU's memory that is written and read back.
        latency_loads: dependent loads timed at each footprint.
        peers: GPUs of its node that each GPU copies to, from the next one on.
        disk: bytes written and read.
        products: matrix products of one challenge on a GPU; a CPU does `cpu_products`.
        repeats: challenges with a common seed, for bit-exactness.
        reduce_bytes: sizes of the all-reduce sweep on GPUs; CPUs stop at `cpu_reduce_bytes`.
        reduce_s: seconds spent on each size at most.
    """

    name: str
    probe_s: float
    work_s: float
    host_memory: int
    cpu_chunk: int
    gpu_chunk: int
    gpu_memory: float
    latency_loads: int
    peers: int
    disk: int
    products: int
    cpu_products: int
    repeats: int
    reduce_bytes: tuple[int, ...]
    cpu_reduce_bytes: int
    reduce_s: float


QUICK = Level(
    name="quick",
    probe_s=20.0,
    work_s=0.25,
    host_memory=128 * MIB,
    cpu_chunk=8 * MIB,
    gpu_chunk=512 * MIB,
    gpu_memory=0.95,
    latency_loads=50_000,
    peers=1,
    disk=32 * MIB,
    products=64,
    cpu_products=8,
    repeats=2,
    reduce_bytes=tuple(2**n * MIB for n in range(0, 11, 2)),
    cpu_reduce_bytes=16 * MIB,
    reduce_s=0.3,
)
FULL = Level(
    name="full",
    probe_s=180.0,
    work_s=3.0,
    host_memory=2 * GIB,
    cpu_chunk=16 * MIB,
    gpu_chunk=512 * MIB,
    gpu_memory=0.95,
    latency_loads=400_000,
    peers=64,
    disk=512 * MIB,
    products=1024,
    cpu_products=64,
    repeats=8,
    reduce_bytes=tuple(2**n * MIB for n in range(11)),
    cpu_reduce_bytes=128 * MIB,
    reduce_s=3.0,
)
LEVELS = {"quick": QUICK, "full": FULL}
