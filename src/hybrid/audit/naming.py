"""Readings of a device under its prefix: `measured.` of a GPU, `cpu.torch.` of the CPU."""

from __future__ import annotations

from typing import Any

from hybrid.audit.device import Device
from hybrid.audit.reading import Reading, Scalar


def reading(
    device: Device,
    name: str,
    value: Scalar,
    unit: str = "",
    *,
    source: str = "torch",
    fakeable: bool = False,
    curve: tuple[tuple[float, float], ...] = (),
    detail: dict[str, Any] | None = None,
) -> Reading:
    """A reading called `measured.NAME` of a GPU, `cpu.torch.NAME` where the CPU takes its place."""
    prefix = "measured" if device.kind == "cuda" else "cpu.torch"
    return Reading(
        name=f"{prefix}.{name}",
        value=value,
        unit=unit,
        source=source,
        fakeable=fakeable,
        gpu=device.index,
        curve=curve,
        detail=detail or {},
    )
