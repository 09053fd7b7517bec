"""Keys and values of running requests: rows of a few sizes, those in use side by side.

A request's row holds 64, 128, 256 … tokens of every layer; when it is full the request moves to one
of twice the size. Rows in use are the first of their size, always: when one is freed, the last one
takes its place. So attention over all decoding requests of a size reads the cache where it lies,
without gathering blocks first, which on a processor costs as much as the attention itself. Keys lie
transposed, which makes reading them with few queries a third faster. What is reserved is counted in
blocks of 16 tokens, against one budget for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.engine.shape import Shape

BLOCK = 16
_SMALLEST = 64


@dataclass(frozen=True, eq=False)
class _Held:
    """Rows of one size: keys [layers, rows, kv_heads, head_dim, capacity], values [layers, rows,
    kv_heads, capacity, head_dim]."""

    keys: Tensor
    values: Tensor

    def copy(self, to: int, other: _Held, row: int, tokens: int) -> None:
        """A row's first tokens from another's."""
        self.keys[:, to, :, :, :tokens] = other.keys[:, row, :, :, :tokens]
        self.values[:, to, :, :tokens] = other.values[:, row, :, :tokens]


@dataclass(eq=False)
class Row:
    """A request's place: row `index` of the tensor for rows of `capacity` tokens."""

    capacity: int
    index: int


class KVCache:
    """Rows for requests of a decoder.

    Args:
        shape: of the decoder.
        tokens: how many may be reserved over all rows.
        context: of the longest row.
    """

    def __init__(
        self, shape: Shape, tokens: int, context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self.kv_heads = shape.kv_heads
        self.group = shape.heads // shape.kv_heads
        self.head_dim = shape.head_dim
        self.device, self.dtype = device, dtype
        self.sizes: list[int] = []
        size = min(_SMALLEST, context)
        while not self.sizes or self.sizes[-1] < context:
            self.sizes.append(min(size, context))
            size *= 2
        self.blocks = max(tokens, self.sizes[-1]) // BLOCK
        self.used = 0
        self._held: dict[int, _Held] = {}
        self._rows: dict[int, list[Row]] = {size: [] for size in self.sizes}

    def size_for(self, tokens: int) -> int:
        """The smallest row for so many tokens."""
        return next(size for size in self.sizes if size >= tokens)

    def take(self, tokens: int) -> Row | None:
        """A row for at least so many tokens, if the budget has it."""
        size = self.size_for(tokens)
        if self.used + _blocks(size) > self.blocks:
            return None
        self.used += _blocks(size)
        row = Row(size, 0)
        self._put(row)
        return row

    def grow(self, row: Row, tokens: int, filled: int) -> bool:
        """Make room for so many tokens in all, keeping `filled`; False if the budget has not."""
        size = self.size_for(tokens)
        if size <= row.capacity:
            return True
        more = _blocks(size) - _blocks(row.capacity)
        if self.used + more > self.blocks:
            return False
        self.used += more
        old = Row(row.capacity, row.index)
        self._rows[old.capacity][old.index] = old
        row.capacity = size
        self._put(row)
        self._held[size].copy(row.index, self._held[old.capacity], old.index, filled)
        self._drop(old)
        return True

    def give(self, row: Row) -> None:
        """Free a row; the last of its size takes its place."""
        self.used -= _blocks(row.capacity)
        self._drop(row)

    def layer(self, capacity: int, layer: int) -> tuple[Tensor, Tensor]:
        """All rows of a size: keys [rows, kv_heads, head_dim, capacity], values [rows, kv_heads,
        capacity, head_dim]."""
        held = self._held[capacity]
        return held.keys[layer], held.values[layer]

    def row(self, row: Row) -> tuple[Tensor, Tensor]:
        """A request's keys [layers, kv_heads, head_dim, capacity] and values [layers, kv_heads,
        capacity, head_dim]."""
        held = self._held[row.capacity]
        return held.keys[:, row.index], held.values[:, row.index]

    def _put(self, row: Row) -> None:
        rows = self._rows[row.capacity]
        row.index = len(rows)
        rows.append(row)
        held = self._held.get(row.capacity)
        if held is not None and len(rows) <= held.keys.shape[1]:
            return
        s, count = self._shape, max(4, 2 * len(rows))

        def zeros(*dims: int) -> Tensor:
            return torch.zeros(
                s.layers, count, s.kv_heads, *dims, dtype=self.dtype, device=self.device
            )

        fresh = _Held(zeros(s.head_dim, row.capacity), zeros(row.capacity, s.head_dim))
        if held is not None:
            before = held.keys.shape[1]
            fresh.keys[:, :before], fresh.values[:, :before] = held.keys, held.values
        self._held[row.capacity] = fresh

    def _drop(self, row: Row) -> None:
        rows = self._rows[row.capacity]
        last = rows.pop()
        if last is not row:
            held = self._held[row.capacity]
            held.copy(row.index, held, last.index, row.capacity)
            last.index = row.index
            rows[last.index] = last


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
