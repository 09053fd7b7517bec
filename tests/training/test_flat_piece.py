"""Runs of elements as boxes: every element once, in order; and what DCP is told of a piece."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from hybrid.training.flat_piece import FlatPiece, boxes


@given(st.data(), st.lists(st.integers(1, 5), max_size=4))
def test_boxes_are_the_run_in_its_order(data: st.DataObject, shape: list[int]) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).view(shape)
    found = [
        whole[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))].flatten().tolist()
        for at, size in boxes(shape, start, stop)
    ]
    assert [n for part in found for n in part] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_piece_gives_views_of_where_it_lives() -> None:
    flat = torch.arange(5.0)
    piece = FlatPiece(flat, (3, 4), 3)  # the last of row 0, then row 1
    assert piece.boxes() == [((0, 3), (1, 1)), ((1, 0), (1, 4))]
    piece.__get_tensor_shard__(MetadataIndex("w", torch.Size((1, 0)))).fill_(7.0)
    assert flat.tolist() == [0.0, 7.0, 7.0, 7.0, 7.0]
    assert [item.tensor_data.size for item in piece.__create_write_items__("w", piece)] == [
        torch.Size((3, 4))
    ] * 2
    with pytest.raises(ValueError, match="is no box"):
        piece.__get_tensor_shard__(MetadataIndex("w", torch.Size((2, 0))))
    with pytest.raises(NotImplementedError):
        piece + 1
