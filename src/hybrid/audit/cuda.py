"""One NVIDIA GPU behind the probe interface: torch, and kernels of our own where need be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid.audit import cuda_kernels
from hybrid.audit.device import Link, Load, NotOnThisDevice, cycle, make_operands
from hybrid.audit.reading import Scalar

_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_LINE = 128  # bytes of an L2 line
# nvmlClocksEventReasons of nvml.h; idle and the application's own clock settings throttle nothing.
_REASONS = {
    0x0004: "software power cap",
    0x0008: "hardware slowdown",
    0x0020: "software thermal slowdown",
    0x0040: "hardware thermal slowdown",
    0x0080: "hardware power brake",
}


class CudaDevice:
    """GPU `index`, as CUDA numbers them (set CUDA_DEVICE_ORDER=PCI_BUS_ID for NVML's order)."""

    kind = "cuda"
    largest = 16384

    def __init__(self, index: int) -> None:
        self.index: int | None = index
        self.place = torch.device("cuda", index)
        torch.cuda.set_device(self.place)
        properties: Any = torch.cuda.get_device_properties(self.place)
        self._properties = properties
        numbers = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        self.bus_id = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
        self._nvml = _nvml_handle(self.bus_id)
        self._chase: cuda_kernels.Kernel | None = None
        self._table: torch.Tensor | None = None

    def attributes(self) -> dict[str, Scalar]:
        """cudaDeviceProp's own words."""
        p = self._properties
        return {
            "name": p.name,
            "compute_capability": f"{p.major}.{p.minor}",
            "sm_count": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "l2_bytes": p.L2_cache_size,
            "uuid": str(p.uuid),
            "pci_bus_id": self.bus_id,
        }

    def synchronize(self) -> None:
        """cudaDeviceSynchronize."""
        torch.cuda.synchronize(self.place)

    def memory(self) -> tuple[int, int]:
        """cudaMemGetInfo."""
        free, total = torch.cuda.mem_get_info(self.place)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory."""
        return torch.empty(nbytes // 8, dtype=torch.int64, device=self.place)

    def release(self) -> None:
        """Empty torch's cache, and ours."""
        self._table = None
        torch.cuda.empty_cache()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """cudaHostAlloc."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous where the host's side is pinned."""
        to.copy_(source, non_blocking=True)

    def operands(self, kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp8's second operand is column-major, as cuBLASLt asks."""
        a, b = make_operands(self.place, kind, rows)
        return (a, b.t().contiguous().t()) if kind == "fp8" else (a, b)

    def matmul(self, a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
        """cuBLAS; a kind that the hardware lacks raises NotOnThisDevice."""
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        try:
            if kind == "fp8":
                one = torch.ones((), device=self.place)
                return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
            return torch._int_mm(a, b) if kind == "int8" else a @ b
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            text = str(e).lower()
            if kind in ("fp8", "int8") and ("support" in text or "compute capability" in text):
                raise NotOnThisDevice(str(e).splitlines()[0]) from None
            raise

    def units(self) -> Sequence[int]:
        """Every `%smid` that one of 16,384 long blocks ran on. Ids need not be contiguous."""
        kernel = cuda_kernels.compile_kernel(cuda_kernels.COVERAGE, "coverage")
        seen = torch.zeros(cuda_kernels.MAX_SM_ID, dtype=torch.int32, device=self.place)
        kernel(grid=(16384, 1, 1), block=(32, 1, 1), args=[seen, 50_000])
        self.synchronize()
        return [int(i) for i in seen.nonzero().flatten().tolist()]

    def load_latency(self, footprint: int, loads: int) -> float:
        """One thread follows a random cycle over L2 lines, past L1."""
        if self._chase is None:
            self._chase = cuda_kernels.compile_kernel(cuda_kernels.CHASE, "chase")
        if self._table is None or self._table.nbytes != footprint:
            self._table = cycle(footprint // 4, torch.int32, stride=_LINE // 4).to(self.place)
        table = self._table
        at = torch.zeros(1, dtype=torch.int32, device=self.place)
        one = {"grid": (1, 1, 1), "block": (1, 1, 1)}
        table.sum()
        self._chase(**one, args=[table, at, loads // 4])
        self.synchronize()
        start = time.perf_counter()
        self._chase(**one, args=[table, at, loads])
        self.synchronize()
        return (time.perf_counter() - start) / loads

    def capability(self) -> str | None:
        """The newest compute capability of which a binary runs here."""
        found = [
            c for c in cuda_kernels.ARCHITECTURES if cuda_kernels.runs_binary_of(c, self.place)
        ]
        return found[-1] if found else None

    def link(self) -> Link | None:
        """From sysfs, which needs no library; else from NVML."""
        folder = Path("/sys/bus/pci/devices") / self.bus_id
        try:
            speed = (folder / "current_link_speed").read_text().split()
            width = (folder / "current_link_width").read_text().strip()
        except OSError:
            speed, width = [], ""
        if speed and speed[0] in _GENERATIONS and width.isdecimal():
            return Link(_GENERATIONS[speed[0]], int(width), "sysfs")
        if self._nvml is None:
            return None
        import pynvml

        try:
            return Link(
                int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(self._nvml)),
                int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(self._nvml)),
                "nvml",
            )
        except pynvml.NVMLError:
            return None

    def load(self) -> Load | None:
        """NVML's power, SM clock, temperature and reasons to throttle."""
        if self._nvml is None:
            return None
        import pynvml

        handle = self._nvml

        def ask(name: str, *more: int) -> int | None:
            try:
                return int(getattr(pynvml, name)(handle, *more))
            except pynvml.NVMLError:
                return None

        power = ask("nvmlDeviceGetPowerUsage")
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Load(
            power_w=None if power is None else power / 1000,
            clock_mhz=ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            temperature_c=ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            throttled_by=None
            if reasons is None
            else tuple(text for bit, text in _REASONS.items() if reasons & bit),
            source="nvml",
        )

    def peers(self) -> Sequence[torch.device]:
        """All other GPUs that this process sees, from the next one on."""
        count, own = torch.cuda.device_count(), self.index or 0
        return [torch.device("cuda", (own + n) % count) for n in range(1, count)]

    def reachable_directly(self, peer: torch.device) -> bool:
        """cudaDeviceCanAccessPeer."""
        return torch.cuda.can_device_access_peer(self.place, peer)


def _nvml_handle(bus_id: str) -> Any:
    """NVML's handle of the GPU on a bus; None where its Python package or library is not there."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
    except pynvml.NVMLError:
        return None
