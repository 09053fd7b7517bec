"""torch's flight recorder: which collectives this process has entered and which are unfinished.

torch keeps the last TORCH_FR_BUFFER_SIZE (2,000 by default) collectives of gloo and of NCCL in
memory, with sequence numbers that count alike on every rank of a group. `torch.distributed.debug`
serves them over HTTP to whoever asks, without authentication and from rank 0; here they are read
in the process itself. The only file that touches torch's private names for it.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _world

DEFAULT_GROUP = "0"
"""The recorder's name for the group of all ranks."""

_c10d: Any = _distributed_c10d  # the stubs lack the recorders


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective this rank entered and has not finished.

    Attributes:
        group: the process group's name; `DEFAULT_GROUP` is all ranks.
        seq: counts the group's collectives, the same on each of its ranks.
        name: backend and operation, such as `gloo:all_reduce`.
        sizes: of the inputs.
        seconds: since it was entered.
        frames: where it was called, innermost first, as `file:line function`.
    """

    group: str
    seq: int
    name: str
    sizes: list[list[int]]
    seconds: float
    frames: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Flight:
    """What the recorder knows on this rank.

    Attributes:
        unfinished: collectives entered and not finished, oldest first.
        entered: the last sequence number entered, by `backend:group`.
        groups: members of each process group this rank belongs to.
    """

    unfinished: list[Collective]
    entered: dict[str, int]
    groups: dict[str, list[int]]

    def as_record(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def group_key(name: str, group: str) -> str:
    """`backend:group` of a collective's name: each backend of a group counts for itself."""
    return f"{name.partition(':')[0]}:{group}"


def read_flight() -> Flight:
    """The recorder's state; empty without a process group."""
    if not dist.is_initialized():
        return Flight(unfinished=[], entered={}, groups={})
    unfinished: list[Collective] = []
    entered: dict[str, int] = {}
    for dump in _dumps():
        for entry in dump.get("entries", []):
            if entry["is_p2p"]:
                continue
            group, seq = entry["process_group"][0], entry["collective_seq_id"]
            name = str(entry["profiling_name"])
            key = group_key(name, group)
            entered[key] = max(entered.get(key, 0), seq)
            if not entry["retired"] and entry["state"] != "completed":
                unfinished.append(
                    Collective(
                        group=group,
                        seq=seq,
                        name=name,
                        sizes=[list(size) for size in entry["input_sizes"]],
                        seconds=round(time.time() - entry["time_created_ns"] / 1e9, 3),
                        frames=[
                            f"{f['filename']}:{f['line']} {f['name']}"
                            for f in entry.get("frames", [])
                        ],
                    )
                )
    groups = {
        str(name): sorted(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()
    }
    return Flight(unfinished=unfinished, entered=entered, groups=groups)


def _dumps() -> list[dict[str, Any]]:
    """The recorders' own dumps. They are pickled by torch in this very process."""
    dumps = [pickle.loads(_c10d._dump_fr_trace(True, True, False))]
    if dist.is_nccl_available():
        dumps.append(pickle.loads(_c10d._dump_nccl_trace(True, True, False)))
    return dumps
