"""A trial of whether a model keeps packed documents apart: one is changed, the other looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid.errors import ConfigError


@torch.no_grad()
def check_isolation(model: nn.Module, vocabulary: int, device: torch.device) -> None:
    """See that the model keeps packed documents apart, by changing one and looking at the other.

    Families differ in what they make of positions: those with a state that runs through the
    sequence, or biases by distance, may look across. All ranks call it together.

    Args:
        model: spread and answering with logits.
        vocabulary: token ids that may be used are below this.

    Raises:
        ConfigError: it does not.
    """
    was_training = model.training
    model.eval()
    tokens = torch.arange(16, device=device).remainder(vocabulary)[None]
    positions = torch.arange(8, device=device).repeat(2)[None]
    changed = tokens.clone()
    changed[:, :8] = (tokens[:, :8] + 7).remainder(vocabulary)
    before, after = (_logits(model, rows, positions)[:, 8:] for rows in (tokens, changed))
    model.train(was_training)
    # The same kernels on the same shapes: what differs is what was seen of the other document.
    scale = before.abs().max()
    leak = float((before - after).abs().max() / scale)
    if not leak <= 32 * torch.finfo(before.dtype).eps:
        raise ConfigError(
            f"training.packing: 'isolate' does not hold for {_family(model)}: a packed document"
            f" changes its neighbour's logits (by {leak:.1e} of the largest); use 'concatenate'",
            param="training.packing",
        )


def _logits(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return logits


def _family(model: nn.Module) -> str:
    config: Any = getattr(model, "module", model).config  # DDP keeps it one level down
    return f"{config.model_type!r}"
