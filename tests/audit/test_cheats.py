"""Each public report of a cheat that one node can show, simulated, and the reading that tells.

The numbers are those of docs/audit.md. What a cheat is made of is told at the lowest honest level:
readings as nvidia-smi, the kernel or the probes would give them, one of them a lie (a fake
nvidia-smi on PATH, a doctored /proc and a library that lies: test_claims.py, test_kernel.py; cards
that lie to the probes: test_probes.py; one card for eight: test_conduct.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from honest import GIB, MEASURABLE, MIB, SPECS, changed, claims_of, measured_of, node_reading, sku

from hybrid.audit.captures import read_capture, read_capture_file
from hybrid.audit.reading import Reading
from hybrid.audit.verdict import judge

FOLDER = Path(__file__).parent / "captures"
A100 = sku("A100-SXM4-80GB")
H100 = sku("H100 80GB HBM3")
RTX3090 = sku("GeForce RTX 3090")
CMP = sku("CMP 170HX")


class Cheat(NamedTuple):
    """A report's number, what the node shows, and what must give it away."""

    number: int
    readings: Callable[[], list[Reading]]
    kind: str
    gives_away: str
    severity: str = "contradicted"
    sold_as: str | None = None


def of(base: list[Reading], name: str, value: Any, gpu: int = 0, **detail: Any) -> list[Reading]:
    """One reading more."""
    source, fakeable = ("torch", False) if name.startswith("measured.") else ("nvidia-smi", True)
    return [
        *base,
        Reading(name=name, value=value, source=source, fakeable=fakeable, gpu=gpu, detail=detail),
    ]


def honest(s: Any = A100, **measured: Any) -> list[Reading]:
    return [*claims_of(s), *measured_of(s, **measured)]


def flashed() -> list[Reading]:
    """An RTX 3090 that calls itself an A100 in all that software can say."""
    return [*claims_of(A100), *measured_of(RTX3090, sm_attribute=108)]


def cmp_card(**told: Any) -> list[Reading]:
    """A CMP 170HX that was unlocked to 64 GB: everything but its SMs is an A100's."""
    return [*claims_of(A100, **told), *measured_of(A100, sm_count=70, sm_attribute=70)]


def eight(uuids: int) -> list[Reading]:
    """Eight A100s in name; so many in UUID."""
    found: list[Reading] = [node_reading("claimed.gpu_count", 8, "nvidia-smi -q -x")]
    for gpu in range(8):
        found += claims_of(A100, gpu, uuid=f"GPU-{gpu % uuids:08x}-0000-0000-0000-000000000000")
    return found


def capture(start: str) -> list[Reading]:
    [path] = FOLDER.glob(f"{start}*")
    return read_capture_file(path)


def log(line: str) -> list[Reading]:
    return [*honest(), *read_capture(line.encode())]


CHEATS = [
    # A. rewritten firmware, other dies, other memory
    Cheat(1, flashed, "sm-count", "measured.sm_count"),
    Cheat(1, flashed, "attribute-against-measurement", "measured.sm_count"),
    Cheat(1, flashed, "memory-size", "measured.memory_bytes"),
    Cheat(1, flashed, "compute-capability", "measured.compute_capability"),
    Cheat(1, flashed, "l2-size", "measured.l2_bytes"),
    Cheat(1, flashed, "fp64-ratio", "measured.matmul_tflops.fp64"),
    Cheat(1, lambda: claims_of(A100, vbios="94.02.71.40.72"), "name-against-vbios",
          "claimed.vbios"),
    Cheat(2, lambda: claims_of(RTX3090, memory_mib=768), "name-against-memory",
          "claimed.memory_mib"),
    Cheat(3, lambda: [*claims_of(sku("GeForce RTX 4090")), *measured_of(RTX3090)], "sm-count",
          "measured.sm_count"),
    Cheat(4, lambda: honest(sku("GeForce RTX 4080"), sm_count=30), "sm-count",
          "measured.sm_count"),
    Cheat(6, lambda: claims_of(sku("GeForce RTX 4090"), memory_mib=49140), "name-against-memory",
          "claimed.memory_mib"),
    Cheat(6, lambda: claims_of(sku("GeForce RTX 3080"), memory_mib=20480), "name-against-memory",
          "claimed.memory_mib"),
    # B. names changed in the driver
    Cheat(7, lambda: claims_of(A100, brand="GeForce"), "name-against-brand", "claimed.brand"),
    Cheat(7, lambda: claims_of(A100, pci_device_id="10de:2204"), "name-against-pci-id",
          "claimed.pci_device_id"),
    Cheat(8, lambda: claims_of(A100, architecture="Turing"), "name-against-architecture",
          "claimed.architecture"),
    Cheat(8, lambda: claims_of(A100, virtualization="VGPU"), "vgpu-share",
          "claimed.virtualization"),
    Cheat(9, lambda: claims_of(A100, part_number="2204-300-A1"), "name-against-part-number",
          "claimed.part_number"),
    # C. lies to the renter's checker
    Cheat(10, lambda: eight(1), "uuid-repeated", "claimed.uuid"),
    Cheat(10, lambda: [*eight(8), node_reading("kernel.gpu_count", 1, "/proc/driver/nvidia")],
          "more-gpus-than-kernel", "kernel.gpu_count"),
    Cheat(10, lambda: [*eight(8), node_reading("kernel.pci_count", 1, "/sys/bus/pci")],
          "more-gpus-than-kernel", "kernel.pci_count"),
    Cheat(11, lambda: [*honest(), node_reading("claimed.driver_version", "591.86", "nvml")],
          "windows-driver", "claimed.driver_version"),
    Cheat(11, lambda: [*honest(), node_reading("claimed.driver_version", "576.88", "nvml")],
          "windows-driver", "claimed.driver_version"),
    Cheat(12, lambda: [*honest(), node_reading("kernel.not_procfs", "a symbolic link")],
          "not-procfs", "kernel.not_procfs"),
    Cheat(12, lambda: [*honest(), node_reading("kernel.foreign_mounts", "/proc/… (ext4)")],
          "foreign-mounts", "kernel.foreign_mounts"),
    Cheat(13, lambda: claims_of(H100, memory_mib=24064), "name-against-memory",
          "claimed.memory_mib"),
    Cheat(13, lambda: [*claims_of(H100), *measured_of(A100)], "sm-count", "measured.sm_count"),
    Cheat(15, lambda: claims_of(A100, memory_mib=10 << 20), "name-against-memory",
          "claimed.memory_mib"),
    Cheat(16, lambda: read_capture(b"NVIDIA-SMI has failed because it couldn't communicate"),
          "tool-failed", "claimed.tool_failed", "unfit"),
    Cheat(17, lambda: [*claims_of(A100),
                       *(replace(r, source="nvml") for r in claims_of(A100, uuid="GPU-other"))],
          "sources-disagree", "claimed.uuid"),
    Cheat(17, lambda: [*honest(), node_reading("claimed.driver_version", "550.54.14", "nvml"),
                       node_reading("kernel.driver_version", "535.129.03", "/proc")],
          "driver-against-kernel", "kernel.driver_version"),
    # D. a lesser product of the same die
    Cheat(18, cmp_card, "sm-count", "measured.sm_count"),
    Cheat(18, lambda: honest(sm_count=124, sm_attribute=124), "sm-count", "measured.sm_count"),
    Cheat(18, lambda: cmp_card(part_number="20C2-105-A1"), "name-against-part-number",
          "claimed.part_number"),
    Cheat(18, lambda: cmp_card(pcie_gen_device_max=1), "device-link-below-product",
          "claimed.pcie_gen_device_max"),
    Cheat(18, lambda: honest(matmul_tflops__fp32=0.39), "fp32-held-back",
          "measured.matmul_tflops.fp32"),
    Cheat(18, lambda: claims_of(A100, name="NVIDIA Graphics Device"), "sold-as-another",
          "claimed.name", sold_as="RTX 3090"),
    Cheat(19, lambda: claims_of(A100, memory_mib=98304), "name-against-memory",
          "claimed.memory_mib"),
    Cheat(20, lambda: [*claims_of(H100), *measured_of(sku("H20"))], "sm-count",
          "measured.sm_count"),
    Cheat(20, lambda: claims_of(sku("H800")), "sold-as-another", "claimed.name",
          sold_as="H100"),
    Cheat(20, lambda: capture("21_"), "sold-as-another", "claimed.name", sold_as="H200"),
    Cheat(20, lambda: of(honest(), "measured.p2p_gib_s", 172e9 / GIB, peer=1),
          "nvlink-of-another", "measured.p2p_gib_s"),
    # E. shared, divided, oversubscribed
    Cheat(21, lambda: read_capture(b"[HAMI-core Msg(1:2:hook.c:9)]: Start hijacking\n"
                                   + next(FOLDER.glob("01_*")).read_bytes()),
          "driver-hooked", "claimed.hooked"),
    Cheat(21, lambda: [*honest(), node_reading("kernel.preloaded", "/usr/local/vgpu/libvgpu.so")],
          "preloaded-hook", "kernel.preloaded"),
    Cheat(21, lambda: [*claims_of(A100),
                       *(replace(r, source="nvml") for r in claims_of(A100, memory_mib=40960))],
          "sources-disagree", "claimed.memory_mib"),
    Cheat(21, lambda: honest(chunk_min_gib_s=12.0), "host-backed-memory",
          "measured.chunk_min_gib_s"),
    Cheat(21, lambda: [replace(r, value=700_000_000, detail={
                           "chunk_bytes": 512 * MIB, "wrong_words_by_chunk": {"9": 60_000_000}})
                       if r.name == "measured.memory_errors" else r for r in honest()],
          "memory-not-there", "measured.memory_errors"),
    Cheat(22, lambda: claims_of(A100, license="Unlicensed (Restricted)"), "vgpu-unlicensed",
          "claimed.license", "unfit"),
    Cheat(23, lambda: of(honest(sm_count=14, sm_attribute=14), "claimed.mig_mode", "Enabled"),
          "mig-slice", "measured.sm_count"),
    Cheat(23, lambda: capture("03_"), "mig-enabled", "claimed.mig_mode", "degraded"),
    # F. a genuine GPU in a crippled node
    Cheat(25, lambda: of(honest(), "claimed.nvlinks", 0, ways=["PHB", "SYS"]), "no-nvlink",
          "claimed.nvlinks", "degraded"),
    Cheat(25, lambda: of(honest(), "measured.p2p_gib_s", 3.7, peer=1), "peer-copies-slow",
          "measured.p2p_gib_s", "degraded"),
    Cheat(26, lambda: honest(pcie_gen_loaded=2, h2d_gib_s=6.2), "link-generation",
          "measured.pcie_gen_loaded", "degraded"),
    Cheat(26, lambda: honest(sku("GeForce RTX 5090"), h2d_gib_s=6.2), "copies-slow",
          "measured.h2d_gib_s", "degraded"),
    Cheat(27, lambda: log("pci 0000:01:00.0: 252.048 Gb/s available PCIe bandwidth, limited by"
                          " 16.0 GT/s PCIe x16 link\n"),
          "link-limited", "log.pcie_limited", "degraded"),
    Cheat(28, lambda: changed(claims_of(sku("A10G")), "claimed.power_limit_w", 150.0),
          "power-capped", "claimed.power_limit_w", "degraded"),
    Cheat(28, lambda: capture("04_"), "power-capped", "claimed.power_limit_w", "degraded"),
    Cheat(28, lambda: of(honest(), "measured.throttle_reasons", "hw_power_brake, sw_power_cap"),
          "throttled", "measured.throttle_reasons", "degraded"),
    Cheat(30, lambda: of(honest(), "measured.p2p_errors", 4096, peer=1), "peer-data-wrong",
          "measured.p2p_errors", "unfit"),
    Cheat(31, lambda: honest(RTX3090, pcie_width_loaded=8, h2d_gib_s=6.5), "copies-slow",
          "measured.h2d_gib_s", "degraded"),
]  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: f"{c.number}-{c.kind}-{c.gives_away}")
def test_a_cheat_is_caught_by_the_reading_that_gives_it_away(cheat: Cheat) -> None:
    verdict = judge(cheat.readings(), SPECS, sold_as=cheat.sold_as)
    found = [f for f in verdict.findings if f.kind == cheat.kind]
    assert found, [f.kind for f in verdict.findings]
    assert cheat.gives_away in {r.name for f in found for r in f.readings}
    assert {f.severity for f in found} == {cheat.severity}
    if cheat.severity == "contradicted":
        assert verdict.identity == "contradicted"
        assert all(f.text and f.readings for f in found)
    else:
        assert verdict.health == cheat.severity
    assert verdict.identity != "genuine" or cheat.severity != "contradicted"


def test_the_docs_number_every_cheat_and_say_which_no_node_can_show() -> None:
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text(encoding="utf-8")
    section = page.split("## What gives a cheat away")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][2:]
    told = {int(n): row for row in rows for n in re.findall(r"\d+", row[1])}
    assert set(told) == set(range(1, 32)), "the public reports are numbered 1 to 31"
    for cheat in CHEATS:
        assert f"`{cheat.kind}`" in told[cheat.number][3], (cheat.number, cheat.kind)
    silent = {n for n, row in told.items() if "no node can show" in row[3]}
    # The two that other tests simulate with whole nodes: challenges, and a node handed back.
    assert silent == set(told) - {c.number for c in CHEATS} - {14, 29}


@pytest.mark.parametrize("claimed", MEASURABLE, ids=lambda s: s.product)
def test_no_product_passes_for_another(claimed: Any) -> None:
    """Every known product in the place of every other: contradicted, but for the known twins."""
    twins = [{"A100-SXM4-40GB", "A100-PCIE-40GB"}, {"A100-SXM4-80GB", "A100 80GB PCIe"}]
    for real in MEASURABLE:
        if real is claimed:
            continue
        verdict = judge([*claims_of(claimed), *measured_of(real)], SPECS)
        if {claimed.product, real.product} in twins:
            assert "twin-not-excluded" in {f.kind for f in verdict.findings}
            assert real.product in verdict.gpus[0].also_fits
        else:
            assert verdict.identity == "contradicted", f"{real.product} passed"
