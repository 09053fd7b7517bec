"""A run of a tensor's elements as torch.distributed.checkpoint takes it: as boxes of the tensor.

ZeRO-3 cuts a parameter into equal runs of its elements in row-major order, DTensors into rows. DCP
knows only boxes (offsets and sizes); any run is at most 2n - 1 of them in n dimensions. Told so, a
checkpoint of runs and one of rows are the same tensor in other pieces, and each loads the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that elements `start` to `stop` of a row-major tensor are, in their order."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop - start,))] if shape else [((), ())]
    rest = tuple(shape[1:])
    row = math.prod(rest)
    first, last = -(-start // row), stop // row  # whole rows: first up to last

    def within(index: int, begin: int, end: int) -> list[Box]:
        return [((index, *at), (1, *size)) for at, size in boxes(rest, begin, end)]

    if first > last:
        return within(last, start - last * row, stop - last * row)
    whole: list[Box] = [((first, *(0 for _ in rest)), (last - first, *rest))]
    return [
        *within(first - 1, start - (first - 1) * row, row),
        *(whole if first < last else []),
        *within(last, 0, stop - last * row),
    ]


class FlatPiece(torch.Tensor):
    """This rank's run of a tensor: of the whole's shape, but only `flat` is there.

    For DCP, which saves `flat` and loads into it in place; nothing can be computed with it.

    Args:
        flat: [count], any dtype: a view of where the elements live.
        shape: of the whole tensor.
        start: the run's first element.
    """

    flat: torch.Tensor
    start: int

    def __new__(cls, flat: torch.Tensor, shape: Sequence[int], start: int) -> FlatPiece:
        """Made by torch, which needs to know the whole's shape."""
        made: FlatPiece = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=flat.dtype, device=flat.device
        )
        made.flat, made.start = flat, start
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Nothing."""
        raise NotImplementedError(f"{func} on a piece of a tensor")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """Shape and run."""
        return f"FlatPiece({tuple(self.shape)}, {self.start}:{self.start + self.flat.numel()})"

    def boxes(self) -> list[Box]:
        """Of this run."""
        return boxes(self.shape, self.start, self.start + self.flat.numel())

    # What torch.distributed.checkpoint asks for, by these names.

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size))
            for at, size in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        begin = 0
        for at, size in self.boxes():
            count = math.prod(size)
            if torch.Size(at) == index.offset:
                return self.flat[begin : begin + count].view(size)
            begin += count
        raise ValueError(f"{index} is no box of {self!r}")
