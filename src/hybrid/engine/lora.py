"""LoRA over a batch of different adapters: rows sorted by adapter, weights never gathered.

Rows of one adapter are one segment (offsets are made once a step and used in every layer); rows of
the base come last and cost nothing. A long segment gets two products of its own. Many short ones
are cheaper together: their A matrices side by side, one product, a 0/1 mask that leaves each row
its own block, one product with the B matrices stacked. Ranks are the true ones, never padded.
(Compare S-LoRA, Sheng et al. 2023, and Punica, Chen et al. 2023, which gather on a GPU.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SHORT = 8
"""Mean rows of a segment up to which the concatenated form is cheaper (measured on a CPU)."""
_CACHED = 64


@dataclass(frozen=True, eq=False)
class Delta:
    """One projection's adapter: y[:, start:stop] += x @ a @ b; the scaling is folded into b.

    a: [in, rank]; b: [rank, out].
    """

    a: Tensor
    b: Tensor
    start: int
    stop: int


@dataclass(eq=False)
class Adapter:
    """A loaded adapter: deltas by (layer, fused matrix), and how many requests use it now."""

    digest: str
    deltas: dict[tuple[int, str], list[Delta]]
    size_bytes: int
    in_use: int = 0


@dataclass(eq=False)
class _Joined:
    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]
    start: int
    stop: int


class JoinCache:
    """Concatenated matrices by the set of adapters in a batch; the newest few are kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], dict[tuple[int, str], list[_Joined]]] = {}

    def get(self, adapters: Sequence[Adapter]) -> dict[tuple[int, str], list[_Joined]]:
        """Joined deltas of these adapters, by (layer, fused matrix)."""
        key = tuple(a.digest for a in adapters)
        joined = self._kept.pop(key, None)
        if joined is None:
            joined = _join(adapters)
            while len(self._kept) >= _CACHED:
                self._kept.pop(next(iter(self._kept)))
        self._kept[key] = joined
        return joined

    def forget(self, digest: str) -> None:
        """Drop what holds an adapter that is unloaded."""
        for key in [k for k in self._kept if digest in k]:
            del self._kept[key]


def _join(adapters: Sequence[Adapter]) -> dict[tuple[int, str], list[_Joined]]:
    out: dict[tuple[int, str], list[_Joined]] = {}
    for where in sorted({w for a in adapters for w in a.deltas}):
        columns = sorted({(d.start, d.stop) for a in adapters for d in a.deltas.get(where, ())})
        for start, stop in columns:
            own = [
                next((d for d in a.deltas.get(where, ()) if d.start == start), None)
                for a in adapters
            ]
            present = [d for d in own if d is not None]
            out.setdefault(where, []).append(
                _Joined(
                    a=torch.cat([d.a for d in present], 1).contiguous(),
                    b=torch.cat([d.b for d in present], 0).contiguous(),
                    ranks=tuple(0 if d is None else d.a.shape[1] for d in own),
                    start=start,
                    stop=stop,
                )
            )
    return out


@dataclass(eq=False)
class LoraPlan:
    """Which rows of a step get which adapter. Made once a step, used in every layer.

    `segments`: (first row, end row, adapter), in row order, base rows left out.
    """

    segments: Sequence[tuple[int, int, Adapter]]
    cache: JoinCache | None = None
    _joined: dict[tuple[int, str], list[_Joined]] | None = None
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = self.segments[-1][1] - self.segments[0][0] if self.segments else 0
        if self.cache and len(self.segments) > 1 and rows <= _SHORT * len(self.segments):
            self._joined = self.cache.get([s[2] for s in self.segments])

    def apply(self, layer: int, matrix: str, x: Tensor, y: Tensor) -> None:
        """Add every row's own delta of one fused matrix to y, in place."""
        if self._joined is not None:
            last = self.segments[-1][1]
            for j in self._joined.get((layer, matrix), ()):
                low = x[:last] @ j.a
                low.mul_(self._mask(j.ranks, low))
                y[:last, j.start : j.stop].addmm_(low, j.b)
            return
        for start, stop, adapter in self.segments:
            for d in adapter.deltas.get((layer, matrix), ()):
                y[start:stop, d.start : d.stop].addmm_(x[start:stop] @ d.a, d.b)

    def _mask(self, ranks: tuple[int, ...], like: Tensor) -> Tensor:
        mask = self._masks.get(ranks)
        if mask is None:
            mask = torch.zeros_like(like)
            column = 0
            for (start, stop, _), rank in zip(self.segments, ranks, strict=True):
                mask[start:stop, column : column + rank] = 1
                column += rank
            self._masks[ranks] = mask
        return mask
