"""Bytes on the wire: collectives counted where torch dispatches them, whoever issued them.

DDP's reducer (C++), FSDP2, functional collectives and communication hooks all end in an operator
of torch's `c10d` library. While a step is counted, each of these has a kernel of ours before its
own, which reads the tensors' sizes. Bytes are what a rank sends on average in a ring, the least
that any algorithm sends (Patarasuk & Yuan 2009): twice (n - 1)/n of the tensor for an all-reduce,
once for its two halves. What a backend sends above that, or headers, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

REDUCTIONS = {"allreduce", "reduce_scatter"}
EXCHANGES = REDUCTIONS | {"all_to_all", "allgather"}

# Operator, what it is, the argument whose size counts, and how often (n - 1)/n of that is sent.
_OPERATORS: dict[str, tuple[str, int, float]] = {
    "allreduce_": ("allreduce", 0, 2),
    "allreduce_coalesced_": ("allreduce", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "reduce_scatter_": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "_allgather_base_": ("allgather", 0, 1),
    "allgather_": ("allgather", 0, 1),
    "allgather_coalesced_": ("allgather", 0, 1),
    "allgather_into_tensor_coalesced_": ("allgather", 0, 1),
    "alltoall_base_": ("all_to_all", 1, 1),
    "alltoall_": ("all_to_all", 1, 1),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "gather_": ("gather", 1, 1),
    "scatter_": ("scatter", 0, 1),
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective that this rank took part in."""

    kind: str
    elements: int
    itemsize: int
    ranks: int
    times: float
    gradients: bool

    @property
    def sent(self) -> float:
        """Elements sent by a rank, on average."""
        return self.times * (self.ranks - 1) / self.ranks * self.elements

    @property
    def bytes(self) -> float:
        """Bytes sent by a rank, on average."""
        return self.sent * self.itemsize


_counting: list[Collective] | None = None
_gradients = False


@contextmanager
def counted() -> Iterator[list[Collective]]:
    """The collectives that are issued in this process while the block runs, in order.

    Costs some 0.1 ms a collective: meant for a step now and then, not for all of them.
    """
    global _counting
    if _counting is not None:
        raise RuntimeError("collectives are being counted already")
    found: list[Collective] = []
    library = _intercept()
    _counting = found
    try:
        yield found
    finally:
        _counting = None
        del library  # and with it the kernels


@contextmanager
def reducing() -> Iterator[None]:
    """Marks what is issued while the block runs as the reduction of gradients."""
    global _gradients
    _gradients = True
    try:
        yield
    finally:
        _gradients = False


def _intercept() -> Any:
    """Kernels at BackendSelect, the one key all calls pass that nothing else is registered at."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name, (kind, argument, times) in _OPERATORS.items():
        operator = getattr(torch.ops.c10d, name).default
        kernel = partial(_count, operator, after, kind, argument, times)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library


def _count(
    operator: Callable[..., Any],
    after: Any,
    kind: str,
    argument: int,
    times: float,
    keyset: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _counting is not None:
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        whole = list(_tensors(args[argument]))
        _counting.append(
            Collective(
                kind=kind,
                elements=sum(t.numel() for t in whole),
                itemsize=whole[0].element_size() if whole else 1,
                ranks=dist.ProcessGroup.unbox(group).size(),
                times=times,
                gradients=_gradients,
            )
        )
    return operator.redispatch(keyset & after, *args, **kwargs)  # type: ignore[attr-defined]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
