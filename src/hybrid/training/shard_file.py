"""One rank's part of a checkpoint: a safetensors file, made from and read by DCP's plans.

torch.distributed.checkpoint decides who writes which piece of which tensor, and who needs which
piece on another world size; its own writer passes every tensor through torch.save (several copies
under Python's lock). Here the pieces are laid out as a safetensors file in one staging buffer,
which is then hashed and written in large blocks without the lock. What is not a tensor is pickled
by DCP and stored as bytes.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hybrid.errors import CheckpointError
from hybrid.training.storage import Storage

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGN = 64
_NAMES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Image:
    """The bytes of a shard file before they are gathered: its header, then pieces in this order.

    Attributes:
        header: length and JSON, padded with spaces to a multiple of 64 bytes.
        pieces: detached tensors on any device; together `size - len(header)` bytes.
        size: of the whole file.
    """

    header: bytes
    pieces: tuple[torch.Tensor, ...]
    size: int

    @classmethod
    def of(cls, plan: SavePlan, planner: DefaultSavePlanner) -> Image:
        """Lay out what `plan` has this rank write.

        Raises:
            CheckpointError: a tensor's dtype has no name in safetensors.
        """
        found: list[tuple[str, torch.Tensor]] = []
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                data = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
            elif data.dtype not in DTYPES:
                raise CheckpointError(f"{item.index.fqn}: {data.dtype} cannot be stored")
            found.append((_key(item.index), data.detach()))
        found.sort(key=lambda entry: -entry[1].itemsize)  # so that each piece is aligned
        entries, at = {}, 0
        for key, tensor in found:
            entries[key] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        raw = json.dumps(entries).encode()
        raw += b" " * (-(8 + len(raw)) % _ALIGN)
        header = struct.pack("<Q", len(raw)) + raw
        return cls(header=header, pieces=tuple(t for _, t in found), size=len(header) + at)

    def blocks(self) -> Iterator[memoryview]:
        """The file's bytes piece by piece, straight from the tensors."""
        yield memoryview(self.header)
        for piece in self.pieces:
            if piece.numel():
                flat = piece.cpu().contiguous().reshape(-1)
                yield flat.view(torch.uint8).numpy().data


class Staging:
    """The memory that a state is copied to while training goes on: kept from save to save.

    It is as large as this rank's shard file; pinned where there is a GPU, else of huge pages (the
    first save would otherwise spend most of its time on page faults).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.empty(0, dtype=torch.uint8)

    def copy(self, image: Image) -> memoryview:
        """Copy an image; on return its tensors may change. Valid until the next call.

        Returns:
            The whole file's bytes.
        """
        if self._pool.numel() < image.size:
            # Pickled numbers vary in length from save to save, by less than this.
            self._pool = self._memory(image.size + (1 << 16))
        pool, at = self._pool, len(image.header)
        pool[:at] = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
        for piece in image.pieces:
            place = pool[at : at + piece.nbytes].view(piece.dtype).view(piece.shape)
            place.copy_(piece, non_blocking=True)
            at += piece.nbytes
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return pool[:at].numpy().data

    def _memory(self, size: int) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        mapped = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def owners(plans: list[SavePlan]) -> dict[MetadataIndex, int]:
    """Which rank's file holds which piece."""
    return {item.index: rank for rank, plan in enumerate(plans) for item in plan.items}


def _key(index: MetadataIndex) -> str:
    """A piece's name in its file: the tensor's, with the offsets of all pieces but the first."""
    if index.offset is None or not any(index.offset):
        return index.fqn
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


class ShardReader(StorageReader):
    """Reads a committed checkpoint for `torch.distributed.checkpoint.load`.

    Args:
        folder: of the checkpoint, below the storage.
        metadata: name of the file with DCP's pickled metadata.
        shards: names of the shard files, in order of the rank that wrote them.
    """

    def __init__(self, storage: Storage, folder: str, metadata: str, shards: list[str]) -> None:
        self.storage = storage
        self.folder = folder
        self._metadata = metadata
        self._shards = shards
        self._owners: dict[MetadataIndex, int] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader reads one checkpoint: there is nothing to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What DCP has written about every tensor. Pickled: verify its digest first."""
        raw = self.storage.read(f"{self.folder}/{self._metadata}")
        metadata: Metadata = pickle.loads(raw)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take note of which file holds what."""
        self._owners = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the pieces of `plan`, of each only the rows that are asked for."""
        by_shard: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            by_shard.setdefault(self._owners[item.storage_index], []).append(item)
        for shard, items in by_shard.items():
            path = f"{self.folder}/{self._shards[shard]}"
            (length,) = struct.unpack("<Q", self.storage.read(path, 0, 8))
            header = json.loads(self.storage.read(path, 8, 8 + length))
            for item in items:
                self._read(path, 8 + length, header[_key(item.storage_index)], item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, path: str, base: int, entry: dict[str, Any], item: ReadItem, planner: LoadPlanner
    ) -> None:
        start, end = (base + offset for offset in entry["data_offsets"])
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(self.storage.read(path, start, end)))
            return
        shape, offsets, lengths = entry["shape"], list(item.storage_offsets), list(item.lengths)
        if shape and shape[0]:
            row = (end - start) // shape[0]
            start, end = start + offsets[0] * row, start + (offsets[0] + lengths[0]) * row
            shape, offsets = [lengths[0], *shape[1:]], [0, *offsets[1:]]
        dtype = _NAMES[entry["dtype"]]
        if math.prod(shape):
            tensor = torch.frombuffer(self.storage.read(path, start, end), dtype=dtype).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Readers are made, not chosen by an address."""
        return False
