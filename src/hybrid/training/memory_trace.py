"""Memory of a forward and backward pass, from running the real code on tensors of nothing.

The model's own code runs on fake tensors, which have shapes and no bytes, once with one block and
once with two. Every tensor that comes to life is counted until it dies. Blocks are alike, so the
difference is what each further block adds: a model of 80 blocks costs no more than a small one.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from hybrid.config import TrainingConfig
from hybrid.training.blocks import wrap_blocks
from hybrid.training.loss import return_loss
from hybrid.training.step import _loss_sum
from hybrid.training.world import Precision


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes as a function of the number of blocks: `first` for one, `each` for every further."""

    first: int
    each: int

    def at(self, blocks: int) -> int:
        """Bytes with that many blocks."""
        return self.first + self.each * (blocks - 1)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Of one micro-batch on one rank; parameters and accumulated gradients not counted.

    Attributes:
        parameters: elements; the first block's line includes all that is in no block.
        root: elements of those: embedding, head, last norm.
        embedding: elements of the input embedding.
        head: peak bytes until the gradient reaches the last block: forward, logits, loss, head.
        blocks: peak bytes while gradients go through the blocks.
        last: peak bytes after that: the embedding's gradient.
    """

    parameters: Line
    root: int
    embedding: int
    head: Line
    blocks: Line
    last: Line


def trace(architecture: Any, settings: TrainingConfig, precision: Precision, mixed: bool) -> Trace:
    """Run the model of a transformers configuration on nothing.

    Args:
        mixed: parameters are in `precision.params` and products are cast (autocast), as `single`
            and `ddp` do; else parameters themselves are in `precision.compute`, as FSDP's are.
    """
    one, two = (_pass(_with_blocks(architecture, n), settings, precision, mixed) for n in (1, 2))
    lines = [Line(first=a, each=b - a) for a, b in zip(one.peaks, two.peaks, strict=True)]
    return Trace(
        parameters=Line(first=one.parameters, each=two.parameters - one.parameters),
        root=2 * one.parameters - two.parameters,
        embedding=one.embedding,
        head=lines[0],
        blocks=lines[1],
        last=lines[2],
    )


@dataclass(frozen=True, kw_only=True)
class _Measured:
    parameters: int
    embedding: int
    peaks: Sequence[int]


def _with_blocks(architecture: Any, blocks: int) -> Any:
    reduced = copy.deepcopy(architecture)
    reduced.num_hidden_layers = blocks
    if getattr(reduced, "layer_types", None):  # of models whose blocks differ in their attention
        reduced.layer_types = reduced.layer_types[:blocks]
    return reduced


def _pass(
    architecture: Any, settings: TrainingConfig, precision: Precision, mixed: bool
) -> _Measured:
    """Forward and backward; the peaks of the three stretches (see `Trace`)."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = precision.params if mixed else precision.compute
        model: Any = AutoModelForCausalLM.from_config(architecture, dtype=dtype)
        model.train()
        return_loss(model)
        recompute = settings.parallel.model_copy(update={"compile": False})
        wrap_blocks(model, recompute, torch.device("cpu"))
        if mixed and precision.compute != precision.params:
            model.forward = torch.autocast("cpu", dtype=precision.compute)(model.forward)
        parameters = list(model.parameters())
        live = _Live([*parameters, *model.buffers()])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        decoder = model.get_decoder()
        decoder.layers[-1].register_forward_hook(lambda *args: live.cut_at(args[-1]))
        decoder.embed_tokens.register_forward_hook(lambda *args: live.cut_at(args[-1]))
        shape = (settings.micro_batch, settings.sequence_length)
        tokens = np.zeros(shape, dtype=np.int64)
        with live:
            loss = _loss_sum(model, {"input_ids": tokens, "labels": tokens}, torch.device("cpu"))
            loss.backward()  # type: ignore[no-untyped-call]
        live.cut()
        embedding = decoder.embed_tokens.weight
        head, blocks, last = live.peaks
        if embedding is model.get_output_embeddings().weight:
            # Its two gradients are added in place; of tensors of nothing a third is made.
            last -= embedding.nbytes
        return _Measured(
            parameters=sum(p.numel() for p in parameters),
            embedding=embedding.numel(),
            peaks=(head, blocks, last),
        )


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators make, until they die.

    Args:
        known: tensors that are not counted.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = [t.untyped_storage() for t in known]  # held, so that no id is used again
        self._seen = {id(storage) for storage in self._known}
        self._bytes = self._peak = 0
        self.peaks: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def cut_at(self, output: Any) -> None:
        """End a stretch when the gradient of a module's output is there."""
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.register_hook(lambda grad: self.cut())

    def cut(self) -> None:
        """End a stretch: its peak is noted, the next begins."""
        self.peaks.append(self._peak)
        self._peak = self._bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._seen:
            self._seen.add(key)
            size = storage.nbytes()
            self._bytes += size
            self._peak = max(self._peak, self._bytes)
            weakref.finalize(storage, self._dead, key, size)

    def _dead(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._bytes -= size
