"""What an adapter is trained to do, as a module over the base: answer, or embed alike.

One module whose forward is the whole loss, because FSDP gathers parameters around forwards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.training.adapter_batches import IGNORE, AnswerBatch, PairBatch


class AnswerLoss(nn.Module):
    """Weighted cross entropy (nats), summed over the answers' tokens; logits are made only there.

    Args:
        model: a causal LM of transformers, adapted in place.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: AnswerBatch) -> Tensor:
        """A scalar, float32 or better; divide by `batch.count` for the mean."""
        hidden = _hidden(self.model, batch)
        wanted = batch.labels != IGNORE
        # A head that is trained whole is float32 on a base of fewer bits.
        head = self.model.get_output_embeddings()
        logits = head(hidden[wanted].to(_dtype(head)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits, batch.labels[wanted], reduction="none")
        return (losses * batch.weights[wanted]).sum()


class PairLoss(nn.Module):
    """InfoNCE (van den Oord et al. 2018) over a batch of pairs, both ways, summed over rows.

    Each left is to be nearest its own right among the batch's, and each right its left (as in
    CLIP, Radford et al. 2021). Rows with the same right are no negatives of one another.

    Args:
        temperature: what cosines are divided by.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: PairBatch) -> Tensor:
        """A scalar, float32; divide by `batch.count` for the mean."""
        left, right = pooled(self.model, batch).chunk(2)
        similar = left @ right.T / self.temperature
        rows = torch.arange(len(left), device=left.device)
        falsely = (batch.same[:, None] == batch.same[None, :]) & (rows[:, None] != rows[None, :])
        similar = similar.masked_fill(falsely, float("-inf"))
        both = F.cross_entropy(similar, rows, reduction="sum")
        return (both + F.cross_entropy(similar.T, rows, reduction="sum")) / 2


def pooled(model: Any, batch: PairBatch) -> Tensor:
    """float32 [texts, hidden], unit length: the mean of a text's last hidden states, which is how
    the engine embeds."""
    hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state.float()
    places = torch.arange(hidden.shape[1], device=hidden.device)
    real = (places[None] < batch.lengths[:, None]).float()
    return F.normalize((hidden * real[..., None]).sum(1) / batch.lengths[:, None], dim=-1)


def _hidden(model: Any, batch: AnswerBatch) -> Tensor:
    """The last hidden states [sequences, tokens, hidden]."""
    packed: dict[str, Tensor] = {}
    if batch.segments is not None and batch.positions is not None:
        dtype = next(p.dtype for p in model.base_model.parameters() if p.is_floating_point())
        packed = {"position_ids": batch.positions, "attention_mask": isolated(batch, dtype)}
    hidden: Tensor = model.base_model(
        input_ids=batch.ids, use_cache=False, **packed
    ).last_hidden_state
    return hidden


def isolated(batch: AnswerBatch, dtype: torch.dtype) -> Tensor:
    """Additive mask [sequences, 1, tokens, tokens]: a token sees itself and what is before it in
    its own row, nothing else (0), or nothing at all (the least number)."""
    assert batch.segments is not None
    segments = batch.segments
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    sees = (segments[:, :, None] == segments[:, None, :]) & causal
    mask = torch.zeros(sees.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)[:, None]


def _dtype(head: Any) -> torch.dtype:
    found: torch.dtype = head.weight.dtype
    return found
