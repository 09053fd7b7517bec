"""What a checkpoint holds, as one state dict that DCP can write and any world size can load.

The learning rate, the data cursor and every random generator follow from the step number, so the
state is the model, the optimiser and that number. What others add is saved beside it: `extra` is
the same on all ranks, `per_rank` is each rank's own (compression's error feedback, say). The
generators of torch, numpy and Python are saved of each rank too, for code that draws from them
without regard to the step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from hybrid.training.zero import ZeroModel

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile put into names, and state dicts leave out."""

States = Mapping[str, Stateful]
State = dict[str, Any]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    extra: States,
    per_rank: States,
) -> State:
    """All of it; tensors are the live ones, under names that are the same for every strategy."""
    own = {name: stateful.state_dict() for name, stateful in per_rank.items()}
    return {
        **_core(model, optimizer)[0],
        "extra": {name: stateful.state_dict() for name, stateful in extra.items()},
        "rank": {str(rank): {**own, "generators": _generators()}},
    }


def template(
    model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata, prefixes: list[str]
) -> State:
    """What `torch.distributed.checkpoint.load` is to fill.

    The model's and the optimiser's tensors are the live ones, loaded in place; for what else lies
    under one of `prefixes` memory is made, under its flat name.
    """
    state = _core(model, optimizer)[0]
    for name, entry in metadata.state_dict_metadata.items():
        if any(name.startswith(f"{prefix}.") for prefix in prefixes):
            state[name] = (
                None
                if isinstance(entry, BytesStorageMetadata)
                else torch.empty(entry.size, dtype=entry.properties.dtype)
            )
    return state


def apply(
    state: State,
    metadata: Metadata,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    extra: States,
    per_rank: States,
) -> None:
    """Give a loaded state back to its owners.

    An `extra` or `per_rank` object that the checkpoint knows nothing of is left as it is.
    """
    if isinstance(model, ZeroModel):
        model.loaded(state)
    else:
        aliases = _core(model, optimizer)[1]
        core = dict(state["model"])
        for name, kept in aliases.items():
            core[name] = core[kept]
        set_state_dict(
            model, optimizer, model_state_dict=core, optim_state_dict=state.get("optimizer", {})
        )
    nested: State = {}
    for name in state:
        if name not in ("model", "optimizer"):
            _put(nested, metadata.planner_data[name], state[name])
    for name, stateful in extra.items():
        if name in nested.get("extra", {}):
            stateful.load_state_dict(nested["extra"][name])
    own = nested.get("rank", {}).get(str(rank), {})
    for name, stateful in per_rank.items():
        if name in own:
            stateful.load_state_dict(own[name])
    if "generators" in own:
        _set_generators(own["generators"])


def _core(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, dict[str, str]]:
    """Model and optimiser, each tensor once, and tied names with the name that stands for them."""
    if isinstance(model, ZeroModel):
        return model.core(), {}
    weights, states = get_state_dict(model, optimizer)
    aliases = {name: kept for name, kept in _tied(model).items() if name in weights}
    kept = {name: value for name, value in weights.items() if name not in aliases}
    return {"model": kept, "optimizer": states}, aliases


def _tied(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another parameter, and the first name of each."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for wrapped, parameter in model.named_parameters(remove_duplicate=False):
        name = wrapped.removeprefix("module." if isinstance(model, DistributedDataParallel) else "")
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _put(root: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value in nested dicts and lists, made on the way."""
    for key, following in itertools.pairwise(path):
        empty: Any = {} if isinstance(following, str) else []
        if isinstance(root, list):
            _extend(root, key)
            root[key] = empty if root[key] is None else root[key]  # type: ignore[index]
            root = root[key]  # type: ignore[index]
        else:
            root = root.setdefault(key, empty)
    if isinstance(root, list):
        _extend(root, path[-1])
    root[path[-1]] = value


def _extend(values: list[Any], index: Any) -> None:
    values += [None] * (index + 1 - len(values))


def _generators() -> State:
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        **({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}),
    }


def _set_generators(saved: State) -> None:
    torch.set_rng_state(saved["torch"])
    np.random.set_state(saved["numpy"])
    random.setstate(saved["python"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
