"""The CUDA kernels of the audit, and the only place that touches torch's private compiler for them.

An attribute is not a measurement: how many SMs there are is asked of the SMs (`%smid`), how large
the L2 is of the time a dependent load takes, and the compute capability of which binaries run.
`torch.cuda._compile_kernel` compiles with NVRTC, which comes with torch: no nvcc is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0")
"""Compute capabilities that are tried, oldest first."""

COVERAGE = r"""
extern "C" __global__ void coverage(unsigned int* seen, int cycles) {
    if (threadIdx.x != 0) return;
    unsigned int id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    atomicAdd(seen + (id & 4095), 1u);
    long long start = clock64();
    // Long enough that all blocks of a wave are there at once, so that no SM stays empty.
    while (clock64() - start < cycles) { }
}
"""

CHASE = r"""
extern "C" __global__ void chase(const unsigned int* next, unsigned int* end, int loads) {
    unsigned int at = *end;
    for (int i = 0; i < loads; ++i) {
        // Cached in L2 only: L1 would hide what is measured.
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at) : "memory");
    }
    *end = at;
}
"""

ECHO = r"""
extern "C" __global__ void echo(unsigned int* out) {
    out[0] = __CUDA_ARCH__;
}
"""
MAX_SM_ID = 4096

Kernel = Callable[..., None]


def compile_kernel(source: str, name: str, capability: str | None = None) -> Kernel:
    """A kernel that is called with grid, block and args (tensors, and ints of 32 bits).

    Args:
        source: CUDA C++ with `extern "C"` kernels.
        name: the kernel's name.
        capability: e.g. "8.6"; None: that of the current device.

    Raises:
        RuntimeError: it does not compile, or its binary cannot be loaded on this device.
        OSError: there is no NVRTC.
    """
    without_toolkit()
    architecture = capability.replace(".", "") if capability else None
    compiled: Kernel = torch.cuda._compile_kernel(source, name, compute_capability=architecture)
    return compiled


def without_toolkit() -> None:
    """Let torch's compiler work on a node that has the driver and torch's wheels, and no toolkit.

    It asks for the toolkit's include folder, though our kernels include nothing; and it loads NVRTC
    by name alone, which finds what is loaded already but not what lies in a wheel's folder.
    """
    here = Path(torch.__file__).parent
    if cpp_extension.CUDA_HOME is None:
        cpp_extension.CUDA_HOME = str(here)
    candidates = [here / "lib/libcaffe2_nvrtc.so", *here.parent.glob("nvidia/*/lib/libnvrtc.so.*")]
    for library in candidates:
        with contextlib.suppress(OSError):  # torch says which it misses, when it looks for it
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def runs_binary_of(capability: str, device: torch.device) -> bool | None:
    """Whether the device runs machine code made for this compute capability.

    A binary runs on its own major version from its own minor on (CUDA C++ Programming Guide,
    "Binary Compatibility"), so the newest that runs is what the silicon is, whatever the driver
    calls it. None: this NVRTC cannot make such a binary, which says nothing of the device.
    """
    with torch.cuda.device(device):
        try:
            kernel = compile_kernel(ECHO, "echo", capability)
            out = torch.zeros(1, dtype=torch.int32, device=device)
            kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[out])
            torch.cuda.synchronize(device)
        except RuntimeError as e:
            # NVRTC refuses what it does not know before anything reaches the device.
            unknown = "compilation failed" in str(e) or "invalid value for" in str(e)
            return None if unknown or "INVALID_OPTION" in str(e) else False
        major, minor = capability.split(".")
        return int(out.item()) == int(major) * 100 + int(minor) * 10


def private_names() -> dict[str, Any]:
    """Every private name of torch that the audit uses; a test looks for each."""
    return {
        "torch.cuda._compile_kernel": torch.cuda._compile_kernel,
        "torch._scaled_mm": torch._scaled_mm,
        "torch._int_mm": torch._int_mm,
    }
