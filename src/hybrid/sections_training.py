"""The sections `training` and `adapters` of hybrid.yaml: the base's run and the specialists'."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hybrid.sections_base import Section

Strategy = Literal["single", "ddp", "fsdp", "hsdp", "tp", "deepspeed", "auto"]


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


class TrialsConfig(Section):
    """What `strategy: auto` tries before the first step of a run."""

    warmup: int = Field(2, ge=1)
    """Steps of a trial that are not timed."""
    steps: int = Field(3, ge=1)
    """Steps of a trial that are timed; their median counts."""
    most: int = Field(12, ge=1)
    """Trials, at most."""
    vary: tuple[
        Literal["reshard", "activation_checkpointing", "compile", "micro_batch", "deepspeed"], ...
    ] = ("reshard", "activation_checkpointing", "compile", "micro_batch")
    """What is tried besides strategies. `micro_batch` keeps the rows of a step: more at once in
    fewer micro-batches, or the other way round. `compile` is tried on GPUs only. `deepspeed`, the
    strategy, is tried on GPUs where its package is installed; listed, on a CPU too."""


class CompressionConfig(Section):
    """What travels between ranks when gradients are reduced."""

    kind: Literal["none", "bf16", "powersgd", "onebit"] = "none"
    """`bf16` for ddp, fsdp and hsdp; `powersgd` (Vogels et al. 2019) and `onebit` (the compressed
    all-reduce of 1-bit Adam, Tang et al. 2021), both with error feedback, for ddp."""
    rank: int = Field(4, ge=1)
    """powersgd: rank of the approximation."""
    warm_start_steps: int = Field(10, ge=0)
    """powersgd and onebit: first steps without compression."""


def compression_refusal(strategy: Strategy, kind: str) -> str | None:
    """Why gradients cannot be compressed so under this strategy; None if they can."""
    if kind == "none" or strategy in ("ddp", "auto"):
        return None
    if strategy in ("fsdp", "hsdp"):
        flat = f"{strategy!r} reduces flat shards of many parameters"
        return {
            "bf16": None,
            "powersgd": f"{flat}, which have no rows and columns to factor: 'powersgd' needs"
            " strategy 'ddp' (or use 'bf16')",
            "onebit": f"{flat}, added up on their way, and signs with scales do not add: 'onebit'"
            " needs strategy 'ddp' (or use 'bf16')",
        }[kind]
    if strategy == "single":
        return f"{kind!r} has nothing to do: strategy 'single' sends no gradients"
    return f"{kind!r} is for strategies 'ddp', 'fsdp' and 'hsdp', not {strategy!r}"


def deepspeed_refusal(parallel: ParallelConfig, precision: str) -> str | None:
    """What strategy 'deepspeed' has not, of what is asked for; None if it has all of it."""
    for key, asked, instead in (
        ("parallel.reshard", not parallel.reshard, "parameters are always dropped after forward"),
        ("parallel.tensor", parallel.tensor > 1, "use 'tp'"),
        ("parallel.shard", parallel.shard is not None, "use 'hsdp'"),
        ("parallel.offload", parallel.offload, "its AdamW on the CPU is another one: use 'fsdp'"),
        ("parallel.compile", parallel.compile, "its hooks run within each block: use 'fsdp'"),
        ("precision", precision == "float64", "its master copy is float32: use 'fsdp'"),
    ):
        if asked:
            return f"{key}: strategy 'deepspeed' does not take this; {instead}"
    return None


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
    """How the model is spread over workers; `deepspeed` is ZeRO-3 by that package (an extra);
    `auto` tries what makes sense and takes the fastest."""
    trials: TrialsConfig = TrialsConfig()
    """auto: how it is tried."""
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
    on with those that are there; under tp and hsdp in multiples of `parallel.tensor` or `shard`."""
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
    preflight: Literal["require", "warn", "off"] = "require"
    """Checks before anything expensive: a failed one stops the run, or is only said, or none is
    made."""
    usd_per_hour: float | None = Field(None, ge=0)
    """Price of one worker's share of a machine, say of one GPU, in USD an hour; the report of the
    run then says what it cost."""
    eval_every: int = Field(100, ge=1)
    """Steps between held-out evaluations; the last step is always evaluated."""
    eval_sequences: int = Field(64, ge=1)
    """Held-out sequences evaluated, at most."""

    @model_validator(mode="after")
    def _workers_in_order(self) -> TrainingConfig:
        if not isinstance(self.workers, int) and self.workers[0] > self.workers[1]:
            raise ValueError(f"workers: {list(self.workers)} is not [fewest, most]")
        if self.fewest_workers > self.most_workers:
            key = "tensor" if self.strategy == "tp" else "shard"
            asked = self.workers if isinstance(self.workers, int) else list(self.workers)
            raise ValueError(
                f"workers: {asked} has no multiple of parallel.{key}, which is {self.worker_unit}"
            )
        return self

    @model_validator(mode="after")
    def _compression_fits(self) -> TrainingConfig:
        refusal = compression_refusal(self.strategy, self.compression.kind)
        if refusal is not None:
            raise ValueError(f"compression.kind: {refusal}")
        return self

    @model_validator(mode="after")
    def _deepspeed_fits(self) -> TrainingConfig:
        refusal = deepspeed_refusal(self.parallel, self.precision)
        if self.strategy == "deepspeed" and refusal is not None:
            raise ValueError(refusal)
        return self

    @property
    def worker_unit(self) -> int:
        """Ranks that belong together: a run has a multiple of them."""
        if self.strategy == "tp":
            return self.parallel.tensor
        return self.parallel.shard or 1 if self.strategy == "hsdp" else 1

    @property
    def fewest_workers(self) -> int:
        """What a run needs to start and to go on."""
        fewest = self.workers if isinstance(self.workers, int) else self.workers[0]
        return -(-fewest // self.worker_unit) * self.worker_unit

    @property
    def most_workers(self) -> int:
        """What a run uses where the pool has it."""
        most = self.workers if isinstance(self.workers, int) else self.workers[1]
        return most // self.worker_unit * self.worker_unit

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, the same for every world size."""
        return self.sequence_length * self.micro_batch * self.micro_batches


class EarlyStoppingConfig(Section):
    """Stopping where more training no longer helps what is not trained on."""

    share: float = Field(0.1, gt=0, lt=1)
    """Share of the training rows set aside, chosen by a hash of their input; the judged holdout is
    never looked at."""
    every: int = Field(20, ge=1)
    """Steps between looks at their loss."""
    patience: int = Field(5, ge=1)
    """Looks without a lower loss before training ends. The best weights are the ones kept."""


class LoraConfig(Section):
    """Shape and training of a LoRA adapter (PEFT's format)."""

    rank: int = Field(8, ge=1)
    """Rank of A and B."""
    alpha: float = Field(16, gt=0)
    """Scaling numerator: the delta is alpha / rank x B A."""
    targets: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Names of the modules that get an adapter."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Other ranks, by a regular expression that the end of a module's name matches."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other alphas, likewise."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained whole: `embed_tokens`, `lm_head`."""
    rslora: bool = False
    """Rank-stabilised (Kalajdzievski 2023): the delta is alpha / sqrt(rank) x B A."""
    dora: bool = False
    """Weight-decomposed (Liu et al. 2024): refused before training, as the engine has none."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    steps: int = Field(200, ge=1)
    """Optimiser steps, at most."""
    batch: int = Field(32, ge=1)
    """Rows a step."""
    micro_batches: int = Field(1, ge=1)
    """Parts a step's rows are computed in, dealt whole to `workers`: a fixed grid, so that any
    number of workers computes the same. More parts, less memory."""
    workers: int = Field(1, ge=1)
    """Processes that train this adapter together, the frozen base sharded over them (FSDP2): for
    bases that do not fit one device. At most `micro_batches`."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate (cosine, 5 % warm-up)."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    base_precision: Literal["auto", "float32", "bfloat16", "int8", "nf4"] = "auto"
    """Of the frozen base while training; the adapter is float32. `nf4` is QLoRA's 4-bit type
    (Dettmers et al. 2023), `int8` one scale a row; `auto` is bfloat16 where the GPU has it."""
    packing: bool = False
    """Put short rows into one sequence, hidden from one another, instead of padding them."""
    weights: Literal["none", "balanced", "sqrt"] = "none"
    """How rows weigh in the loss, by their answer: `balanced` makes every answer weigh the same in
    all, `sqrt` goes half the way."""
    early_stopping: EarlyStoppingConfig | None = None
    """None: train all steps."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between small checkpoints, from which a killed run goes on."""

    @model_validator(mode="after")
    def _grid_fits(self) -> LoraConfig:
        if self.micro_batches > self.batch:
            raise ValueError(f"micro_batches ({self.micro_batches}) is more than batch rows")
        if self.workers > self.micro_batches:
            raise ValueError(
                f"workers ({self.workers}) is more than micro_batches ({self.micro_batches}), the"
                " parts that are dealt to them: raise micro_batches"
            )
        if self.workers > 1 and self.base_precision in ("int8", "nf4"):
            raise ValueError(
                f"base_precision {self.base_precision} is for one worker: sharded bases are"
                " bfloat16 or float32"
            )
        return self


class AdapterConfig(Section):
    """One specialist: its rows, its template, how it is judged."""

    train: str
    """JSONL of {"input": …, "output": …}; `output` may be a list of acceptable answers (a set),
    of which the first is trained on. For `embed`, the two are texts that mean the same."""
    holdout: str
    """JSONL of the same shape, judged and never trained on."""
    template: str = "{input}\n"
    """The prompt: must contain {input}. The answer follows it, then the end-of-text token. For
    `embed` both texts are put into it; its default is then `{input}`."""
    kind: Literal["choice", "generate", "embed"] = "choice"
    """`choice` scores a closed set of answers; `generate` decodes greedily; `embed` makes vectors
    that are near for texts that mean the same."""
    choices: str | None = None
    """JSON file with the list of choices; by default the distinct outputs of `train`."""
    candidates: str | None = None
    """`FILE.py:function` or dotted path of `(input: str) -> list[str]`: the choices of each input,
    made from it (extraction), in place of one closed set."""
    augment: str | None = None
    """`FILE.py:function` or dotted path of `(input: str, rng: random.Random) -> str`, applied
    to every training row anew each epoch."""
    temperature: float = Field(0.05, gt=0)
    """embed: what similarities are divided by in the contrastive loss."""
    lora: LoraConfig = LoraConfig()
    """Shape and training."""
    margin: float = Field(0.02, ge=0)
    """Held-out exact match must beat the majority class by this, or nothing is published; for
    `embed` recall@1 must beat the base's."""
    max_holdout: int = Field(1000, ge=1)
    """Held-out rows judged, at most (the first ones)."""

    @model_validator(mode="before")
    @classmethod
    def _embeds_plain_text(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("kind") == "embed" and "template" not in raw:
            return {**raw, "template": "{input}"}
        return raw

    @model_validator(mode="after")
    def _template_has_input(self) -> AdapterConfig:
        if "{input}" not in self.template:
            raise ValueError("template must contain {input}")
        return self

    @model_validator(mode="after")
    def _of_its_kind(self) -> AdapterConfig:
        if self.kind != "embed":
            return self
        for field, given in (
            ("choices", self.choices),
            ("candidates", self.candidates),
            ("lora.packing", self.lora.packing),
            ("lora.weights", self.lora.weights != "none"),
        ):
            if given:
                raise ValueError(f"{field} does not apply to kind embed")
        return self
