"""Readings as genuine products give them, for tests to leave alone or to change one of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybrid.audit import thresholds as t
from hybrid.audit.reading import Reading, Scalar
from hybrid.audit.specs import Sku, load_specs

MIB, GIB = 2**20, 2**30
SPECS = load_specs()
MEASURABLE = [s for s in SPECS.skus if s.sm_count and s.memory_total_mib and s.compute_capability]
"""Products of which enough is known to call one genuine."""


def sku(product: str) -> Sku:
    found = SPECS.by_product(product)
    assert found is not None, product
    return found


def claims_of(s: Sku, gpu: int = 0, **changed: Scalar) -> list[Reading]:
    """What nvidia-smi says of a product; `changed` by name without `claimed.`, None leaves out."""
    values: dict[str, Scalar] = {
        "name": s.names[0] if s.names else "NVIDIA Graphics Device",
        "architecture": s.family,
        "uuid": f"GPU-{gpu:08x}-0000-0000-0000-000000000000",
        "pci_bus_id": f"0000:{gpu + 1:02x}:00.0",
        "pci_device_id": s.pci_device_ids[0] if s.pci_device_ids else None,
        "memory_mib": s.memory_total_mib,
        "pcie_gen_device_max": s.pcie_gen,
        "virtualization": "None",
        "power_limit_w": s.tdp_w,
        "power_limit_default_w": s.tdp_w,
    }
    values |= changed
    return [
        Reading(name=f"claimed.{n}", value=v, source="nvidia-smi -q -x", fakeable=True, gpu=gpu)
        for n, v in values.items()
        if v is not None
    ]


def measured_of(s: Sku, gpu: int = 0, **changed: Any) -> list[Reading]:
    """What the probes find on a genuine card; `changed` by name without `measured.`.

    Dots in names are written `__`. Shares of the data sheets are what is published of real cards.
    """
    total = (s.memory_total_mib or 0) * MIB
    usable = int(0.94 * total)
    bandwidth = None if s.mem_bw_gbs is None else 0.86 * s.mem_bw_gbs * 1e9 / GIB
    tensor = s.measured_matmul_tflops or (s.tensor_tflops and 0.78 * s.tensor_tflops)
    fp32 = s.fp32_tflops and 0.85 * s.fp32_tflops
    ratio = 0.9 if s.die in t.FULL_FP64_DIES else 1 / 60
    gen, width = s.pcie_gen or 4, s.pcie_width or 16
    copies = 0.82 * t.PCIE_GB_S_PER_LANE[gen] * width * 1e9 / GIB
    values: dict[str, Any] = {
        "compute_capability": s.compute_capability,
        "sm_count": s.sm_count,
        "l2_bytes": None if s.l2_mib is None else 0.9 * s.l2_mib * MIB,
        "memory_bytes": usable,
        "memory_errors": 0,
        "chunk_min_gib_s": None if bandwidth is None else 0.93 * bandwidth,
        "memory_gib_s": bandwidth,
        "matmul_tflops.bf16": tensor if (s.compute_capability or "0") >= "8" else None,
        "matmul_tflops.fp16": tensor,
        "matmul_tflops.fp32": fp32,
        "matmul_tflops.fp64": None if fp32 is None else ratio * fp32,
        "h2d_gib_s": copies,
        "d2h_gib_s": copies,
        "pcie_gen_loaded": gen,
        "pcie_width_loaded": width,
    }
    if s.compute_capability in ("10.0", "12.0"):
        values["matmul_tflops.bf16"] = tensor
    details: dict[str, dict[str, Any]] = {
        "memory_bytes": {"total_bytes": int(0.99 * total), "free_bytes": int(0.98 * total)},
        "memory_errors": {"chunk_bytes": 512 * MIB, "wrong_words_by_chunk": {}},
        "sm_count": {"attributes": {"sm_count": changed.pop("sm_attribute", s.sm_count)}},
    }
    curve = changed.pop("chunks", None)
    values |= {name.replace("__", "."): v for name, v in changed.items()}
    found = [
        Reading(
            name=f"measured.{n}", value=v, source="torch", gpu=gpu, detail=details.get(n, {}),
            fakeable=n.startswith("pcie_"),
        )
        for n, v in values.items()
    ]  # fmt: skip
    found = [
        replace(r, curve=tuple(enumerate(curve or (r.value, bandwidth))))
        if r.name.endswith("chunk_min_gib_s") and r.value is not None
        else r
        for r in found
    ]
    return [
        *found,
        Reading(
            name="challenge.correct", value=True, source="driver", fakeable=False, gpu=gpu,
            detail={"error": None},
        ),
    ]  # fmt: skip


def changed(readings: list[Reading], name: str, value: Any, gpu: int = 0) -> list[Reading]:
    """The same readings with one value of one GPU changed."""
    return [replace(r, value=value) if (r.name, r.gpu) == (name, gpu) else r for r in readings]


def node_reading(name: str, value: Scalar, source: str = "test", **detail: Any) -> Reading:
    """A reading of the node as a whole."""
    return Reading(name=name, value=value, source=source, fakeable=True, detail=detail)
