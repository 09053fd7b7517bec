"""Keys and values of running requests: preallocated slots, one a request.

A slot holds `context` tokens of every layer. A later layout may cut slots into blocks; the rest of
the engine knows only `take`, `give` and the attention functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.engine.model import Decoder


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a step belong to one request and continue its slot at `offset`."""

    start: int
    stop: int
    slot: int
    offset: int


class KVCache:
    """Slots for `rows` requests of `context` tokens.

    keys, values: a tensor a layer, [rows, kv_heads, context, head_dim].
    """

    def __init__(self, decoder: Decoder, rows: int, context: int) -> None:
        shape = decoder.shape
        dims = (rows, shape.kv_heads, context, shape.head_dim)
        self.keys = [
            torch.zeros(dims, dtype=decoder.dtype, device=decoder.device)
            for _ in range(shape.layers)
        ]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.rows, self.context = rows, context
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def take(self) -> int:
        """A free slot; there must be one."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def attention(self, spans: Sequence[Span]) -> Attention:
        """The attention of one step over these spans."""
        return Attention(self, spans)


class Attention:
    """Causal attention of a step: decoding rows together, each longer span on its own."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._long = [s for s in spans if s.stop - s.start > 1]
        single = [s for s in spans if s.stop - s.start == 1]
        device = cache.keys[0].device
        self._rows = torch.tensor([s.start for s in single], device=device)
        self._slots = torch.tensor([s.slot for s in single], device=device)
        self._offsets = torch.tensor([s.offset for s in single], device=device)
        self._width = max((s.offset for s in single), default=-1) + 1
        if single:
            reach = torch.arange(self._width, device=device)[None] <= self._offsets[:, None]
            self._mask = reach[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `hybrid.engine.model.Attend`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        out = torch.empty_like(q)
        if self._width:
            rows = self._rows
            keys[self._slots, :, self._offsets] = k[rows]
            values[self._slots, :, self._offsets] = v[rows]
            past_k = keys[:, :, : self._width].index_select(0, self._slots)
            past_v = values[:, :, : self._width].index_select(0, self._slots)
            o = F.scaled_dot_product_attention(
                q[rows][:, :, None], past_k, past_v, attn_mask=self._mask, enable_gqa=True
            )
            out[rows] = o[:, :, 0]
        for s in self._long:
            end = s.offset + s.stop - s.start
            keys[s.slot, :, s.offset : end] = k[s.start : s.stop].transpose(0, 1)
            values[s.slot, :, s.offset : end] = v[s.start : s.stop].transpose(0, 1)
            mask = None
            if s.offset:
                at = torch.arange(s.offset, end, device=q.device)[:, None]
                mask = torch.arange(end, device=q.device)[None] <= at
            o = F.scaled_dot_product_attention(
                q[s.start : s.stop].transpose(0, 1)[None],
                keys[s.slot, :, :end][None],
                values[s.slot, :, :end][None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[s.start : s.stop] = o[0].transpose(0, 1)
        return out.flatten(1)
