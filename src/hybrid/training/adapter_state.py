"""How far an adapter's training is: a small file from which a killed run goes on exactly.

What is random is drawn from (seed, step) alone, so the step is the whole of the data cursor and
of the generators' state.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = "state.pt"


@dataclass
class Best:
    """The lowest validation loss so far (nats), its step and weights, and looks since without a
    lower one."""

    loss: float
    step: int
    weights: dict[str, Tensor]
    worse: int = 0


@dataclass
class AdapterState:
    """After `step` optimiser steps: trained weights by name, AdamW's state, each step's loss."""

    step: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    best: Best | None = None

    def save(self, folder: Path) -> None:
        """Write it beside the one before, then in its place."""
        buffer = io.BytesIO()
        torch.save(asdict(self), buffer)
        data = buffer.getvalue()
        new = folder / (FILE + ".new")
        with new.open("wb") as stream:
            stream.write(hashlib.sha256(data).digest() + data)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(folder / FILE)


def load_state(folder: Path, device: torch.device) -> tuple[AdapterState, str | None]:
    """What is in a folder, or a new one; and why, where what is there cannot be used."""
    try:
        raw = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return AdapterState(), None
    digest, data = raw[:32], raw[32:]
    if hashlib.sha256(data).digest() != digest:
        return AdapterState(), f"{folder / FILE} is damaged: trained from the beginning"
    try:
        found = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        best = Best(**found["best"]) if found["best"] else None
        return AdapterState(**{**found, "best": best}), None
    except (RuntimeError, TypeError, LookupError, pickle.UnpicklingError) as e:
        return AdapterState(), f"{folder / FILE} is of another version ({e}): trained anew"
