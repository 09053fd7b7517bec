"""Every number that a verdict rests on, with its reason; docs/audit.md shows the same table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Threshold:
    """A number and why it is that one."""

    value: float
    why: str


USABLE_MEMORY = Threshold(
    0.85,
    "share of the product's memory that must keep its content: the probe takes 95 % of what CUDA"
    " offers, which is 1 to 8 % below the printed total (driver, ECC); lesser products have 60 % at"
    " most",
)
MEMORY_EXCESS = Threshold(
    1.02, "usable memory above the printed total of the product is another product's"
)
HOST_CHUNK = Threshold(
    0.35,
    "share of the fastest chunk below which a chunk is not in the device's memory: PCIe gen5 x16"
    " carries 59 GiB/s, a fifth of even a T4's memory",
)
HOST_CHUNK_GIB_S = Threshold(
    70.0, "GiB/s that no PCIe link of today reaches (gen5 x16: 59): slower may be the host's memory"
)
ALIASED_WORDS = Threshold(
    0.01, "share of a chunk's words that are wrong where memory is not there: broken cells are few"
)
BANDWIDTH_EXCESS = Threshold(
    1.08, "share of the nominal memory bandwidth that copies cannot exceed (caches, GiB rounding)"
)
BANDWIDTH_LOW = Threshold(
    0.65,
    "share of the nominal memory bandwidth: genuine cards copy at 0.75 to 0.92; NVIDIA's DCGM"
    " accepts 75 % of what its own test showed",
)
BANDWIDTH_UNFIT = Threshold(0.35, "less than half of the least that genuine cards show")
TENSOR_EXCESS = Threshold(
    1.05, "share of the dense peak by data sheet that products cannot exceed (boost clocks)"
)
TENSOR_LOW = Threshold(
    0.55,
    "share of the dense peak: the best measured are 0.72 to 0.87 (ml-engineering, MAMF), and a"
    " short probe at one size is below the best",
)
TENSOR_UNFIT = Threshold(0.25, "less than half of the least that genuine cards show")
FP32_CRIPPLED = Threshold(
    0.15, "share of the nominal FP32: a CMP 170HX does 0.39 of 19.5 TFLOP/s, by a fuse"
)
FP64_FULL = Threshold(
    0.2,
    "FP64 over FP32: 1/2 or more on GP100, GV100, GA100, GH100, GB100, and 1/32 or 1/64 on every"
    " other die",
)
L2_LOW = Threshold(0.35, "share of the L2 by latency: of a split L2 the near half may show alone")
L2_HIGH = Threshold(2.5, "share of the L2: footprints are powers of two, so the step is coarse")
LINK_COPY = Threshold(
    0.55,
    "share of what the link carries by generation and width: pinned copies reach 0.8 to 0.9, in"
    " VMs 0.7",
)
NVLINK_COPY = Threshold(
    0.7, "share of one direction of the NVLinks to a peer: copies reach 0.8 to 0.93"
)
NVLINK_TWIN = Threshold(
    0.8,
    "share of a lesser product's NVLinks (A800, H800) from which on copies are that product's: an"
    " H100 board of four joins pairs by 6 links, which stays below",
)
NVLINK_EXCESS = Threshold(1.05, "share of the NVLinks that copies between peers cannot exceed")
POWER_CAPPED = Threshold(
    0.9, "power limit over the default one: lower is somebody's decision, and costs clocks"
)
CLOCK_LOW = Threshold(
    0.5, "clock under load over the highest: large GPUs run at 0.65 to 1 of it within their power"
)
RETIRED_PAGES = Threshold(
    60, "retired pages at which NVIDIA replaces a board (Dynamic Page Retirement, RMA criteria)"
)

PCIE_GB_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s (1e9) of one lane and direction after encoding (PCI-SIG)."""

NVLINK_GB_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""GB/s (1e9) of one NVLink and direction, by generation (ml-engineering, network)."""

XID_SEVERITY = {
    48: ("degraded", "an uncorrectable ECC error; a reset is due"),
    63: ("degraded", "a row or page waits for a reset to be replaced"),
    64: ("unfit", "a row or page could not be replaced; return the board"),
    74: ("degraded", "an NVLink error"),
    79: ("unfit", "it fell off the bus"),
    94: ("degraded", "a contained uncorrectable error"),
    95: ("unfit", "an uncontained uncorrectable error"),
    119: ("degraded", "the GPU's own processor (GSP) timed out"),
    120: ("degraded", "the GPU's own processor (GSP) failed"),
    140: ("degraded", "an unrecovered ECC error"),
}
"""By NVIDIA's Xid catalogue. Others are a program's fault (13, 31, 43, 45 …) or of no weight."""

VBIOS_DIES = {
    "88.00": "GV100",
    "90.02": "TU102",
    "90.04": "TU104",
    "92.00": "GA100",
    "94.02": "GA102",
    "95.02": "AD102",
    "95.04": "AD104",
    "96.00": "GH100",
}
"""First two parts of a video BIOS's version, by die: as nvidia-smi prints them for A100 and CMP
170HX, A10, A10G and RTX 3090, RTX 4090, L4, H100, H200 and GH200 (captures in tests/audit and
public files). Unknown ones say nothing."""

WINDOWS_BRANCHES = (425, 595)
"""Between these branches Linux drivers have numbers that 5 divides (430, 535, 570 …), and those in
between (576.88, 591.86) exist on Windows alone: CUDA's release notes list both. Later branches are
unknown, and unknown drivers are no finding."""

FULL_FP64_DIES = ("GP100", "GV100", "GA100", "GH100", "GB100")
HBM = ("HBM2", "HBM2e", "HBM3", "HBM3e")
HOOKS = ("libvgpu", "libcuda-hook", "libnvidia-ml", "vcuda", "fakegpu", "fake-gpu", "libcuda.so")
"""Parts of names of libraries that answer in the driver's place when they are preloaded."""
