"""Tells a memory profile what lies where: marks in the trace, and beside it the addresses at each.

The profiler records every allocation and free by address, and not what for. So at moments that are
marked in the trace by a range of no length, the addresses of parameters, gradients, optimiser state
and inputs are noted; a block that lives at such a moment at such an address is that. The forward
pass of each module is a range, too: what is allocated in it is the module's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

KEY = "hybrid_memory"
"""Where the notes are in the trace's JSON: `names`, and `marks`, a list of [category, index into
names, address, bytes] for each mark."""
MARK, FORWARD = "hybrid::mark ", "hybrid::forward "
"""Ranges: a mark and its number; a module's forward pass and its name."""
_WRAPPERS = re.compile(r"\b(?:_checkpoint_wrapped_module|_orig_mod)\.|^module\.")

Held = tuple[str, str, torch.Tensor]
"""Category, name, tensor."""


class MemoryMarks:
    """Hooks on a model that mark what is where, until `remove`.

    Args:
        model: spread over the ranks; parameters of another form that its modules have while they
            run (FSDP's gathered ones) are found there.
        optimizer: its state is found in `state`.
        device: what lies elsewhere is not noted.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._names: dict[str, int] = {}
        self._marks: list[list[list[str | int]]] = []
        self._resting: set[int] = set()
        self._gathered: dict[int, nn.Parameter] = {}  # held, so that no id is used again
        self._open: list[record_function] = []
        self._hooks: list[Any] = []
        for name, module in _reachable(model):
            clean = _WRAPPERS.sub("", name)
            self._hooks += [
                module.register_forward_pre_hook(
                    functools.partial(self._enter, clean), with_kwargs=True
                ),
                # Recomputing (activation checkpointing) leaves a forward pass by an exception.
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def all(self) -> None:
        """Mark all that is held between operators: parameters, gradients, optimiser, buffers."""
        held = list(self._held())
        self._resting = {_storage(t).data_ptr() for _, _, t in held}
        self._mark(held)

    def notes(self) -> str:
        """What was noted, as JSON (see `KEY`)."""
        return json.dumps({"names": list(self._names), "marks": self._marks})

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _held(self) -> Iterator[Held]:
        names: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            clean = names[id(parameter)] = _WRAPPERS.sub("", name)
            yield "parameters", clean, parameter
            if parameter.grad is not None:
                yield "gradients", clean, parameter.grad
        for owner, state in self._optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield "optimiser", names.get(id(owner), ""), value
        for name, buffer in self._model.named_buffers():
            yield "other", _WRAPPERS.sub("", name), buffer

    def _mark(self, held: Iterable[Held]) -> None:
        found: dict[int, list[str | int]] = {}
        for category, name, tensor in held:
            storage = _storage(tensor)
            if storage.nbytes() == 0 or storage.device.type != self._device.type:
                continue
            at = storage.data_ptr()
            if at in found:  # DDP's buckets hold the gradients of many
                name = "" if found[at][1] != self._names.get(name) else name
            number = self._names.setdefault(name, len(self._names))
            found[at] = [category, number, at, storage.nbytes()]
        if found:
            with record_function(f"{MARK}{len(self._marks)}"):
                self._marks.append(list(found.values()))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is self._model:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self._mark(("input", "", t) for t in tensors)
        gathered = []
        for own, parameter in module._parameters.items():
            if parameter is None or _storage(parameter).data_ptr() in self._resting:
                continue
            whole = f"{name}.{own}".lstrip(".")
            gathered.append(("parameters", whole, parameter))
            if id(parameter) not in self._gathered and parameter.requires_grad:
                self._gathered[id(parameter)] = parameter
                hook = functools.partial(self._gradient, whole)
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                )
        self._mark(gathered)
        self._open.append(record_function(FORWARD + name))
        self._open[-1].__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def _gradient(self, name: str, parameter: torch.Tensor) -> None:
        """A gathered parameter and its gradient, in the backward pass."""
        held: list[Held] = [("parameters", name, parameter)]
        if parameter.grad is not None:
            held.append(("gradients", name, parameter.grad))
        self._mark(held)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _reachable(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all within it, save those inside of a compiled one: hooks would break it up."""
    yield name, module
    if _compiled(module):
        return
    for own, child in module.named_children():
        yield from _reachable(child, f"{name}.{own}".lstrip("."))


def _compiled(module: nn.Module) -> bool:
    run: Callable[..., Any] = module.__dict__.get("forward", module.forward)
    function = run.func if isinstance(run, functools.partial) else run
    return hasattr(function, "_torchdynamo_orig_callable")
