"""LoRA over a batch of different adapters: rows sorted by adapter, each weight read once a layer.

Adapters of one layout (rank and targets) that have rows in a step lie side by side in a stack, so
that a few rows each are one batched product for A and one for each part of B; nothing is multiplied
that is masked out afterwards, and nothing is gathered but rows of activations. A long run of rows
of one adapter (a prompt) gets two products of its own. Rows of the base come last and cost nothing.
(Compare S-LoRA, Sheng et al. 2023, and Punica, Chen et al. 2023, which gather on a GPU.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.engine.shape import Shape

_LONG = 8
"""More rows than this of one adapter in a step are products of their own."""
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
        for layer, name in sorted(self.targets, key=lambda t: (t[0], list(projections).index(t[1]))):
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
                    (start, stop, rows[:, b : b + self.rank * (stop - start)].view(n, self.rank, -1))
                    for _, b, start, stop in parts
                ],
            )
        return views

    def write(self, row: Tensor, layer: int, name: str, a: Tensor, b: Tensor) -> None:
        """Put a projection's a [in, r] and b [r, out] into an adapter's row [size] of zeros."""
        matrix = self.shape.projections()[name][2]
        _, _, parts = self._places[0][layer, matrix]
        index = [part[0] for part in parts].index(name)
        weights = self.views(row[None])[layer, matrix]
        weights.a[0, :, index * self.rank : index * self.rank + a.shape[1]] = a
        weights.parts[index][2][0, : b.shape[0]] = b


@lru_cache(maxsize=None)
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
    def size_bytes(self) -> int:
        """What it takes in memory."""
        ends = [t for s in (self.embedding, self.head) if s for t in (s.whole, s.a, s.b)]
        return self.row.nbytes + sum(t.nbytes for t in ends if t is not None)


class Stack:
    """Adapters of one layout side by side, those of the current step first."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self._layout = layout
        self._rows = like.new_zeros(8, layout.size)
        self._members: list[Adapter | None] = [None] * 8
        self._views: dict[int, Views] = {}

    def arrange(self, wanted: Sequence[Adapter]) -> list[Adapter]:
        """Make the wanted ones the first ones; returns them in their order."""
        count = len(wanted)
        if count > len(self._members):
            more = count * 2 - len(self._members)
            self._rows = torch.cat([self._rows, self._rows.new_zeros(more, self._layout.size)])
            self._members += [None] * more
            self._views.clear()
        missing = [a for a in wanted if a not in self._members[:count]]
        for i in range(count):
            if self._members[i] not in wanted:
                adapter = missing.pop()
                if adapter in self._members:
                    self._members[self._members.index(adapter)] = None
                self._members[i] = adapter
                self._rows[i] = adapter.row
        return [a for a in self._members[:count] if a is not None]

    def views(self, count: int) -> Views:
        """Weights of the first ones."""
        if count not in self._views:
            self._views[count] = self._layout.views(self._rows[:count])
        return self._views[count]

    def forget(self, adapter: Adapter) -> None:
        """Let go of an adapter that is unloaded."""
        self._members = [None if m is adapter else m for m in self._members]


class Stacks:
    """A stack for each layout in use."""

    def __init__(self) -> None:
        self._stacks: dict[Layout, Stack] = {}

    def order(self, counts: dict[Adapter, int]) -> list[Adapter]:
        """The order in which a step's rows lie: few rows each, stack by stack, then many each.

        Args:
            counts: rows by adapter.
        """
        groups: dict[Layout, list[Adapter]] = {}
        for adapter, rows in counts.items():
            if rows <= _LONG:
                groups.setdefault(adapter.layout, []).append(adapter)
        ordered = [a for layout, few in groups.items() for a in self._stack(few[0]).arrange(few)]
        return ordered + [a for a, rows in counts.items() if rows > _LONG]

    def _stack(self, adapter: Adapter) -> Stack:
        layout = adapter.layout
        if layout not in self._stacks:
            self._stacks[layout] = Stack(layout, adapter.row)
        return self._stacks[layout]

    def group(self, few: Sequence[tuple[Adapter, int]], start: int) -> Group:
        """The rows from `start` of adapters of one layout, in the order that `order` gave."""
        rows = [n for _, n in few]
        views = self._stack(few[0][0]).views(len(few))
        return Group.of(views, rows, start, few[0][0].row.device)

    def forget(self, adapter: Adapter) -> None:
        """Let go of an adapter that is unloaded."""
        if adapter.layout in self._stacks:
            self._stacks[adapter.layout].forget(adapter)


@dataclass(frozen=True, eq=False)
class Group:
    """Rows [start, stop) of a step: adapters with few rows each, `count` of them padded to `width`.

    take: int64 [count * width], rows relative to `start`; give: int64 [stop - start], where a row is
    among the padded ones; both None when every adapter has `width` rows.
    """

    views: Views
    start: int
    stop: int
    count: int
    width: int
    take: Tensor | None
    give: Tensor | None

    @classmethod
    def of(cls, views: Views, rows: Sequence[int], start: int, device: torch.device) -> Group:
        """From the number of rows of each adapter."""
        width, total = max(rows), sum(rows)
        take = give = None
        if width * len(rows) != total:
            taken, given, at = [], [], 0
            for i, n in enumerate(rows):
                taken += [at + min(j, n - 1) for j in range(width)]
                given += [i * width + j for j in range(n)]
                at += n
            take, give = (torch.tensor(t, device=device) for t in (taken, given))
        return cls(views, start, start + total, len(rows), width, take, give)

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        """Add every row's own delta to y, in place."""
        weights = self.views.get(site)
        if weights is None:
            return
        mine = x[self.start : self.stop]
        if self.take is not None:
            mine = mine.index_select(0, self.take)
        low = torch.bmm(mine.view(self.count, self.width, -1), weights.a)
        rank = low.shape[-1] // len(weights.parts)
        for i, (start, stop, b) in enumerate(weights.parts):
            part = torch.bmm(low[..., i * rank : (i + 1) * rank], b).flatten(0, 1)
            # Not `baddbmm_`: into rows that lie apart it is a product for each adapter.
            y[self.start : self.stop, start:stop] += (
                part if self.give is None else part.index_select(0, self.give)
            )


@dataclass(eq=False)
class LoraPlan:
    """Which rows of a step get which adapter. Made once a step, used in every layer.

    runs: (first row, last + 1, adapter), in row order, for adapters with products of their own.
    ends: the same for adapters that change the embedding or the head.
    """

    groups: Sequence[Group] = ()
    runs: Sequence[tuple[int, int, Adapter]] = ()
    ends: Sequence[tuple[int, int, Adapter]] = field(default=())

    @classmethod
    def single(cls, adapter: Adapter | None, rows: int) -> LoraPlan:
        """All rows are one adapter's, or the base's."""
        run = [(0, rows, adapter)] if adapter else []
        return cls(runs=run, ends=[r for r in run if r[2].embedding or r[2].head])

    @classmethod
    def of(cls, stacks: Stacks, rows: Sequence[tuple[Adapter, int]]) -> LoraPlan:
        """From adapters and their numbers of rows, in the order that `stacks.order` gave."""
        groups, runs, ends, at = [], [], [], 0
        few: list[tuple[Adapter, int]] = []
        for i, (adapter, n) in enumerate(rows):
            if adapter.embedding or adapter.head:
                ends.append((at, at + n, adapter))
            at += n
            if n > _LONG:
                runs.append((at - n, at, adapter))
                continue
            few.append((adapter, n))
            following = rows[i + 1] if i + 1 < len(rows) else None
            if not following or following[1] > _LONG or following[0].layout != adapter.layout:
                groups.append(stacks.group(few, at - sum(n for _, n in few)))
                few = []
        return cls(groups, runs, ends)

    def apply(self, layer: int, matrix: str, x: Tensor, y: Tensor) -> Tensor:
        """Add every row's own delta of one fused matrix to y, in place; returns y."""
        site = (layer, matrix)
        for group in self.groups:
            group.add(site, x, y)
        for first, last, adapter in self.runs:
            weights = adapter.views.get(site)
            if weights is not None:
                low = x[first:last] @ weights.a[0]
                rank = low.shape[1] // len(weights.parts)
                for i, (start, stop, b) in enumerate(weights.parts):
                    part = low[:, i * rank : (i + 1) * rank]
                    y[first:last, start:stop].addmm_(part, b[0])
        return y

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """[T] → [T, hidden]."""
        h = F.embedding(ids, embedding)
        for first, last, adapter in self.ends:
            own = adapter.embedding
            if own is not None and own.whole is not None:
                h[first:last] = F.embedding(ids[first:last], own.whole)
            elif own is not None and own.a is not None and own.b is not None:
                h[first:last] += F.embedding(ids[first:last], own.a) @ own.b
        return h

    def head(self, rows: Tensor, hidden: Tensor, logits: Tensor) -> Tensor:
        """Correct logits [N, vocab] in place; `hidden` [N, hidden] belong to `rows` [N] of the step."""
        for first, last, adapter in self.ends:
            own = adapter.head
            mine = torch.nonzero((rows >= first) & (rows < last)).flatten()
            if own is None or not len(mine):
                continue
            if own.whole is not None:
                logits[mine] = F.linear(hidden[mine], own.whole)
            elif own.a is not None and own.b is not None:
                logits[mine] += hidden[mine] @ own.a @ own.b
        return logits
