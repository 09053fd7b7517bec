"""Token shards and the data cursor: which tokens a micro-batch holds, from its number alone.

Documents, each closed with the end-of-text token, lie end to end in memory-mapped `.npy` shards
with the offsets at which they begin. Sequence n is the window [n·L, n·L + L] of that stream; each
epoch visits all of them in an order drawn from (seed, epoch). Nothing but the step number needs to
be remembered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid.config import TrainingConfig
from hybrid.errors import DataError
from hybrid.training.packing import IGNORE, Batch, isolate

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def write_shard(
    folder: Path, number: int, tokens: Tokens, offsets: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """Write one shard as a pair of `.npy` files.

    Args:
        tokens: uint16 or uint32 [tokens], every document closed by the end-of-text token.
        offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].

    Returns:
        Its entry of the index: name, tokens, documents, sha256 over the two arrays' bytes.
    """
    name = f"shard-{number:05d}"
    np.save(folder / f"{name}.tokens.npy", tokens)
    np.save(folder / f"{name}.offsets.npy", offsets)
    digest = hashlib.sha256(tokens.astype("<u4").tobytes())
    digest.update(offsets.astype("<i8").tobytes())
    return {
        "name": name,
        "tokens": len(tokens),
        "documents": len(offsets) - 1,
        "sha256": digest.hexdigest(),
    }


class ShardSet:
    """The token stream of one corpus, memory-mapped, with deterministic access.

    Raises:
        DataError: the index or a shard is missing, cut short, or not what the index says; the
            message names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.index = _read_index(folder / "index.json")
        entries = [e for e in self.index["shards"] if e["tokens"]]  # an empty array has no map
        self._shards: list[Tokens] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        for entry in entries:
            name = entry["name"]
            self._shards.append(_mapped(folder / f"{name}.tokens.npy", entry["tokens"]))
            path = folder / f"{name}.offsets.npy"
            offsets = _mapped(path, entry["documents"] + 1)
            if offsets[-1] != entry["tokens"]:
                raise DataError(
                    f"{path}: ends at {offsets[-1]}, its shard has {entry['tokens']} tokens;"
                    f" {_AGAIN}"
                )
            self._offsets.append(offsets)
        self._starts = np.cumsum([0, *map(len, self._shards)])
        self.tokens = int(self._starts[-1])
        self._order = lru_cache(maxsize=2)(_permutation)  # a batch may straddle two epochs

    def sequences(self, length: int) -> int:
        """Windows of `length` inputs; the last may be padded."""
        return -(-(self.tokens - 1) // length)

    def micro_batch(self, step: int, index: int, config: TrainingConfig, seed: int) -> Batch:
        """Micro-batch `index` of step `step` (both from 0), the same on whatever rank asks."""
        count = self.sequences(config.sequence_length)
        first = (step * config.micro_batches + index) * config.micro_batch
        windows = []
        for k in range(first, first + config.micro_batch):
            epoch, position = divmod(k, count)
            windows.append(int(self._order(seed, epoch, count)[position]))
        return self._gather(windows, config)

    def eval_batch(self, index: int, config: TrainingConfig) -> Batch:
        """Micro-batch `index` of the corpus in its own order.

        Rows past the end, and past `eval_sequences`, are padding: what is evaluated does not
        depend on the micro-batch.
        """
        first, end = index * config.micro_batch, self.sequences(config.sequence_length)
        rows = range(first, first + config.micro_batch)
        return self._gather([n if n < config.eval_sequences else end for n in rows], config)

    def _gather(self, windows: Iterable[int], config: TrainingConfig) -> Batch:
        length = config.sequence_length
        starts = [n * length for n in windows]
        rows = [self._window(start, start + length + 1) for start in starts]
        inputs = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full((len(rows), length), IGNORE, dtype=np.int64)
        for i, row in enumerate(rows):
            inputs[i, : min(len(row), length)] = row[:length]
            labels[i, : max(len(row) - 1, 0)] = row[1:]
        batch: Batch = {"input_ids": inputs, "labels": labels}
        if config.packing == "isolate":
            return isolate(batch, [self._documents(start, start + length) for start in starts])
        return batch

    def _window(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [start, end) of the stream, as far as there are any, across shards."""
        parts = [shard[a:b].astype(np.int64) for shard, a, b in self._parts(start, end)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _documents(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Where documents begin in the window: tokens after `start`, in [1, end - start]."""
        begins = []
        for number, first in enumerate(self._starts[:-1]):
            if first > end or self._starts[number + 1] <= start:
                continue
            known = self._offsets[number][:-1]
            low, high = np.searchsorted(known, (start - first + 1, end - first + 1))
            begins.append(np.asarray(known[low:high]) + first - start)
        return np.concatenate(begins) if begins else np.zeros(0, dtype=np.int64)

    def _parts(self, start: int, end: int) -> Iterable[tuple[Tokens, int, int]]:
        """The shards of [start, end) of the stream, with the part's bounds within each."""
        end = min(end, self.tokens)
        while start < end:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
            base = int(self._starts[shard])
            stop = min(end, int(self._starts[shard + 1]))
            yield self._shards[shard], start - base, stop - base
            start = stop


def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {_AGAIN}") from None
    except ValueError as e:
        raise DataError(f"{path}: damaged ({e}); {_AGAIN}") from None
    return index


def _mapped(path: Path, length: int) -> npt.NDArray[Any]:
    """The array of a `.npy` file, mapped; its size is checked, its content is not read."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {_AGAIN}") from None
    except (ValueError, EOFError) as e:  # NumPy: no header, or a file shorter than it says
        raise DataError(f"{path}: cut short or damaged ({e}); {_AGAIN}") from None
    if array.shape != (length,):
        raise DataError(f"{path}: shape {array.shape}, where the index says ({length},); {_AGAIN}")
    return array


_AGAIN = "remove the folder two levels up, and the next run makes it anew"
