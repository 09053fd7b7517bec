"""The sections `training` and `adapters` of hybrid.yaml: the base's run and the specialists'."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hybrid.sections_base import Section

Strategy = Literal["auto", "single", "ddp", "fsdp", "hsdp", "tp", "deepspeed"]


class ParallelConfig(Section):
    """How the chosen strategy spreads the model; what does not apply to it is refused."""

    reshard: bool = True
    """fsdp, hsdp, tp: drop gathered parameters after forward (ZeRO-3); off keeps them until
    backward is done (ZeRO-2): faster, more memory."""
    tensor: int = Field(1, ge=1)
    """tp: ranks that share each matrix; the other dimension of the mesh is fsdp."""
    shard: int | None = Field(None, ge=1)
    """hsdp: ranks that share one copy; None is the workers of one node."""
    offload: bool = False
    """fsdp, hsdp, tp: parameters, gradients and optimiser state live in the host's memory."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in backward: `full` keeps only each block's input, `selective` also the results
    of the matrix products."""
    compile: bool = False
    """torch.compile each block."""
    fused_optimizer: bool = True
    """One kernel for the whole optimiser step."""


class CompressionConfig(Section):
    """What travels between ranks when gradients are reduced."""

    kind: Literal["none", "bf16", "powersgd", "onebit"] = "none"
    """`bf16` for ddp, fsdp and hsdp; `powersgd` (Vogels et al. 2019) and `onebit` (1-bit Adam's
    sign compression with error feedback) for ddp."""
    rank: int = Field(4, ge=1)
    """powersgd: rank of the approximation."""
    warm_start_steps: int = Field(10, ge=0)
    """powersgd and onebit: first steps without compression."""


class CheckpointConfig(Section):
    """When the run is written down, where, and how many are kept."""

    every: Annotated[int, Field(ge=1)] | Literal["auto"] = 50
    """Steps between checkpoints. `auto`: from the measured cost of a save and `mtbf_hours`, by
    Young's and Daly's formula; the first is after ten steps."""
    mtbf_hours: float = Field(24.0, gt=0)
    """Mean hours between failures of one node of the pool; for `auto`. A run on n nodes fails n
    times as often."""
    asynchronous: bool = True
    """Train on while a checkpoint is written."""
    keep: int = Field(2, ge=1)
    """Newest committed checkpoints kept."""
    keep_best: int = Field(0, ge=0)
    """Checkpoints with the lowest held-out loss kept besides; an evaluation that is among the best
    is saved at once."""
    storage: str | None = None
    """A path every node sees, or an fsspec URL such as s3://bucket/prefix; None is
    `run.dir`/checkpoints."""


class FaultConfig(Section):
    """What may go wrong, and what is done then."""

    max_failures: int = Field(2, ge=-1)
    """Restarts of the workers after errors before the run gives up (-1: no limit); nodes taken
    away with notice do not count."""
    not_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is NaN or infinite: stop the run, or leave the step out; the batch
    is recorded either way."""
    spike: float | None = Field(None, gt=1)
    """A gradient norm of more than this many times the recent median is a spike; None: never."""
    on_spike: Literal["stop", "skip", "record"] = "skip"
    """What is done about a spike."""
    max_skipped: int = Field(10, ge=0)
    """Steps left out before the run stops after all."""
    hang_s: float = Field(600.0, gt=0)
    """Seconds that one phase of a step (data, a micro-batch, the update, a checkpoint, …) may take
    on any rank before the run is declared hung: a report is written and the workers are restarted,
    as `max_failures` allows."""
    straggler: float = Field(0.25, gt=0)
    """A rank whose own time of a step exceeds the others' by this share for a while is named."""


class TrainingConfig(Section):
    """Training of the base under Ray Train."""

    steps: int = Field(200, ge=1)
    """Optimiser steps."""
    sequence_length: int = Field(128, ge=8)
    """Tokens of one packed sequence."""
    micro_batch: int = Field(8, ge=1)
    """Sequences in a micro-batch: the unit dealt to ranks."""
    micro_batches: int = Field(4, ge=1)
    """Micro-batches in a step, whatever the world size:
    tokens per step = sequence_length x micro_batch x micro_batches."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The cosine's floor as a share of `lr`."""
    warmup_steps: int = Field(20, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW weight decay on matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    clip: float = Field(1.0, gt=0)
    """Global gradient norm is clipped to this."""
    packing: Literal["concatenate", "isolate"] = "concatenate"
    """Documents share a sequence; `isolate` hides them from one another (attention mask and
    positions begin anew at each)."""
    strategy: Strategy = "fsdp"
    """How the model is spread over workers. `auto` tries the sensible ones, briefly and for real,
    and records why it picked what it did."""
    parallel: ParallelConfig = ParallelConfig()
    """Details of the strategy."""
    compression: CompressionConfig = CompressionConfig()
    """Of gradients, between ranks."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """`auto` is bfloat16 compute with float32 parameters and reduction where the GPU has it."""
    workers: (
        Annotated[int, Field(ge=1)]
        | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    ) = 2
    """Ray Train workers; each takes one slot of the gpu pool. [fewest, most]: elastic, the run goes
    on with those that are there."""
    resize_s: float = Field(60.0, gt=0)
    """Elastic: seconds between looks at whether more workers fit; each change costs a restart."""
    cpus_per_worker: float = Field(1, gt=0)
    """CPUs a worker reserves, and torch threads it runs where there is no GPU."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    faults: FaultConfig = FaultConfig()
    """Failures, hangs, bad numbers."""
    audit: Literal["require", "warn", "off"] = "off"
    """A quick audit of the gpu pool before a run: `require` leaves out the nodes that fail it,
    `warn` only says which do, `off` saves the minute."""
    eval_every: int = Field(100, ge=1)
    """Steps between held-out evaluations; the last step is always evaluated."""
    eval_sequences: int = Field(64, ge=1)
    """Held-out sequences evaluated, at most."""

    @model_validator(mode="after")
    def _workers_in_order(self) -> TrainingConfig:
        if self.fewest_workers > self.most_workers:
            raise ValueError(f"workers: {list(self.workers)} is not [fewest, most]")  # type: ignore[arg-type]
        return self

    @property
    def fewest_workers(self) -> int:
        """What a run needs to start and to go on."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def most_workers(self) -> int:
        """What a run uses where the pool has it."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, the same for every world size."""
        return self.sequence_length * self.micro_batch * self.micro_batches


class LoraConfig(Section):
    """Shape and training of a LoRA adapter (PEFT's format)."""

    rank: int = Field(8, ge=1)
    """Rank of A and B."""
    alpha: float = Field(16, gt=0)
    """Scaling numerator: the delta is alpha / rank x B A."""
    targets: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Names of the projections that get an adapter."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    steps: int = Field(200, ge=1)
    """Optimiser steps."""
    batch: int = Field(32, ge=1)
    """Rows a step."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate (cosine, 5 % warm-up)."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""


class AdapterConfig(Section):
    """One specialist: its rows, its template, how it is judged."""

    train: str
    """JSONL of {"input": …, "output": …}; `output` may be a list of acceptable answers (a set),
    of which the first is trained on."""
    holdout: str
    """JSONL of the same shape, judged and never trained on."""
    template: str = "{input}\n"
    """The prompt: must contain {input}. The answer follows it, then the end-of-text token."""
    kind: Literal["choice", "generate"] = "choice"
    """`choice` scores a closed set of answers; `generate` decodes greedily."""
    choices: str | None = None
    """JSON file with the list of choices; by default the distinct outputs of `train`."""
    candidates: str | None = None
    """`FILE.py:function` or dotted path of `(input: str) -> list[str]`: the choices of each input,
    made from it (extraction), in place of one closed set."""
    augment: str | None = None
    """`FILE.py:function` or dotted path of `(input: str, rng: random.Random) -> str`, applied
    to every training row anew each epoch."""
    lora: LoraConfig = LoraConfig()
    """Shape and training."""
    margin: float = Field(0.02, ge=0)
    """Held-out exact match must beat the majority class by this, or nothing is published."""
    max_holdout: int = Field(1000, ge=1)
    """Held-out rows judged, at most (the first ones)."""

    @model_validator(mode="after")
    def _template_has_input(self) -> AdapterConfig:
        if "{input}" not in self.template:
            raise ValueError("template must contain {input}")
        return self
