"""What is to be done: the frozen sections of workload.yaml, and the checks between them.

Counts may be written 70B, 15T or 5.5e6; money as a number, "$600" or "600 USD".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from hybrid.config import explain, read_mapping
from hybrid.errors import ConfigError
from hybrid.planning.gpus import Gpu, find_gpu
from hybrid.sections_base import Section

_SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = r"[+-]?\d[\d,_]*(?:\.\d*)?(?:e[+-]?\d+)?"


def _plain(value: Any) -> Any:
    """Refuse yes and no where a number is meant; pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number, found yes or no")
    return value


def _count(value: Any) -> Any:
    if isinstance(value, str) and (
        found := re.fullmatch(rf"({_NUMBER})\s*([KMBT]?)", value.strip(), re.IGNORECASE)
    ):
        return float(re.sub(r"[,_]", "", found[1])) * _SUFFIX[found[2].upper()]
    return _plain(value)


def _usd(value: Any) -> Any:
    if not isinstance(value, str):
        return _plain(value)
    found = re.fullmatch(rf"\$?\s*({_NUMBER})\s*(USD)?", value.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(
            "expected US dollars, e.g. 600 or $600; other currencies are not converted"
        )
    return float(re.sub(r"[,_]", "", found[1]))


_FINITE_ABOVE_0 = Field(gt=0, allow_inf_nan=False)
Positive = Annotated[float, BeforeValidator(_plain), _FINITE_ABOVE_0]
NotNegative = Annotated[float, BeforeValidator(_plain), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[float, BeforeValidator(_count), _FINITE_ABOVE_0]
Usd = Annotated[float, BeforeValidator(_usd), _FINITE_ABOVE_0]
Share = Annotated[float, BeforeValidator(_plain), Field(gt=0, le=1)]
Whole = Annotated[int, BeforeValidator(_plain), Field(ge=1)]
WholeOrZero = Annotated[int, BeforeValidator(_plain), Field(ge=0)]
Market = Literal["on-demand", "spot"]


class TrainPart(Section):
    """A base to be trained."""

    parameters: Count
    """N: the model's parameters."""
    tokens: Count
    """D: the tokens it is trained on, all passes together."""
    specialists: WholeOrZero = 0
    """Adapters to be trained on the base afterwards."""
    deadline_hours: Positive | None = None
    """Hours that the training may take."""


class ServePart(Section):
    """Requests to be answered."""

    requests_per_s: Positive
    """Requests of users a second, at the busiest time that must go well."""
    weights: Literal["own", "api"] = "own"
    """Whether the model is served by us, or called over somebody's API."""
    parameters: Count | None = None
    """Parameters of the served model; needed with own weights."""
    tokens_per_call: Count = 1500
    """Tokens of a model call, prompt and answer together."""
    call_s: Positive = 2.0
    """Mean seconds that one model call takes (measured, or the API's)."""
    calls_per_replica_s: Positive | None = None
    """Measured calls a second of one replica; None: from its FLOP/s."""
    usd_per_call: Usd | None = None
    """What a call over an API costs."""

    @model_validator(mode="after")
    def _agrees(self) -> ServePart:
        if self.weights == "own" and self.parameters is None:
            raise ValueError("parameters: missing; own weights need it (or weights: api)")
        if self.weights == "own" and self.usd_per_call is not None:
            raise ValueError(
                "usd_per_call contradicts weights: own; an own replica costs by the hour"
            )
        if self.weights == "api" and self.calls_per_replica_s is not None:
            raise ValueError("calls_per_replica_s contradicts weights: api; an API has no replica")
        return self


class Hop(Section):
    """One hop of a request: a model call, a tool, a queue. Given as percentiles or as samples."""

    name: str
    """What it is."""
    p50_ms: Positive | None = None
    """Its median."""
    p99_ms: Positive | None = None
    """What one in a hundred exceeds."""
    samples_ms: tuple[Positive, ...] = ()
    """Measured times, at least 20, in place of the percentiles."""

    @model_validator(mode="after")
    def _agrees(self) -> Hop:
        if self.samples_ms:
            if self.p50_ms is not None or self.p99_ms is not None:
                raise ValueError("samples_ms contradicts p50_ms and p99_ms: give one of the two")
            if len(self.samples_ms) < 20:
                raise ValueError(f"samples_ms: {len(self.samples_ms)} of at least 20")
        elif self.p50_ms is None or self.p99_ms is None:
            raise ValueError("p50_ms, p99_ms: both are needed (or samples_ms)")
        elif self.p99_ms < self.p50_ms:
            raise ValueError(f"p99_ms: {self.p99_ms:g} is less than p50_ms: {self.p50_ms:g}")
        return self


class LatencyPart(Section):
    """How long an answer may take, end to end."""

    limit_ms: Positive | None = None
    """The most it may take for 99 of 100 requests; None: no limit."""
    hops: tuple[Hop, ...] = ()
    """The hops of one request, in order; () : `steps` model calls of `serve.call_s`."""


class BudgetPart(Section):
    """What may be spent."""

    usd: Usd | None = None
    """US dollars; None: only the market is limited."""
    per: Literal["month", "total"] = "month"
    """For each month, or for all of it."""
    market: Market = "on-demand"
    """spot: only machines that may be taken away at any moment can be paid for."""


class PoolPart(Section):
    """What both kinds of pool have."""

    usd_per_hour: Usd | None = None
    """Price of the whole pool for an hour; None: by the price table."""
    hours: Positive | None = None
    """Hours that the pool is held; None: what the work takes, for serving the horizon."""
    zones: Whole = 1
    """Availability zones that it is spread over."""
    interruptions_per_node_hour: Positive | None = None
    """Spot: how often a node is taken away; None: an assumption that is shown."""
    correlation: Annotated[float, BeforeValidator(_plain), Field(ge=0, le=1)] | None = None
    """Spot: share of interruptions that take all nodes of a zone at once; None: assumed."""


class ClusterPart(PoolPart):
    """The gpu pool."""

    gpu: str = "H100 80GB HBM3"
    """Its product, as nvidia-smi or a seller writes it."""
    gpus: Whole = 8
    """How many GPUs there are in all."""
    gpus_per_node: Whole = 8
    """GPUs of one machine."""
    market: Market = "on-demand"
    """Which market it is bought on."""
    matmul_tflops: Positive | None = None
    """Measured dense bfloat16 TFLOP/s of one GPU (the audit's measured.matmul_tflops.bf16)."""
    mfu: Share | None = None
    """Measured share of `matmul_tflops` that training reaches; None: an assumption."""
    tokens_per_s: Positive | None = None
    """Measured tokens a second of the whole pool for this model, in place of the two above."""
    node_mtbf_hours: Positive | None = None
    """Mean hours between failures of one node; None: as published for 16,384 H100."""
    checkpoint_s: Positive | None = None
    """Seconds that one checkpoint holds the work up; None: its bytes at 1 GB/s a node."""
    restart_s: Positive = 300
    """Seconds from a failure until training goes on."""

    @model_validator(mode="after")
    def _agrees(self) -> ClusterPart:
        if self.tokens_per_s is not None and self.mfu is not None:
            raise ValueError("tokens_per_s contradicts mfu: both say how fast it is; give one")
        self.product()  # named here, where the file and the key are known
        return self

    def product(self) -> Gpu:
        """The GPU's facts. An unknown one is refused when the file is read."""
        return find_gpu(self.gpu)

    @property
    def nodes(self) -> int:
        """Machines that hold the GPUs."""
        return -(-self.gpus // self.gpus_per_node)


class AgentsPart(PoolPart):
    """The pool of agents' hosts."""

    nodes: Whole | None = None
    """How many; None: by Little's law."""
    vcpus: Positive = 1
    """Virtual processors of a node."""
    memory_gb: Positive = 4
    """Memory of a node."""
    market: Market = "spot"
    """Which market it is bought on."""
    calls_in_flight: Whole = 64
    """Model calls that one node waits for at once."""
    cpu_ms_per_call: Positive = 5.0
    """Processor time that a node spends on one call: prompt, parsing, journal."""
    ceiling: Annotated[float, BeforeValidator(_plain), Field(gt=0, lt=1)] = 0.7
    """Utilisation that is planned for; queues grow without bound towards 1."""
    replace_s: Positive = 180
    """Seconds until a node that was taken away is replaced."""


class Workload(Section):
    """One workload.yaml."""

    name: str = "workload"
    """Shown above the answer."""
    train: TrainPart | None = None
    """None: no base is trained."""
    serve: ServePart | None = None
    """None: no requests are answered."""
    skills: Whole | None = None
    """Separate skills that the work falls into; 1: one global model. None: the specialists."""
    steps: Whole = 1
    """Model calls that build on one another for one request; 1: input → output."""
    changes_per_month: NotNegative = 0
    """How often a new type, label or skill is added."""
    interruptible: bool | None = None
    """Whether work may stop at any moment and go on later; None: not said."""
    latency: LatencyPart = LatencyPart()
    """How long an answer may take."""
    budget: BudgetPart | None = None
    """None: no limit; costs are shown."""
    cluster: ClusterPart | None = None
    """None: one node of the default GPU, as far as one is needed."""
    agents: AgentsPart | None = None
    """None: nodes of 1 vCPU and 4 GB, as many as are needed."""
    horizon_hours: Positive = 730
    """Hours that serving and agents are paid for; a month."""

    @model_validator(mode="after")
    def _agrees(self) -> Workload:
        if not (self.train or self.serve or self.cluster or self.agents):
            raise ValueError("train, serve: missing; one of them says what is to be done")
        specialists = self.train.specialists if self.train else 0
        if self.skills is not None and self.skills < specialists:
            raise ValueError(
                f"skills: {self.skills} contradicts train.specialists: {specialists};"
                " every specialist is a skill"
            )
        if self.serve is None and self.train and self.steps > 1:
            raise ValueError(f"steps: {self.steps} contradicts no serve: nothing is asked")
        if self.serve is None and (self.latency.limit_ms or self.latency.hops):
            raise ValueError("latency contradicts no serve: there is no answer to wait for")
        if self.budget and self.budget.market == "spot" and self.interruptible is False:
            raise ValueError(
                "budget.market: spot contradicts interruptible: no; spot machines are taken away"
            )
        return self

    @property
    def skill_count(self) -> int:
        """`skills`, or as many as there are specialists."""
        return self.skills or max(1, self.train.specialists if self.train else 0)


def load(path: Path) -> Workload:
    """Read workload.yaml.

    Raises:
        ConfigError: it is missing or not YAML, or a key is unknown, missing, out of range or
            contradicts another; the message names file and key.
    """
    return parse(read_mapping(path), str(path))


def parse(raw: dict[str, Any], where: str = "workload.yaml") -> Workload:
    """Check a mapping already in memory; `where` is named in errors."""
    try:
        return Workload.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(explain(e, where, Workload)) from None
