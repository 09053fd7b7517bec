"""Devices that lie, each about one thing: named to the probe process as `lying_devices:Class`.

They pass themselves off as GPU 0 ("cuda") with the CPU's arithmetic, so that the real probes,
processes and checks run on them.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import torch

from hybrid.audit.device import CpuDevice, NotOnThisDevice
from hybrid.audit.level import QUICK, Level
from hybrid.audit.timing import MIB

TINY = Level(
    **{
        **vars(QUICK),
        "probe_s": 30.0,
        "work_s": 0.02,
        "host_memory": 16 * MIB,
        "cpu_chunk": 2 * MIB,
        "gpu_chunk": 2 * MIB,
        "latency_loads": 2048,
        "disk": 2 * MIB,
        "cpu_products": 2,
        "reduce_bytes": (),  # one process has one process group: see test_cluster.py
    }
)
OTHERS = {"busy", "stolen-time"}
"""Findings that other work makes, on this machine or on its hypervisor: no test decides them."""


class Honest(CpuDevice):
    """A card that is what it says: 64 MiB of memory, real products."""

    kind = "cuda"
    index: int | None = 0
    largest = 512

    def memory(self) -> tuple[int, int]:
        return 62 * MIB, 64 * MIB

    def capability(self) -> str | None:
        return "8.0"

    def load_latency(self, footprint: int, loads: int) -> float:
        hit = min(1.0, 40 * MIB / footprint)
        return (200 * hit + 600 * (1 - hit)) * 1e-9


class HostBacked(Honest):
    """Advertises twice the memory it has: the rest is the host's, behind a slow link."""

    real = 32 * MIB
    link_gib_s = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        chunk = super().allocate(nbytes)
        self.taken += nbytes
        if self.taken > self.real:
            chunk = chunk.as_subclass(SlowTensor)
        return chunk

    def release(self) -> None:
        self.taken = 0


class SlowTensor(torch.Tensor):
    """Memory that is read at the speed of a link."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sum:
            time.sleep(args[0].nbytes / 2**30 / HostBacked.link_gib_s)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Forgetful(Honest):
    """Memory with a bit that sticks: one chunk does not keep what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.chunks += 1
        chunk = super().allocate(nbytes)
        return chunk.as_subclass(StuckTensor) if self.chunks == 4 else chunk


class StuckTensor(torch.Tensor):
    """Words of which one cannot hold a set lowest bit or an unset one for long."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            done = func(*args, **(kwargs or {}))
            if func is torch.Tensor.add_:
                args[0][1234] ^= 1
            return done


class WrongProduct(Honest):
    """Silent corruption: now and then one entry of a product is off by one."""

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        c = super().matmul(a, b, kind)
        c[3, 5] += 1
        return c


class Flaky(Honest):
    """Right at first, wrong in the third run of the same work."""

    runs = 0

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        c = super().matmul(a, b, kind)
        if a.shape[1] != a.shape[0]:  # a challenge's, not a probe's
            Flaky.runs += 1
            c[0, 0] += Flaky.runs % 5 == 0
        return c


class Precomputed(Honest):
    """Answers every challenge with the product it once computed."""

    kept: torch.Tensor | None = None

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        if a.shape[1] == a.shape[0]:
            return super().matmul(a, b, kind)
        if Precomputed.kept is None:
            # The same on every "card": there is but one answer for sale.
            Precomputed.kept = torch.arange(a.shape[0] * b.shape[1], dtype=torch.float32).view(
                a.shape[0], b.shape[1]
            )
        return Precomputed.kept


class OneForAll(Honest):
    """One of several "cards" that are one: each product waits for the only real card's turn."""

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        if a.shape[1] == a.shape[0]:
            return super().matmul(a, b, kind)
        with Path(os.environ["ONE_CARD"]).open("w") as card:
            fcntl.flock(card, fcntl.LOCK_EX)
            time.sleep(0.06)  # what the real card needs for it
            return super().matmul(a, b, kind)


class OlderDie(Honest):
    """A consumer die of compute capability 8.6 under another name: no fp8, little fp64."""

    def capability(self) -> str | None:
        return "8.6"

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "fp8":
            raise NotOnThisDevice("compute capability 8.6")
        if kind == "fp64":
            time.sleep(0.05)
        return super().matmul(a, b, kind)


class Hanging(Honest):
    """Its memory probe never ends."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        time.sleep(3600)
        raise AssertionError


class Crashing(Honest):
    """Takes its process along."""

    def load_latency(self, footprint: int, loads: int) -> float:
        os._exit(139)
