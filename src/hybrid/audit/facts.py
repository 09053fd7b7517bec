"""Readings by name and GPU, and the making of findings: what all judgements share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hybrid.audit.reading import Axis, Expectation, Finding, Reading, Severity


class Facts:
    """What was read of one node. Readings whose value is None are unknown and not here."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._by: dict[tuple[int | None, str], list[Reading]] = defaultdict(list)
        for r in readings:
            if r.value is not None:
                self._by[r.gpu, r.name].append(r)

    @property
    def gpus(self) -> list[int]:
        """Every GPU that anything was read of."""
        return sorted({gpu for gpu, _ in self._by if gpu is not None})

    def all(self, name: str, gpu: int | None = None) -> list[Reading]:
        """Every source's reading."""
        return self._by.get((gpu, name), [])

    def get(self, name: str, gpu: int | None = None) -> Reading | None:
        """The first source's reading."""
        return next(iter(self.all(name, gpu)), None)

    def number(self, name: str, gpu: int | None = None) -> float | None:
        """The first source's value, where it is a number."""
        r = self.get(name, gpu)
        return as_number(r)

    def text(self, name: str, gpu: int | None = None) -> str | None:
        """The first source's value, where it is text."""
        r = self.get(name, gpu)
        return r.value if r is not None and isinstance(r.value, str) else None

    def everywhere(self, name: str) -> list[Reading]:
        """The readings of that name of all GPUs and of the node."""
        return [r for (_, n), rs in self._by.items() if n == name for r in rs]


def as_number(reading: Reading | None) -> float | None:
    """A reading's value as a float; None where it is none, or no number."""
    if reading is None or isinstance(reading.value, bool):
        return None
    return float(reading.value) if isinstance(reading.value, int | float) else None


def finding(
    kind: str,
    axis: Axis,
    severity: Severity,
    text: str,
    readings: Sequence[Reading],
    expected: Expectation | None = None,
) -> Finding:
    """A finding on the GPU of its first reading that has one."""
    gpu = next((r.gpu for r in readings if r.gpu is not None), None)
    return Finding(
        kind=kind, axis=axis, severity=severity, text=text, readings=tuple(readings),
        expected=expected, gpu=gpu,
    )  # fmt: skip


def where(gpu: int | None) -> str:
    """ "GPU 3", or "the node"."""
    return "the node" if gpu is None else f"GPU {gpu}"
