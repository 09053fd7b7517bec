"""Cross entropy of a causal LM, summed over labels, without the logits ever being there at once.

The head's matrix product, the softmax and both gradients are taken for some rows at a time, as in
Hsu et al. 2024 (Liger) and Wijmans et al. 2024 (Cut Cross-Entropy): memory for a slice of the
[tokens, vocabulary] logits in place of three whole copies, the same sums up to their order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from hybrid.training.data import IGNORE

PLAIN_HEADS = {
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
}  # fmt: skip
"""Models whose logits are the last hidden state times the head's matrix and nothing else."""
SLICE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Size of a slice of logits: on a CPU it is to stay in the cache."""


def return_loss(model: nn.Module, *, sliced: bool = True) -> None:
    """Have `model(input_ids=…, labels=…, **more)` return the loss summed over labels: a scalar.

    `labels` are those of the positions themselves (already shifted), `IGNORE` where there is none.
    It is in float32 or better. Without labels the model answers as before.

    Args:
        sliced: take the head's product slice by slice, where the model's head is a plain one.
    """
    sliced = sliced and type(model).__name__ in PLAIN_HEADS
    model.forward = partial(_sliced if sliced else _whole, model, model.forward)


def _sliced(
    model: Any, forward: Any, *args: Any, labels: torch.Tensor | None = None, **inputs: Any
) -> Any:
    if labels is None:
        return forward(*args, **inputs)
    hidden = model.get_decoder()(*args, **inputs).last_hidden_state
    return linear_cross_entropy(hidden, model.get_output_embeddings().weight, labels)


def _whole(
    model: Any, forward: Any, *args: Any, labels: torch.Tensor | None = None, **inputs: Any
) -> Any:
    """For heads of a kind of their own (scaled, capped, biased)."""
    answer = forward(*args, **inputs)
    if labels is None:
        return answer
    logits = answer.logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """`cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum")`.

    Args:
        hidden: [..., width]. The same on all ranks that share `weight`.
        weight: [vocabulary, width]; a DTensor sharded on the vocabulary over a one-dimensional mesh
            is used where it lies (Shoeybi et al. 2019).
        labels: [...] int64.

    Returns:
        A scalar in float32, or float64 where `hidden` is.
    """
    group, first = None, 0
    if isinstance(weight, DTensor):
        group, ranks = weight.device_mesh.get_group(), weight.device_mesh.size()
        first = -(-weight.shape[0] // ranks) * weight.device_mesh.get_local_rank()
        weight = weight.to_local()
    device = hidden.device.type
    compute = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    )
    total: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2).to(compute),
        weight.to(compute),
        labels.flatten(),
        group,
        first,
        torch.is_grad_enabled(),
    )
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are computed in forward, where the slice of logits is at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup | None,
        first: int,
        train: bool,
    ) -> torch.Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        rows = max(64, SLICE_BYTES.get(hidden.device.type, 64 << 20) // (4 * max(1, len(weight))))
        total = torch.zeros((), dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if train else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if train else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            kept = labels[part] != IGNORE
            logits = (hidden[part] @ weight.T).to(exact)
            # IGNORE becomes a label of no shard; where labels are outside of this one, 0 stands in.
            local = torch.where(kept, labels[part] - first, -1)
            here = (local >= 0) & (local < len(weight))
            local = local.clamp(0, len(weight) - 1)[:, None]
            log_p, at_label = _log_softmax(logits, local, here, group)
            total -= (at_label * kept).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # The gradient of the sum by the logits: p - 1 at the label, p elsewhere.
            p = log_p.exp_()
            p.scatter_add_(1, local, -here.to(exact)[:, None])
            p = p.mul_(kept[:, None]).to(hidden.dtype)
            torch.mm(p, weight, out=grad_hidden[part])
            if exact == hidden.dtype:
                grad_weight.addmm_(p.T, hidden[part])
            else:
                grad_weight += p.T @ hidden[part]
        if group is not None and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        ctx.grads = grad_hidden, grad_weight, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_hidden, grad_weight, dtype = ctx.grads
        ctx.grads = None
        return grad_hidden.mul_(grad), grad_weight.mul_(grad).to(dtype), None, None, None, None


def _log_softmax(
    logits: torch.Tensor, local: torch.Tensor, here: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of this shard's columns (overwrites `logits`), and of the labels."""
    if group is None:
        log_p = torch.log_softmax(logits, -1)
        return log_p, log_p.gather(1, local)[:, 0]
    top = logits.max(-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    logits -= top[:, None]
    sums = torch.stack([logits.exp().sum(-1), logits.gather(1, local)[:, 0] * here])
    dist.all_reduce(sums, group=group)
    log_z = sums[0].log()
    logits -= log_z[:, None]
    return logits, sums[1] - log_z
