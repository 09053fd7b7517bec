"""Memory a rank will need, before anything is allocated: by term, at the worst moment of a step.

Activations and logits come from the real code on fake tensors (`memory_trace.py`); what the
strategy keeps, gathers and reduces is counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.config import TrainingConfig
from hybrid.training.memory_trace import Trace, trace
from hybrid.training.world import Precision

STATES = 2
"""Numbers AdamW keeps for each parameter."""
ADVICE = {
    "parameters": "shard them over more workers (strategy fsdp)",
    "gradients": "shard them: strategy fsdp; with fsdp they are whole while micro-batches"
    " accumulate: more workers or fewer micro_batches",
    "optimiser": "shard it over more workers (strategy fsdp)",
    "gathered": "a model of smaller blocks",
    "activations": "a smaller micro_batch or sequence_length",
    "logits and loss": "a smaller micro_batch or sequence_length, or a smaller vocabulary",
    "reduction": "a model of smaller blocks",
}
"""The terms, and what to change when one dominates and the model does not fit."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks share the model.

    Attributes:
        strategy: `single`, `ddp`; `fsdp`, `hsdp`, `tp`, `deepspeed`, which shard.
        shards: ranks that share one copy of parameters, gradients and optimiser state.
        tensor: ranks that share each matrix.
        reshard: gathered parameters are dropped after forward.
        offload: what is sharded lies in the host's memory.
        fused: the optimiser step is one kernel.
    """

    strategy: str
    shards: int
    tensor: int = 1
    reshard: bool = True
    offload: bool = False
    fused: bool = True

    @classmethod
    def of(cls, settings: TrainingConfig, workers: int, per_node: int | None = None) -> Layout:
        """What `settings` mean for so many workers.

        Args:
            per_node: workers on one node, by default all; for hsdp without `parallel.shard`.
        """
        parallel, shards = settings.parallel, 1
        if settings.strategy in ("fsdp", "tp", "deepspeed"):
            shards = workers
        elif settings.strategy == "hsdp":
            shards = parallel.shard or min(per_node or workers, workers)
        return cls(
            strategy=settings.strategy,
            shards=shards,
            tensor=parallel.tensor,
            reshard=parallel.reshard,
            offload=parallel.offload,
            fused=parallel.fused_optimizer,
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        terms: by term (`ADVICE`), at the moment when most is held; together the device's peak.
        moment: which moment that is.
        host: bytes in the host's memory besides, where states are offloaded.
        checkpoint: bytes of one checkpoint, of all ranks.
        export: bytes of the exported model.
        parameters: number of them in the whole model.
    """

    terms: dict[str, int]
    moment: str
    host: int
    checkpoint: int
    export: int
    parameters: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def advice(self) -> str:
        """What makes the largest term smaller."""
        return ADVICE[self.dominant]


def estimate(
    architecture: Callable[[], Any],
    settings: TrainingConfig,
    *,
    workers: int,
    gpu: bool,
    per_node: int | None = None,
    layout: Layout | None = None,
) -> Estimate:
    """Estimate the peak of one rank in a usual step: tensors, without allocator and runtime.

    Args:
        architecture: makes the transformers configuration of the base (`model.architecture`).
        workers: ranks of the run.
        gpu: whether they compute on GPUs; decides what precision `auto` is.
        per_node: ranks on one node, by default all.
        layout: by default what `settings` say.
    """
    layout = layout or Layout.of(settings, workers, per_node)
    name = settings.precision
    if name == "auto":
        name = "bfloat16" if gpu else "float32"
    precision = Precision.of(name, torch.device("cpu"))
    whole, tensor = layout.strategy in ("single", "ddp"), layout.tensor
    config = architecture()
    full = trace(config, settings, precision, whole)
    traced = full if tensor == 1 else trace(_share(config, tensor), settings, precision, whole)
    step = _Step(
        traced,
        blocks=config.num_hidden_layers,
        stored=precision.params.itemsize,
        compute=precision.compute.itemsize,
        accumulates=-(-settings.micro_batches * tensor // workers) > 1,
        fused=layout.fused,
    )
    if whole:
        moments = step.whole(buckets=layout.strategy == "ddp")
    elif layout.strategy == "deepspeed":
        moments = step.zero(layout.shards)
    else:
        moments = step.sharded(layout.shards, keep=not layout.reshard)
    host = 0
    if layout.offload:
        host = sum(moments["update"][t] for t in ("parameters", "gradients", "optimiser"))
        for terms in moments.values():
            terms["parameters"] = terms["optimiser"] = 0
        moments["update"] = {}
    moment = max(moments, key=lambda m: sum(moments[m].values()))
    parameters = full.parameters.at(config.num_hidden_layers)
    return Estimate(
        terms={term: moments[moment].get(term, 0) for term in ADVICE},
        moment=moment,
        host=host,
        checkpoint=parameters * precision.params.itemsize * (1 + STATES),
        export=parameters * 4,
        parameters=parameters,
    )


class _Step:
    """Terms at the moments of a step that may be its worst."""

    def __init__(
        self,
        traced: Trace,
        *,
        blocks: int,
        stored: int,
        compute: int,
        accumulates: bool,
        fused: bool,
    ) -> None:
        self.count = traced.parameters.at(blocks)
        self.root, self.block = traced.root, traced.parameters.each
        self.embedding = traced.embedding
        self.blocks, self.stored, self.compute = blocks, stored, compute
        self.accumulates = accumulates
        self.update = 0 if fused else self.count * stored  # foreach keeps the denominators
        # Of all that lives at the peak, what the blocks add is activations.
        self.activations = traced.head.each * blocks
        self.head = traced.head.at(blocks) - self.activations
        self.in_blocks, self.each = traced.blocks.at(blocks), traced.blocks.each
        self.last = traced.last.at(blocks)

    def whole(self, *, buckets: bool) -> dict[str, dict[str, int]]:
        """Every rank has all: `single` and `ddp`.

        DDP's gradients live in its buckets; those of micro-batches that are not reduced yet are
        accumulated beside them.
        """
        every = self.count * self.stored
        held = {"parameters": every, "optimiser": STATES * every}
        before = every * (int(self.accumulates) + int(buckets))
        ready = every * (1 + int(buckets and self.accumulates))
        in_root = max(before, self.root * self.stored)
        return {
            "loss": {
                **held,
                "gradients": before,
                "activations": self.activations,
                "logits and loss": self.head,
            },
            "backward": {**held, "gradients": in_root, "activations": self.in_blocks},
            "end of backward": {**held, "gradients": ready, "activations": self.last},
            "update": {**held, "gradients": every, "optimiser": STATES * every + self.update},
        }

    def sharded(self, shards: int, *, keep: bool) -> dict[str, dict[str, int]]:
        """FSDP: shards of all, gathered when needed; whole gradients while they accumulate."""
        every = self.count * self.stored // shards
        held = {"parameters": every, "optimiser": STATES * every}
        whole = self.count * self.stored if self.accumulates else 0
        # The next block is gathered ahead, and a block's buffer goes with the next one's; what a
        # rank has alone is copied when it is needed.
        ahead, buffer = (0, 0) if shards == 1 else (1, 1)
        in_loss, in_blocks = (
            (self.root + min(n, self.blocks) * self.block) * self.compute
            for n in ((self.blocks, self.blocks) if keep else (buffer, 1 + ahead))
        )
        # A tied embedding's gradient waits among the activations for that of the lookup.
        head = whole or (self.root - self.embedding) * self.compute
        # In flight behind the backward pass: a block's gradients, their copy to be reduced and the
        # one before it; where they are added up in another dtype, a third. The more of it, the
        # fewer blocks have their activations still.
        copies = 1 + int(self.accumulates and self.compute != self.stored)
        flights = {
            "backward": self.compute,
            "backward behind a reduction": self.compute + copies * self.stored,
            "reduction": self.compute + (1 + copies) * self.stored,
        }
        # When the root's gradients are there, all blocks are reduced; the last one's copy waits.
        reduced = every - self.root * self.stored // shards
        reduced += self.root * self.stored if whole else 0
        waits = self.block * self.stored
        return {
            "loss": {
                **held,
                "gradients": whole,
                "gathered": in_loss,
                "activations": self.activations,
                "logits and loss": self.head,
            },
            **{
                moment: {
                    **held,
                    "gradients": head,
                    "gathered": in_blocks,
                    "activations": self.in_blocks - min(n, self.blocks - 1) * self.each,
                    "reduction": self.block * flight,
                }
                for n, (moment, flight) in enumerate(flights.items())
            },
            "end of backward": {
                **held,
                "gradients": reduced,
                "gathered": self.root * self.compute,
                "activations": self.last,
                "reduction": waits,
            },
            "last reduction": {
                **held,
                "gradients": reduced + self.root * self.compute,
                "gathered": self.root * self.compute,
                "reduction": waits + self.root * self.stored,
            },
            "update": {
                **held,
                "gradients": every,
                "optimiser": STATES * every + self.update // shards,
            },
        }

    def zero(self, shards: int) -> dict[str, dict[str, int]]:
        """DeepSpeed's ZeRO-3: as FSDP, but for what it keeps of each shard.

        A copy to compute with beside the master copy, one shard of gradients at all times (they are
        reduced after each micro-batch) and one more in the update, and a bucket for a block's.
        """
        share = self.count // shards
        moments = self.sharded(shards, keep=False)
        for name, terms in moments.items():
            terms["parameters"] += share * self.compute
            terms["gradients"] = share * self.stored * (2 if name == "update" else 1)
            terms["reduction"] = terms.get("reduction", 0) + self.block * self.stored
        for name in ("backward", "end of backward"):
            moments[name]["gradients"] += self.root * self.compute
        return moments


def _share(config: Any, tensor: int) -> Any:
    """The configuration of what one of `tensor` ranks computes of each matrix."""
    heads, width = config.num_attention_heads, config.hidden_size
    shared = type(config)(**config.to_dict())
    shared.head_dim = getattr(config, "head_dim", None) or width // heads
    shared.num_attention_heads = heads // tensor
    shared.num_key_value_heads = config.num_key_value_heads // tensor
    shared.intermediate_size = config.intermediate_size // tensor
    shared.vocab_size = -(-config.vocab_size // tensor)
    return shared
