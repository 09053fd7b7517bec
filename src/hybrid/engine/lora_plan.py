"""LoRA over a batch of different adapters: rows sorted by adapter, each weight read once a layer.

Offsets are made once a step and used in every layer; rows of the base come last and cost nothing;
nothing is multiplied that is masked out afterwards. A kernel reads each adapter's weights where
they are, for eight rows at a time. Without it adapters of one layout lie side by side in a stack:
few rows each are one batched product for A and one for each part of B, and a long run of rows (a
prompt) gets two products of its own. (Compare S-LoRA, Sheng et al. 2023, and Punica, Chen et al.
2023, which gather on a GPU.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.engine.kernels import kernels, usable
from hybrid.engine.lora import Adapter, Layout, Site, Views

_PIECE = 8
"""Rows that the kernel takes at a time; without it, more than this are products of their own."""


def _together(adapter: Adapter, rows: int) -> bool:
    """Whether an adapter's rows are done together with other adapters'."""
    return rows <= _PIECE or usable(adapter.row)


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
            if _together(adapter, rows):
                groups.setdefault(adapter.layout, []).append(adapter)
        ordered = [
            a
            for few in groups.values()
            for a in (few if usable(few[0].row) else self._stack(few[0]).arrange(few))
        ]
        return ordered + [a for a, rows in counts.items() if not _together(a, rows)]

    def _stack(self, adapter: Adapter) -> Stack:
        layout = adapter.layout
        if layout not in self._stacks:
            self._stacks[layout] = Stack(layout, adapter.row)
        return self._stacks[layout]

    def group(self, few: Sequence[tuple[Adapter, int]], start: int) -> Group | Pointed:
        """The rows from `start` of adapters of one layout, in the order that `order` gave."""
        if usable(few[0][0].row):
            return Pointed.of(few, start)
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

    take: int64 [count * width], rows relative to `start`; give: int64 [stop - start], where a row
    is among the padded ones; both None when every adapter has `width` rows.
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


@dataclass(frozen=True, eq=False)
class Pointed:
    """The same for the kernel, which reads each adapter's weights where they are.

    starts: int64 [count + 1], first rows; bases: int64 [count], addresses of the adapters' rows.
    """

    layout: Layout
    starts: Tensor
    bases: Tensor

    @classmethod
    def of(cls, few: Sequence[tuple[Adapter, int]], start: int) -> Pointed:
        """From adapters and their numbers of rows."""
        pieces = [
            (min(_PIECE, n - at), adapter.row.data_ptr())
            for adapter, n in few
            for at in range(0, n, _PIECE)
        ]
        starts = torch.tensor([*accumulate((n for n, _ in pieces), initial=start)])
        return cls(few[0][0].layout, starts, torch.tensor([base for _, base in pieces]))

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        """Add every row's own delta to y, in place."""
        known, library = self.layout.tables.get(site), kernels()
        if known is None or library is None:
            return
        (n_in, rank, parts, a), table = known
        at = table.data_ptr()
        library.lora(
            x.data_ptr(), y.data_ptr(), self.starts.data_ptr(), len(self.bases),
            self.bases.data_ptr(), n_in, y.shape[1], rank, parts, a,
            at, at + 8 * parts, at + 16 * parts,
        )  # fmt: skip


@dataclass(eq=False)
class LoraPlan:
    """Which rows of a step get which adapter. Made once a step, used in every layer.

    runs: (first row, last + 1, adapter), in row order, for adapters with products of their own.
    ends: the same for adapters that change the embedding or the head.
    """

    groups: Sequence[Group | Pointed] = ()
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
            if not _together(adapter, n):
                runs.append((at - n, at, adapter))
                continue
            few.append((adapter, n))
            following = rows[i + 1] if i + 1 < len(rows) else None
            if not following or not _together(*following) or following[0].layout != adapter.layout:
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
        """Correct logits [N, vocab] in place; `hidden` [N, hidden] are of the step's `rows` [N]."""
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
