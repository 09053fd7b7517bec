"""Verdicts on a node: is it the hardware that is paid for (identity), and is it well (health)?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hybrid.audit.reading import Finding, Reading
from hybrid.audit.specs import Specs

Identity = Literal["genuine", "contradicted", "unknown"]
Health = Literal["fit", "degraded", "unfit"]


@dataclass(frozen=True, kw_only=True)
class GpuVerdict:
    """Of one GPU.

    Attributes:
        product: the claimed product in our table; None where it is none of it.
        also_fits: other products that what was measured does not exclude.
        missing: readings without which identity stays unknown.
    """

    gpu: int
    name: str | None
    product: str | None
    identity: Identity
    health: Health
    also_fits: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeVerdict:
    """Of a node: the worst of its GPUs and of itself."""

    identity: Identity
    health: Health
    findings: tuple[Finding, ...]
    gpus: tuple[GpuVerdict, ...]


def judge(
    readings: Sequence[Reading],
    specs: Specs,
    previous: Sequence[Reading] | None = None,
    *,
    findings: Iterable[Finding] = (),
    sold_as: str | None = None,
) -> NodeVerdict:
    """Judge a node by its readings.

    Args:
        readings: of the node (gpu None) and its GPUs, claims and measurements together.
        specs: the table of products.
        previous: readings of an earlier audit of the same node.
        findings: those that the driver made (challenges, collectives, peers); they count.
        sold_as: what the renter pays for, e.g. "A100 80GB"; None: what the node claims to be.
    """
    raise NotImplementedError
