"""Prompts that begin alike are read once: blocks of keys and values, kept by what made them.

A block's name is a hash of the tenant, the adapter and every token up to its end, so that nothing
is shared between tenants or adapters, and a block fits only where all before it is the same too.
Blocks are copied into a request's row when it begins, which costs a thousandth of computing them.
The least recently used go first. (Automatic prefix caching: vLLM, Kwon et al. 2023.)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

import torch

from hybrid.engine.kv_cache import BLOCK, KVCache
from hybrid.engine.scheduler import Sequence
from hybrid.engine.shape import Shape


class PrefixCache:
    """Blocks of 16 tokens of every layer.

    Args:
        shape: of the decoder.
        cache: where running requests' keys and values are.
        tokens: how many are kept at most; 0 keeps none.

    Attributes:
        hits, misses: tokens of prompts that were found here, and that were not.
    """

    def __init__(self, shape: Shape, cache: KVCache, tokens: int) -> None:
        self._cache = cache
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(tokens // BLOCK if shape.layers else 0))
        dims = (len(self._free), shape.layers, shape.kv_heads)
        empty = torch.empty(0, dtype=cache.dtype, device=cache.device)
        self._keys = empty.new_zeros(*dims, shape.head_dim, BLOCK)
        self._values = empty.new_zeros(*dims, BLOCK, shape.head_dim)
        self._most = len(self._free)
        self._enabled = self._most > 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def begin(self, sequence: Sequence) -> None:
        """Fill the row of a request that begins with what is known of its prompt."""
        if not self._enabled:
            return
        found: list[int] = []
        # The last token is always computed: its logits are what is asked for.
        for name in _names(sequence, (sequence.known - 1) // BLOCK):
            place = self._blocks.get(name)
            if place is None:
                break
            found.append(place)
            self._blocks.move_to_end(name)
        tokens = len(found) * BLOCK
        self.hits += tokens
        self.misses += sequence.known - tokens
        if not found:
            return
        assert sequence.row is not None
        keys, values = self._cache.row(sequence.row)
        places = torch.tensor(found, device=self._keys.device)
        # [blocks, layers, kv, hd, 16] → [layers, kv, hd, blocks * 16]
        keys[..., :tokens] = self._keys[places].permute(1, 2, 3, 0, 4).flatten(3)
        values[:, :, :tokens] = self._values[places].permute(1, 2, 0, 3, 4).flatten(2, 3)
        sequence.computed = sequence.cached = tokens

    def keep(self, sequence: Sequence) -> None:
        """Keep the whole blocks of a prompt that has been computed."""
        if not self._enabled or sequence.row is None:
            return
        count = min(min(sequence.computed, len(sequence.prompt)) // BLOCK, self._most)
        fresh: list[int] = []
        places: list[int] = []
        for at, name in enumerate(_names(sequence, count)):
            if name not in self._blocks:
                fresh.append(at)
                places.append(self._place())
                self._blocks[name] = places[-1]
        if not fresh:
            return
        tokens = count * BLOCK
        keys, values = self._cache.row(sequence.row)
        layers, heads, dim, _ = keys.shape
        # [layers, kv, hd, blocks * 16] → [blocks, layers, kv, hd, 16]
        k = keys[..., :tokens].reshape(layers, heads, dim, count, BLOCK).permute(3, 0, 1, 2, 4)
        v = values[:, :, :tokens].reshape(layers, heads, count, BLOCK, dim).permute(2, 0, 1, 3, 4)
        self._keys[places] = k[fresh]
        self._values[places] = v[fresh]

    def _place(self) -> int:
        if self._free:
            return self._free.pop()
        return self._blocks.popitem(last=False)[1]


def _names(sequence: Sequence, count: int) -> list[bytes]:
    """Of the first blocks of a request."""
    adapter = sequence.adapter.digest if sequence.adapter else ""
    name = hashlib.blake2b(f"{sequence.tenant}\0{adapter}".encode(), digest_size=16).digest()
    names = []
    for at in range(0, count * BLOCK, BLOCK):
        tokens = array("q", sequence.tokens(at, at + BLOCK)).tobytes()
        name = hashlib.blake2b(name + tokens, digest_size=16).digest()
        names.append(name)
    return names
