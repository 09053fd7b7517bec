"""The combinations that `strategy: auto` may try: those there are on these workers, and neighbours.

All of them compute the same steps: rows and tokens of a step stay, only how many rows are computed
at once changes. What makes no sense here is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from hybrid.config import ParallelConfig, TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training.rules import SHARDED, check_strategy

CHECKPOINTING = ("none", "selective", "full")
"""From the lightest, which recomputes nothing, to the one that keeps least."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where trials run.

    Attributes:
        nodes: the node of each rank, in order of rank.
        gpu: whether they compute on GPUs.
        memory: bytes that a rank may use: of its GPU, or its share of the machine's main memory.
        deepspeed: whether the package is installed on all of them.
    """

    nodes: tuple[str, ...]
    gpu: bool
    memory: int
    deepspeed: bool = False

    @property
    def per_node(self) -> int:
        """Ranks on the node that has fewest."""
        return min(self.nodes.count(node) for node in self.nodes)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination of everything that does not change what is learnt."""

    strategy: str
    reshard: bool = True
    tensor: int = 1
    shard: int | None = None
    offload: bool = False
    activation_checkpointing: str = "none"
    compile: bool = False
    micro_batch: int
    micro_batches: int

    @property
    def way(self) -> tuple[str, int, int | None, bool]:
        """How it spreads the model."""
        return self.strategy, self.tensor, self.shard, self.offload

    def as_settings(self) -> dict[str, Any]:
        """Keys of `training` that choose this combination, but what is so by default."""
        fields = asdict(self)
        parallel = {
            name: fields[name]
            for name, known in ParallelConfig.model_fields.items()
            if name in fields and fields[name] != known.default
        }
        grid = {name: fields[name] for name in ("micro_batch", "micro_batches")}
        more = {"parallel": parallel} if parallel else {}
        return {"strategy": self.strategy, **grid, **more}

    def __str__(self) -> str:
        words = [f"{self.strategy} x {self.tensor}" if self.tensor > 1 else self.strategy]
        words += [f"shard {self.shard}"] if self.shard else []
        words += ["keep gathered"] if self.strategy in SHARDED and not self.reshard else []
        words += ["offload"] if self.offload else []
        if self.activation_checkpointing != "none":
            words.append(f"{self.activation_checkpointing} checkpointing")
        words += ["compile"] if self.compile else []
        return ", ".join(words)

    def applied(self, settings: TrainingConfig) -> TrainingConfig:
        """The settings with this combination in place of `auto`.

        Raises:
            ConfigError: they make no sense together.
        """
        parallel = {
            **settings.parallel.model_dump(),
            "reshard": self.reshard,
            "tensor": self.tensor,
            "shard": self.shard,
            "offload": self.offload,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
        }
        changed = {
            "strategy": self.strategy,
            "parallel": parallel,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
        }
        try:
            return TrainingConfig.model_validate({**settings.model_dump(), **changed})
        except ValidationError as e:
            why = e.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(f"training.{why}", param="training.strategy") from None


class Space:
    """All that may be tried with these settings, for this model, on these workers.

    What `parallel` sets otherwise than by default stays so in every combination, and so does what
    `trials.vary` does not list.

    Args:
        settings: of the run, with strategy `auto`.
        model: the transformers configuration.
    """

    def __init__(self, settings: TrainingConfig, model: Any, place: Place) -> None:
        self.settings, self.place = settings, place
        self.left_out: dict[str, str] = {}
        """What is not tried at all, and why."""
        self._varies = set(settings.trials.vary)
        if getattr(model, "attention_dropout", 0) > 0 and "micro_batch" in self._varies:
            self._varies.remove("micro_batch")
            self.left_out["other micro-batches"] = (
                "the model has dropout, which is drawn for each micro-batch"
            )
        self.ways = [c for c in self._ways() if self._allowed(c, model)]
        """One combination of each way to spread the model, the plainest of that way."""

    def frugal(self) -> Candidate:
        """The combination that needs least memory.

        Raises:
            ConfigError: there is none at all.
        """
        if not self.ways:
            told = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            key = "training.strategy"
            raise ConfigError(f"{key}: auto: there is nothing to try: {told}", param=key)
        sharded = [way for way in self.ways if way.strategy == "fsdp"] or self.ways
        return list(self.ladder(sharded[0]))[-1]

    def ladder(self, way: Candidate) -> Iterator[Candidate]:
        """The combinations of a way from the fastest to the one that needs least memory."""
        for checkpointing in self._checkpointing():
            yield replace(way, activation_checkpointing=checkpointing)
        last = self._checkpointing()[-1]
        smaller = replace(way, activation_checkpointing=last)
        while (halved := self._halved(smaller)) is not None:
            smaller = halved
            yield smaller

    def neighbours(self, c: Candidate) -> Iterator[Candidate]:
        """Combinations that differ from one in a single respect, the likeliest gain first."""
        if (doubled := self._doubled(c)) is not None:
            yield doubled
        if c.strategy in SHARDED and "reshard" in self._varies and self._free("reshard"):
            yield replace(c, reshard=not c.reshard)
        modes = self._checkpointing()
        if (at := modes.index(c.activation_checkpointing)) > 0:
            yield replace(c, activation_checkpointing=modes[at - 1])
        compiles = self.place.gpu and c.strategy != "deepspeed"
        if compiles and "compile" in self._varies and self._free("compile"):
            yield replace(c, compile=not c.compile)
        if (halved := self._halved(c)) is not None:
            yield halved

    def lighter(self, c: Candidate) -> Iterator[Candidate]:
        """The same micro-batch in less memory, where that of `c` has not been enough."""
        modes = self._checkpointing()
        for mode in modes[modes.index(c.activation_checkpointing) + 1 :]:
            yield replace(c, activation_checkpointing=mode)

    def _free(self, name: str) -> bool:
        """Whether a key of `parallel` is as it is by default."""
        parallel = self.settings.parallel
        return bool(getattr(parallel, name) == type(parallel).model_fields[name].default)

    def _checkpointing(self) -> tuple[str, ...]:
        key = "activation_checkpointing"
        if key in self._varies and self._free(key):
            return CHECKPOINTING
        return (self.settings.parallel.activation_checkpointing,)

    def _ways(self) -> Iterator[Candidate]:
        parallel, settings = self.settings.parallel, self.settings
        plain = Candidate(
            strategy="single",
            reshard=parallel.reshard,
            tensor=parallel.tensor,
            shard=parallel.shard,
            offload=parallel.offload,
            activation_checkpointing=self._checkpointing()[0],
            compile=parallel.compile,
            micro_batch=settings.micro_batch,
            micro_batches=settings.micro_batches,
        )
        yield plain
        for strategy in ("ddp", "fsdp", "hsdp"):
            yield replace(plain, strategy=strategy)
        per_node = self.place.per_node
        degrees = {parallel.tensor} if parallel.tensor > 1 else {2, per_node} - {1}
        for degree in sorted(degrees):
            yield replace(plain, strategy="tp", tensor=degree)
        yield replace(plain, strategy="deepspeed")

    def _allowed(self, c: Candidate, model: Any) -> bool:
        why = self._refusal(c)
        if why is None:
            try:
                check_strategy(c.applied(self.settings), model, self.place.nodes)
            except ConfigError as e:
                why = e.message
        if why is not None:
            self.left_out[str(c)] = why
        return why is None

    def _refusal(self, c: Candidate) -> str | None:
        """Why a way that could run makes no sense here."""
        size, elastic = len(self.place.nodes), self._elastic
        if c.strategy == "single":
            return "for one worker; more may come" if elastic and size == 1 else None
        if size == 1 and not elastic and not c.offload:
            return "one worker: there is nothing to spread"
        if c.strategy == "hsdp" and c.shard is None:
            if elastic:
                return "the workers of a node may become more or fewer: set parallel.shard"
            if len(set(self.place.nodes)) == 1:
                return "all workers are on one node: the same as fsdp"
            if self.place.per_node == 1:
                return "one worker a node: the same as ddp"
        if c.strategy == "deepspeed":
            return self._deepspeed_refusal()
        given = self.settings.parallel.tensor > 1
        if c.strategy == "tp" and not given and self.place.per_node % c.tensor:
            return f"{self.place.per_node} workers a node: activations would cross the network"
        return None

    def _deepspeed_refusal(self) -> str | None:
        if not (self.place.gpu or "deepspeed" in self._varies):
            return (
                "is made for GPUs: list it in training.trials.vary to try it on CPUs all the same"
            )
        if not self.place.deepspeed:
            return "its package is not on every node: pip install 'hybrid[deepspeed]'"
        return None

    @property
    def _elastic(self) -> bool:
        return self.settings.fewest_workers < self.settings.most_workers

    def _doubled(self, c: Candidate) -> Candidate | None:
        """Twice the rows at once, in half as many micro-batches; None if some rank were idle."""
        groups = max(len(self.place.nodes), self.settings.most_workers) // c.tensor
        half = c.micro_batches // 2
        if "micro_batch" not in self._varies or c.micro_batches % 2 or half < groups:
            return None
        return replace(c, micro_batch=2 * c.micro_batch, micro_batches=half)

    def _halved(self, c: Candidate) -> Candidate | None:
        if "micro_batch" not in self._varies or c.micro_batch % 2:
            return None
        return replace(c, micro_batch=c.micro_batch // 2, micro_batches=2 * c.micro_batches)
