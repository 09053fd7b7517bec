"""The probe interface: what the audit asks of a device, and how the CPU answers it.

`CudaDevice` (cuda.py) and `CpuDevice` offer the same operations, so that every probe, challenge
and collective runs unchanged on both; a test's lying device overrides one of them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from hybrid.audit import cpu, host
from hybrid.audit.reading import Scalar
from hybrid.errors import ConfigError

KINDS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""Kinds of matrix product. `fp32` is without TF32."""
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class NotOnThisDevice(Exception):
    """The device has no such operation; for a reading that is unknown, not wrong."""


@dataclass(frozen=True)
class Link:
    """The PCIe link as it is trained at this moment."""

    generation: int | None
    width: int | None
    source: str


@dataclass(frozen=True)
class Load:
    """What a device draws and does at this moment; what cannot be read is None."""

    power_w: float | None
    clock_mhz: float | None
    temperature_c: float | None
    throttled_by: tuple[str, ...] | None
    source: str


class Device(Protocol):
    """One accelerator, or the host's CPU in its place.

    Attributes:
        kind: "cuda" or "cpu".
        index: of the GPU on its node; None for the CPU.
        place: where tensors are made.
        largest: the most rows of a square product that makes sense here.
    """

    kind: str
    index: int | None
    place: torch.device
    largest: int

    def attributes(self) -> dict[str, Scalar]:
        """What the library says it is: names and numbers that nobody has measured."""

    def synchronize(self) -> None:
        """Return once everything that was queued is done."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """int64 [nbytes / 8], uninitialised. Raises torch.OutOfMemoryError or MemoryError."""

    def release(self) -> None:
        """Give back what freed tensors still hold."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of page-locked host memory."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, or on it."""

    def operands(self, kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [rows, rows] matrices of small numbers for `matmul`."""

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        """a [m, k] @ b [k, n]. Raises NotOnThisDevice."""

    def units(self) -> Sequence[int]:
        """The ids of the SMs (or cores) that a flood of work was seen on, sorted."""

    def load_latency(self, footprint: int, loads: int) -> float:
        """Seconds of one dependent load at random in a table of `footprint` bytes."""

    def capability(self) -> str | None:
        """The compute capability that binaries show; None where there is no such thing."""

    def link(self) -> Link | None:
        """The PCIe link now; None where there is none."""

    def load(self) -> Load | None:
        """Power and clocks now; None where nothing tells."""

    def peers(self) -> Sequence[torch.device]:
        """Other devices of this node that it can copy to."""

    def reachable_directly(self, peer: torch.device) -> bool:
        """Whether copies go from device to device, and not through the host."""


class CpuDevice:
    """The host's CPU: the same operations by their CPU counterparts."""

    kind = "cpu"
    index: int | None = None
    largest = 2048

    def __init__(self) -> None:
        self.place = torch.device("cpu")

    def attributes(self) -> dict[str, Scalar]:
        """The kernel's own words."""
        return {"name": "cpu", "sm_count": host.online_cores(), "memory_bytes": self.memory()[1]}

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def memory(self) -> tuple[int, int]:
        """Available and total bytes, within the limits of the cgroup."""
        limits = [m for m in (host.memory_total(), host.memory_limit()) if m is not None]
        return host.memory_available() or 0, min(limits, default=0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Pages that exist once they are written."""
        return torch.empty(nbytes // 8, dtype=torch.int64)

    def release(self) -> None:
        """The allocator gave it back already."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory: there is no link that could ask for more."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A copy in memory."""
        to.copy_(source)

    def operands(self, kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Small whole numbers, exact in every kind."""
        return make_operands(self.place, kind, rows)

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        """torch's product; what has no real implementation on CPUs is refused."""
        if kind in ("tf32", "fp8"):
            raise NotOnThisDevice(f"{kind} products on a CPU")
        return torch._int_mm(a, b) if kind == "int8" else a @ b

    def units(self) -> Sequence[int]:
        """The cores that spinning threads ran on."""
        return cpu.cores_seen(seconds=0.2)

    def load_latency(self, footprint: int, loads: int) -> float:
        """Many chains side by side, for one at a time would measure Python."""
        chains, line = 1024, 8  # words of 8 bytes
        table = cycle(footprint // 8, torch.int64, stride=line)
        at = torch.arange(chains) * (len(table) // chains // line * line)
        table.sum()  # into whatever caches it fits
        start = time.perf_counter()
        for _ in range(max(1, loads // chains)):
            at = table[at]
        return (time.perf_counter() - start) / (max(1, loads // chains) * chains)

    def capability(self) -> str | None:
        """None: of GPUs only."""
        return None

    def link(self) -> Link | None:
        """None: a CPU hangs on no link."""
        return None

    def load(self) -> Load | None:
        """The clock of the first core, where the kernel tells."""
        mhz = cpu.clock_mhz()
        if mhz is None:
            return None
        return Load(
            power_w=None,
            clock_mhz=mhz,
            temperature_c=None,
            throttled_by=None,
            source="/proc/cpuinfo",
        )

    def peers(self) -> Sequence[torch.device]:
        """None."""
        return ()

    def reachable_directly(self, peer: torch.device) -> bool:
        """There is no peer to reach."""
        return False


def make_operands(device: torch.device, kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [rows, rows] matrices of whole numbers in [-4, 4], exact in every kind."""
    generator = torch.Generator(device=device).manual_seed(rows)
    shape = (rows, rows)
    a, b = (
        torch.randint(-4, 5, shape, generator=generator, device=device).to(torch.float32)
        for _ in range(2)
    )
    return a.to(DTYPES[kind]), b.to(DTYPES[kind])


def cycle(length: int, dtype: torch.dtype, stride: int = 1) -> torch.Tensor:
    """A table of which following `at = table[at]` visits every `stride`-th place once, at random.

    [length], on the CPU: one random cycle, made by linking a random order (Sattolo's result).
    """
    places = torch.randperm(length // stride, generator=torch.Generator().manual_seed(1)) * stride
    table = torch.zeros(length, dtype=dtype)
    table[places] = torch.roll(places, -1).to(dtype)
    return table


def open_device(spec: str) -> Device:
    """The device that a word names: `cpu`, `cuda:N`, or `module:Class` for one of your own.

    Raises:
        ConfigError: the word names none, or it is not there.
    """
    if spec == "cpu":
        return CpuDevice()
    if spec.startswith("cuda:") and spec[5:].isdecimal():
        from hybrid.audit.cuda import CudaDevice

        return CudaDevice(int(spec[5:]))
    module, colon, name = spec.partition(":")
    try:
        if not colon:
            raise ImportError("expected cpu, cuda:N or module:Class")
        return cast(Device, getattr(importlib.import_module(module), name)())
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"audit device {spec!r}: {e}") from None
