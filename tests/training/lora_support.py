"""What the tests of adapters share: a tiny base, a few rows, a function for spawned ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybrid.config import AdapterConfig, LoraConfig
from hybrid.training import lora, rows
from hybrid.training.lora import Base, train_adapter

TEMPLATE = "{input} is\n"
PAIRS = [("the fox", "quick"), ("the dog", "lazy"), ("ABC", "quick")]


def write_rows(path: Path, pairs: list[tuple[str, Any]]) -> None:
    path.write_text("".join(json.dumps({"input": i, "output": o}) + "\n" for i, o in pairs))


def spec(folder: Path, shape: dict[str, Any] | None = None, **changes: Any) -> AdapterConfig:
    """An adapter of the rows in a folder; `shape` changes its shape and training."""
    fields = {
        "train": str(folder / "train.jsonl"),
        "holdout": str(folder / "holdout.jsonl"),
        "template": TEMPLATE,
        "lora": LoraConfig(
            **{"rank": 8, "alpha": 32, "steps": 200, "batch": 8, "lr": 0.004, "dropout": 0.0}
            | (shape or {})
        ),
        **changes,
    }
    return AdapterConfig.model_validate(fields)


def trained(base: Path, config: AdapterConfig, out: Path, *, sharded: bool = False) -> Any:
    """Train on a base read anew; what `train_adapter` returned."""
    made = Base(base, "b@1", config.lora.base_precision, sharded=sharded)
    data = rows.read("a", config)
    return train_adapter(made, config, data, out, seed=1, report=lambda record: None)


def trained_sharded(base: Path, config: AdapterConfig, out: Path) -> Any:
    """For a spawned rank: `trained` on a base that is checked to be sharded."""
    from torch.distributed.tensor import DTensor

    losses: list[Any] = []
    made = lora._loss

    def kept(*args: Any) -> Any:
        losses.append(made(*args))
        return losses[-1]

    lora._loss = kept
    done = trained(base, config, out, sharded=True)
    for name, parameter in losses[0].named_parameters():
        if ".layers." in name:  # both ends stay gathered after the last forward
            assert isinstance(parameter, DTensor) != parameter.requires_grad, name
    return done
