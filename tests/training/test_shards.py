"""The data cursor: every sequence once an epoch whoever asks, across shards, documents known."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config import TrainingConfig
from hybrid.errors import DataError
from hybrid.training.packing import IGNORE
from hybrid.training.parallel import World
from hybrid.training.shards import ShardSet, write_shard
from hybrid.training.step import _dealt

Documents = list[list[int]]
"""Lengths of documents, shard by shard."""
SHARDS: st.SearchStrategy[Documents] = st.lists(
    st.lists(st.integers(1, 40), max_size=8), min_size=1, max_size=4
).filter(lambda shards: sum(map(sum, shards)) >= 2)
FOLDERS = TemporaryDirectory()


def make(shards: Documents, folder: Path) -> ShardSet:
    """A stream whose token n is the number n, so that a token says where it is from."""
    folder.mkdir(parents=True)
    entries, first = [], 0
    for number, lengths in enumerate(shards):
        tokens = np.arange(first, first + sum(lengths), dtype=np.uint32)
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        entries.append(write_shard(folder, number, tokens, offsets))
        first += len(tokens)
    (folder / "index.json").write_text(str({"shards": entries}).replace("'", '"'))
    return ShardSet(folder)


@cache
def stream(shards: tuple[tuple[int, ...], ...]) -> ShardSet:
    return make([list(s) for s in shards], Path(FOLDERS.name) / str(abs(hash(shards))))


def settings(length: int, **fields: Any) -> TrainingConfig:
    return TrainingConfig(sequence_length=length, **fields)


@given(
    shards=SHARDS,
    length=st.integers(8, 33),
    rows=st.integers(1, 5),
    batches=st.integers(1, 5),
    size=st.integers(1, 6),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_ranks_together_see_each_sequence_once_an_epoch(
    shards: Documents, length: int, rows: int, batches: int, size: int, epoch: int, seed: int
) -> None:
    data = stream(tuple(map(tuple, shards)))
    config = settings(length, micro_batch=rows, micro_batches=batches)
    count, a_step = data.sequences(length), rows * batches
    first, last = epoch * count, (epoch + 1) * count
    seen: list[tuple[int, int, int]] = []
    for step in range(first // a_step, -(-last // a_step)):
        dealt = []
        for rank in range(size):
            world = World(rank=rank, size=size, device=torch.device("cpu"))
            mine = list(
                _dealt(lambda i, s=step: data.micro_batch(s, i, config, seed), batches, world)
            )  # type: ignore[misc]
            dealt.append(len(mine))
            for index, batch in mine:
                for row, (tokens, labels) in enumerate(
                    zip(batch["input_ids"], batch["labels"], strict=True)
                ):
                    real = labels[labels != IGNORE]
                    if index >= batches:
                        assert real.size == 0, "padding has no weight"
                        continue
                    assert (real == tokens[: real.size] + 1).all()
                    k = (step * batches + index) * rows + row
                    if first <= k < last:
                        seen.append((k, int(tokens[0]), real.size))
        assert len(set(dealt)) == 1, "collectives need as many micro-batches on every rank"
    assert len({k for k, _, _ in seen}) == len(seen) == count
    assert sorted(start for _, start, _ in seen) == [n * length for n in range(count)]
    assert sum(real for _, _, real in seen) == data.tokens - 1


@given(shards=SHARDS, length=st.integers(8, 33), rows=st.integers(1, 4))
def test_isolated_documents_are_those_that_were_written(
    shards: Documents, length: int, rows: int
) -> None:
    data = stream(tuple(map(tuple, shards)))
    config = settings(length, micro_batch=rows, packing="isolate", eval_sequences=10**6)
    owner, place = [], []
    for number, n in enumerate(d for shard in shards for d in shard):
        owner += [number] * n
        place += range(n)
    for index in range(-(-data.sequences(length) // rows)):
        batch = data.eval_batch(index, config)
        for row in range(rows):
            start = (index * rows + row) * length
            for t in range(min(length, data.tokens - start)):
                at, position = start + t, batch["position_ids"][row, t]
                # As far into the document as it reaches back within this sequence.
                assert position == min(place[at], t)
                follows = at + 1 < data.tokens and owner[at + 1] == owner[at]
                assert batch["labels"][row, t] == (at + 1 if follows else IGNORE)


@given(shards=SHARDS, length=st.integers(8, 33), most=st.integers(1, 9))
def test_what_is_evaluated_does_not_depend_on_the_micro_batch(
    shards: Documents, length: int, most: int
) -> None:
    data = stream(tuple(map(tuple, shards)))
    rows = min(data.sequences(length), most)

    def labels(micro_batch: int) -> list[int]:
        config = settings(length, micro_batch=micro_batch, eval_sequences=most)
        batches = [data.eval_batch(n, config) for n in range(-(-rows // micro_batch))]
        assert all(batch["labels"].shape == (micro_batch, length) for batch in batches)
        return [int(n) for batch in batches for n in batch["labels"].flat if n != IGNORE]

    assert labels(1) == labels(3) == labels(4)
    assert len(labels(1)) == min(data.tokens - 1, rows * length)


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(raw[:-3])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "head":
        path.write_bytes(b"\0" * 20 + raw[20:])
    elif how == "another":
        np.save(path, np.zeros(7, dtype=np.uint32))


@pytest.mark.parametrize("how", ["gone", "short", "empty", "head", "another"])
@pytest.mark.parametrize("name", ["shard-00001.tokens.npy", "shard-00000.offsets.npy"])
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, name: str, how: str) -> None:
    make([[5, 9], [20]], tmp_path / "d")
    damage(tmp_path / "d" / name, how)
    with pytest.raises(DataError, match=rf"d/{name}: (no such|cut short|shape)"):
        ShardSet(tmp_path / "d")


def test_offsets_of_another_shard_are_refused(tmp_path: Path) -> None:
    make([[5, 9], [20, 1]], tmp_path / "d")
    first, second = (tmp_path / f"d/shard-0000{n}.offsets.npy" for n in (0, 1))
    first.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match=r"shard-00000\.offsets\.npy: ends at 21, .* 14 tokens"):
        ShardSet(tmp_path / "d")


def test_a_damaged_index_is_refused_by_name(tmp_path: Path) -> None:
    make([[5, 9]], tmp_path / "d")
    for how, says in (("short", "damaged"), ("gone", "no such file")):
        damage(tmp_path / "d/index.json", how)
        with pytest.raises(DataError, match=rf"d/index\.json: {says}"):
            ShardSet(tmp_path / "d")
