"""Attention of one step: all decoding requests of a size at once, each piece of a prompt by itself.

On a processor both are kernels of our own (kernels.c). Elsewhere decoding, which reads every key
and value for one query, is two batched products over the cache as it lies (measured on two cores:
215 µs for 32 rows of 90 tokens, torch's fused kernel takes 380). Masks are additive and made once a
step. (Continuous batching: Orca, Yu et al. 2022; prompts in pieces: Sarathi, Agrawal et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.engine.kernels import kernels, usable
from hybrid.engine.kv_cache import KVCache, Row
from hybrid.engine.shape import Shape


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a step belong to one request and continue its cache at `offset`."""

    start: int
    stop: int
    row: Row
    offset: int


@dataclass(frozen=True, eq=False)
class _Decoding:
    """Requests of one size that run one token each.

    rows: int64 [n], where they are in the step.
    places, offsets: int64 [n], where their keys and values go.
    back: int64 [count], whose row of the cache it is; None if the rows lie in the same order.
    count: rows of the cache that are read.
    masks: by window, additive [count * kv_heads, 1, width].
    """

    capacity: int
    rows: Tensor
    places: Tensor
    offsets: Tensor
    back: Tensor | None
    count: int
    width: int
    masks: dict[int | None, Tensor]


class _Fused:
    """Requests of one size in one kernel, with no masks and nothing gathered: all of them decode
    one token, or all run a piece of a prompt."""

    def __init__(self, cache: KVCache, capacity: int, spans: Sequence[Span]) -> None:
        library = kernels()
        assert library is not None
        prompts = spans[0].stop - spans[0].start > 1
        rows = [[s.start, s.stop, s.row.index, s.offset] for s in spans]
        self._places = torch.tensor(rows).T.contiguous()
        at = [column.data_ptr() for column in self._places]
        self._where = at if prompts else [at[0], *at[2:]]
        self._kernel = library.prompt_attention if prompts else library.decode_attention
        floats = 8 * (capacity + 2 * cache.head_dim) if prompts else (
            cache.group * (capacity + cache.head_dim)
        )  # fmt: skip
        self._cache, self._capacity = cache, capacity
        self._threads = torch.get_num_threads()
        self._scratch = torch.empty(self._threads * floats)

    def __call__(self, layer: int, heads: Tensor, out: Tensor, window: int | None) -> None:
        """Write out [T, q_heads, hd] of these requests' rows."""
        _, q_heads, dim = out.shape
        keys, values = self._cache.layer(self._capacity, layer)
        self._kernel(
            heads.data_ptr(), *self._where, self._places.shape[1], keys.data_ptr(),
            values.data_ptr(), self._capacity, q_heads, self._cache.kv_heads, dim, window or 0,
            dim**-0.5, self._threads, self._scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip


class Attention:
    """A step's `hybrid.engine.model.Attend`.

    Args:
        cache: where keys and values are kept.
        spans: rows of the step.
        windows: of each layer, see `Shape`.
    """

    def __init__(
        self, cache: KVCache, spans: Sequence[Span], windows: Sequence[int | None]
    ) -> None:
        self._cache = cache
        self._windows = windows
        single: dict[int, list[Span]] = {}
        long: dict[int, list[Span]] = {}
        for s in spans:
            to = single if s.stop - s.start == 1 else long
            to.setdefault(s.row.capacity, []).append(s)
        self._fused: list[_Fused] = []
        self._single: list[_Decoding] = []
        self._long: list[Span] = []
        if usable(torch.empty(0, device=cache.device, dtype=cache.dtype)):
            groups = [*single.items(), *long.items()]
            self._fused = [_Fused(cache, size, found) for size, found in groups]
        else:
            self._single = [self._decoding(size, found) for size, found in single.items()]
            self._long = [s for found in long.values() for s in found]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """See `hybrid.engine.model.Attend`."""
        kv = self._cache.kv_heads
        n, every, dim = heads.shape
        q = every - 2 * kv
        out = heads.new_empty(n, q, dim)
        for f in self._fused:
            f(layer, heads, out, self._windows[layer])
        for d in self._single:
            mine = heads.index_select(0, d.rows)
            keys, values = self._cache.layer(d.capacity, layer)
            keys[d.places, :, :, d.offsets] = mine[:, q : q + kv]
            values[d.places, :, d.offsets] = mine[:, q + kv :]
            asked = mine[:, :q] if d.back is None else mine[:, :q].index_select(0, d.back)
            scores = torch.baddbmm(
                d.masks[self._windows[layer]],
                asked.reshape(d.count * kv, -1, dim),
                keys[: d.count].flatten(0, 1)[:, :, : d.width],
                alpha=dim**-0.5,
            )
            o = torch.bmm(scores.softmax(-1), values[: d.count].flatten(0, 1)[:, : d.width])
            o = o.view(d.count, q, dim)
            if d.back is not None:
                o = o.index_select(0, d.places)
            out.index_copy_(0, d.rows, o)
        for s in self._long:
            keys, values = (t[s.row.index] for t in self._cache.layer(s.row.capacity, layer))
            end = s.offset + s.stop - s.start
            k, v = heads[s.start : s.stop, q:].transpose(0, 1).chunk(2)
            keys[:, :, s.offset : end] = k.transpose(1, 2)
            values[:, s.offset : end] = v
            if s.offset:
                k, v = keys[:, :, :end].transpose(1, 2).contiguous(), values[:, :end]
            mask = self._mask(s.offset, end, self._windows[layer])
            o = F.scaled_dot_product_attention(
                heads[s.start : s.stop, :q].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[s.start : s.stop] = o[0].transpose(0, 1)
        return out.flatten(1)

    def _mask(self, offset: int, end: int, window: int | None) -> Tensor | None:
        """For a piece of a prompt; None where plain causal will do."""
        if not offset and (window is None or end <= window):
            return None
        key = (offset, end, window)
        if key not in self._masks:
            at = torch.arange(offset, end, device=self._device)[:, None]
            seen = torch.arange(end, device=self._device)[None]
            self._masks[key] = self._additive(_reach(at, seen, window))
        return self._masks[key]

    def _decoding(self, size: int, spans: Sequence[Span]) -> _Decoding:
        device, n = self._device, len(spans)
        indices = [s.row.index for s in spans]
        places = torch.tensor(indices, device=device)
        offsets = torch.tensor([s.offset for s in spans], device=device)
        rows = torch.tensor([s.start for s in spans], device=device)
        back = None
        width, count = max(s.offset for s in spans) + 1, max(indices) + 1
        ends = offsets
        if indices != list(range(n)):
            # Rows of the cache that are not decoding now are read too; their outcome is not used.
            back = torch.zeros(count, dtype=torch.long, device=device)
            back[places] = torch.arange(n, device=device)
            ends = offsets[back]
        seen = torch.arange(width, device=device)[None, None]
        at = ends[:, None, None]
        kv_heads = self._cache.kv_heads
        masks = {
            w: self._additive(_reach(at, seen, w)).repeat_interleave(kv_heads, 0)
            for w in set(self._windows)
        }
        return _Decoding(size, rows, places, offsets, back, count, width, masks)

    @property
    def _device(self) -> torch.device:
        return self._cache.device

    def _additive(self, reach: Tensor) -> Tensor:
        """0 where it is true, -inf elsewhere."""
        zeros = torch.zeros(reach.shape, dtype=self._cache.dtype, device=self._device)
        return zeros.masked_fill_(~reach, -torch.inf)


class Once:
    """Attention over tokens that are not kept, for scoring and embedding.

    Args:
        shape: of the decoder.
        positions: int64 [T].
        sees: bool [T, T], which token attends to which, windows left aside; by default each to
            itself and to those before.
    """

    def __init__(self, shape: Shape, positions: Tensor, sees: Tensor | None = None) -> None:
        self._shape = shape
        at, seen = positions[:, None], positions[None]
        self._masks = {
            w: None
            if sees is None and (w is None or len(positions) <= w)
            else _reach(at, seen, w) & (seen <= at if sees is None else sees)
            for w in set(shape.windows)
        }

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """See `hybrid.engine.model.Attend`."""
        s = self._shape
        q, k, v = torch.split(heads.transpose(0, 1), [s.heads, s.kv_heads, s.kv_heads])
        mask = self._masks[s.windows[layer]]
        o = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return o[0].transpose(0, 1).flatten(1)


def _reach(at: Tensor, seen: Tensor, window: int | None) -> Tensor:
    """Whether a token at a position attends to another: itself and before, within the window."""
    reach = seen <= at
    return reach if window is None else reach & (seen > at - window)
