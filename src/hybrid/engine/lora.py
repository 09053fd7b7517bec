"""A loaded LoRA adapter: its weights as one row of numbers, and where in it each matrix lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from hybrid.engine.shape import Shape

_STEP = 8
"""Ranks are rounded up to a multiple of this, so that adapters of ranks 2 and 8 share a stack."""

Site = tuple[int, str]
"""(layer, fused matrix)."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where an adapter's weights lie in its row of `size` numbers.

    targets: (layer, projection) that it changes. For each fused matrix A is [in, parts * rank] and
    B [rank, out] for each of its projections. One object for all adapters that share it.
    """

    shape: Shape
    rank: int
    targets: frozenset[tuple[int, str]]

    @classmethod
    def of(cls, shape: Shape, rank: int, targets: frozenset[tuple[int, str]]) -> Layout:
        """The layout for adapters of at most this rank."""
        return _layout(shape, -(-rank // _STEP) * _STEP, targets)

    @cached_property
    def _places(self) -> tuple[dict[Site, tuple[int, int, list[tuple[str, int, int, int]]]], int]:
        """By site: (offset of A, in, [(projection, offset of B, first column, last + 1)])."""
        places: dict[Site, tuple[int, int, list[tuple[str, int, int, int]]]] = {}
        order: dict[Site, list[str]] = {}
        projections = self.shape.projections()
        for layer, name in sorted(
            self.targets, key=lambda t: (t[0], list(projections).index(t[1]))
        ):
            order.setdefault((layer, projections[name][2]), []).append(name)
        at = 0
        for site, names in order.items():
            n_in = projections[names[0]][0]
            first, at = at, at + n_in * len(names) * self.rank
            parts = []
            for name in names:
                _, n_out, _, column = projections[name]
                parts.append((name, at, column, column + n_out))
                at += self.rank * n_out
            places[site] = (first, n_in, parts)
        return places, at

    @property
    def size(self) -> int:
        """Numbers an adapter takes."""
        return self._places[1]

    def views(self, rows: Tensor) -> Views:
        """The weights of adapters in `rows` [n, size]."""
        n, places = rows.shape[0], self._places[0]
        views: Views = {}
        for site, (at, n_in, parts) in places.items():
            width = len(parts) * self.rank
            a = rows[:, at : at + n_in * width].view(n, n_in, width)
            views[site] = Weights(
                a,
                [
                    (
                        start,
                        stop,
                        rows[:, b : b + self.rank * (stop - start)].view(n, self.rank, -1),
                    )
                    for _, b, start, stop in parts
                ],
            )
        return views

    @cached_property
    def tables(self) -> dict[Site, tuple[tuple[int, ...], Tensor]]:
        """What the kernel needs to know of each site: in, rank, parts and A's offset; and int64
        [3, parts]: B's offsets, first columns and last columns + 1."""
        return {
            site: (
                (n_in, self.rank, len(parts), at),
                torch.tensor([[p[1] for p in parts], [p[2] for p in parts], [p[3] for p in parts]]),
            )
            for site, (at, n_in, parts) in self._places[0].items()
        }

    def write(self, row: Tensor, layer: int, name: str, a: Tensor, b: Tensor) -> None:
        """Put a projection's a [in, r] and b [r, out] into an adapter's row [size] of zeros."""
        matrix = self.shape.projections()[name][2]
        _, _, parts = self._places[0][layer, matrix]
        index = [part[0] for part in parts].index(name)
        weights = self.views(row[None])[layer, matrix]
        weights.a[0, :, index * self.rank : index * self.rank + a.shape[1]] = a
        weights.parts[index][2][0, : b.shape[0]] = b


@cache
def _layout(shape: Shape, rank: int, targets: frozenset[tuple[int, str]]) -> Layout:
    return Layout(shape, rank, targets)


@dataclass(frozen=True, eq=False)
class Weights:
    """One fused matrix of n adapters: a [n, in, parts * rank]; parts: (first column, last + 1,
    b [n, rank, out]), the scaling folded into b."""

    a: Tensor
    parts: list[tuple[int, int, Tensor]]


Views = dict[Site, Weights]


@dataclass(frozen=True, eq=False)
class Saved:
    """A matrix that an adapter changes at either end of the model.

    whole: its own instead of the base's (`modules_to_save`), [vocab, hidden]; or a and b of LoRA:
    for the embedding a [vocab, r] and b [r, hidden], for the head a [hidden, r] and b [r, vocab].
    """

    whole: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


@dataclass(eq=False)
class Adapter:
    """A loaded adapter; `in_use` counts the requests that use it now."""

    digest: str
    layout: Layout
    row: Tensor
    embedding: Saved | None = None
    head: Saved | None = None
    in_use: int = 0

    @cached_property
    def views(self) -> Views:
        """Its weights, n = 1."""
        return self.layout.views(self.row[None])

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        ends = [t for s in (self.embedding, self.head) if s for t in (s.whole, s.a, s.b)]
        return [self.row, *(t for t in ends if t is not None)]

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return sum(t.nbytes for t in self.tensors)
