"""What the ranks of the checkpoint tests run: importable by the processes that are spawned."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid.config import CheckpointConfig, TrainingConfig
from hybrid.errors import HybridError
from hybrid.training import storage as storage_module
from hybrid.training.checkpoint import Checkpoints
from hybrid.training.loss import return_loss
from hybrid.training.parallel import Precision, World, spread
from hybrid.training.storage import Storage, check_storage

VOCABULARY = 64
PARALLEL: dict[str, dict[str, Any]] = {"tp": {"tensor": 2}, "hsdp": {"shard": 2}}
"""What a strategy needs to be told on a few ranks of one machine."""


class Numbers:
    """A stateful object: what `extra` and `per_rank` take."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def model_and_optimizer(
    strategy: str = "single", world: World | None = None, hidden: int = 32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tied Llama, the same at each call, and AdamW with two groups."""
    torch.manual_seed(0)
    made: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    if strategy != "single":
        assert world is not None
        settings = TrainingConfig.model_validate(
            {"strategy": strategy, "parallel": PARALLEL.get(strategy, {})}
        )
        made = spread(made, settings, Precision.of("float32", world.device), world)
    else:
        return_loss(made)
    parameters = list(made.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return made, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def step(made: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One optimiser step on rows that follow from its number, the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(VOCABULARY, (2, 12), generator=generator)
    loss = made(input_ids=rows, labels=rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def weights(made: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict, copied; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: dict[str, Any] = get_model_state_dict(made, options=options)
    return {name: tensor.clone() for name, tensor in full.items()}


def go_on(url: str, strategy: str, until: int, die_at: int | None = None) -> dict[str, Any]:
    """Train from the last good checkpoint to step `until`, saving after every step.

    With `die_at`, rank 0 is killed when it is about to commit that step.
    """
    world = World.current()
    settings = CheckpointConfig(every=1, keep=2)
    records: list[dict[str, Any]] = []
    checkpoints = Checkpoints(
        url, world, settings, lambda event, **fields: records.append({"event": event, **fields})
    )
    made, optimizer = model_and_optimizer(strategy, world)
    shared, own = Numbers(), Numbers(residual=torch.zeros(3), seen=-1)
    extra, per_rank = {"policy": shared}, {"feedback": own}
    restored = checkpoints.restore(made, optimizer, extra=extra, per_rank=per_rank)
    found = {"policy": dict(shared.values), "seen": own.values["seen"]}
    put = checkpoints.storage.put

    def dying(path: str, data: bytes) -> None:
        if die_at is not None and path == f"step-{die_at:06d}/commit.json":
            os.kill(os.getpid(), signal.SIGKILL)
        put(path, data)

    checkpoints.storage.put = dying  # type: ignore[method-assign]
    for number in range(restored.step, until):
        step(made, optimizer, number)
        done = number + 1
        shared.values = {"norms": [1.0, float(done)], "sum": torch.tensor([done, 2.0])}
        own.values = {"residual": torch.full((3,), float(world.rank)), "seen": world.rank}
        checkpoints.save(done, made, optimizer, extra=extra, per_rank=per_rank)
    checkpoints.close()
    seen = world.gather(found["seen"])
    return {
        "from": restored.step,
        "rejected": restored.rejected,
        "policy": found["policy"],
        "seen": seen,
        "weights": weights(made),
        "steps": checkpoints.steps,
        "tied": _tied(made),
        "records": records,
    }


def go_on_twice(url: str) -> list[dict[str, Any]]:
    """FSDP, then DDP, then FSDP again from what the one before has saved."""
    return [go_on(url, "fsdp", 4), go_on(url, "ddp", 5), go_on(url, "fsdp", 5)]


def _tied(made: nn.Module) -> bool:
    inner: Any = getattr(made, "module", made)
    return inner.lm_head.weight is inner.model.embed_tokens.weight


def try_storages(root: Path) -> dict[str, str]:
    """What `check_storage` says of three storages."""
    world = World.current()
    storage_module._SEEN_S = 0.3
    (root / "file").touch()
    urls = {
        "shared": root / "shared",
        "apart": root / f"apart-{world.rank}",
        "unwritable": root / ("file/below" if world.rank else "shared"),
    }
    said = {}
    for name, url in urls.items():
        try:
            check_storage(Storage(url), world)
            said[name] = ""
        except HybridError as e:
            said[name] = f"{type(e).__name__} {e.param}: {e.message}"
        dist.barrier()
    return said
