"""What the audit is made of: readings, what was expected of them, and the findings that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Axis = Literal["identity", "health"]
Severity = Literal["note", "degraded", "unfit", "contradicted"]
"""`contradicted` is of identity; `degraded`, `unfit` are of health; `note` changes no verdict."""
Scalar = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One thing that was read or measured. Plain data: it travels as JSON between nodes.

    Attributes:
        name: what it is, dotted, e.g. `claimed.name`, `measured.sm_count`, `memory.chunk_gib_s`.
        value: a scalar; None is unknown, and unknown never counts for anything.
        unit: SI or IEC, e.g. "GiB/s", "TFLOP/s", "count"; "" for names.
        source: where it comes from: "nvidia-smi -q -x", "nvml", "kernel", "torch", "driver" (the
            Ray driver's own clock or check), …
        fakeable: whether a seller with root on the node could set it without the hardware.
        gpu: index on the node; None is the node itself.
        curve: (x, y) points for plots, where the reading is one figure out of a curve.
        detail: whatever a person needs to check it.
    """

    name: str
    value: Scalar
    unit: str = ""
    source: str
    fakeable: bool
    gpu: int | None = None
    curve: tuple[tuple[float, float], ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a reading was held against: a range, or a set of allowed values; and who says so."""

    low: float | None = None
    high: float | None = None
    allowed: tuple[Scalar, ...] = ()
    source: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A judgement on readings: what is wrong (or worth a note) and what gave it away.

    Attributes:
        kind: a stable name, e.g. `claim-against-sm-count`; docs/audit.md lists them all.
        text: one sentence a renter can send to the seller.
        readings: names of the readings that gave it away, with the GPU index where it matters.
    """

    kind: str
    axis: Axis
    severity: Severity
    text: str
    readings: tuple[Reading, ...]
    expected: Expectation | None = None
    gpu: int | None = None
