"""The sections of hybrid.yaml: frozen models, a docstring under each field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from hybrid.sections_base import Name, Section
from hybrid.sections_training import AdapterConfig, TrainingConfig


class RunConfig(Section):
    """What this project is called and where it keeps its local state."""

    name: Name
    """Name of the project; training runs and Serve applications are named after it."""
    dir: Path = Path(".hybrid")
    """Local state: shards, checkpoints, logs, the embedded store. On a cluster, a shared path."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation, of data order and of every micro-batch's own generator."""


class RegistryConfig(Section):
    """Where bases, adapters and releases are published."""

    root: str = ".hybrid/registry"
    """A local path, or any fsspec URL such as s3://bucket/prefix."""
    cache: Path = Path(".hybrid/cache")
    """Where models from a remote registry are materialised on each machine."""


class ModelConfig(Section):
    """The base model: made from these dimensions, or loaded from a Hugging Face directory."""

    name: Name
    """The base's name in the registry, and the alias clients write as `model`."""
    source: Path | None = None
    """A Hugging Face model directory to start from; the dimensions below are then ignored."""
    architecture: Literal["llama"] = "llama"
    """Family of a newly made model, as transformers names it."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the gated MLP."""
    layers: int = Field(4, ge=1)
    """Number of transformer blocks; each is one FSDP unit."""
    heads: int = Field(4, ge=1)
    """Number of query heads."""
    kv_heads: int = Field(2, ge=1)
    """Number of key and value heads (grouped-query attention)."""
    context: int = Field(256, ge=16)
    """Longest sequence the model is made for, in tokens."""
    tie_embeddings: bool = True
    """Share the input embedding with the output projection."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError("hidden_size / heads must be a whole, even head dimension")
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        return self


class TokenizerConfig(Section):
    """The tokenizer of a newly made base; a base from `model.source` brings its own."""

    vocab_size: int = Field(1024, ge=260)
    """Byte-level BPE vocabulary, special tokens included."""
    train_on: tuple[str, ...] = ()
    """Globs or fsspec URLs the merges are learnt from; empty means `data.train`."""


class DataConfig(Section):
    """The corpus of the base."""

    train: tuple[str, ...] = ()
    """Text, JSONL or Parquet files: globs or fsspec URLs. A text file is one document a line
    when `text_documents` is `line`."""
    holdout: tuple[str, ...] = ()
    """Files for held-out evaluation; nothing of them is trained on."""
    field: str = "text"
    """The field of a JSONL row or Parquet column that holds the document."""
    text_documents: Literal["file", "line"] = "file"
    """Whether a text file is one document, or one a line."""
    prepare: str | None = None
    """A Python file with `prepare(out: Path) -> None` that makes the data below `run.dir`/data
    from packages or other sources; run once, before anything reads the globs."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How the tokenizer is made."""


class ServingConfig(Section):
    """The model deployment and the gateway."""

    host: str = "127.0.0.1"
    """Address the HTTP endpoint listens on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port of the HTTP endpoint; 0 picks a free one."""
    backend: Literal["engine", "vllm"] = "engine"
    """Which Backend serves the base."""
    replicas: int = Field(1, ge=1)
    """Model replicas, each one slot of the gpu pool."""
    cpus: float = Field(1, ge=0)
    """CPUs a model replica reserves."""
    gpus: float = Field(0, ge=0)
    """GPUs a model replica reserves."""
    threads: int = Field(1, ge=1)
    """torch threads of a replica where there is no GPU."""
    max_rows: int = Field(32, ge=1)
    """Requests decoded together in one step."""
    max_queue: int = Field(256, ge=1)
    """Requests that may wait; beyond it the answer is 429."""
    kv_tokens: int = Field(16384, ge=64)
    """Tokens of key/value cache, over all requests."""
    adapter_cache_mib: int = Field(4096, ge=0)
    """MiB of loaded adapters in a replica above which unused ones leave, the longest unused first;
    they are loaded again when asked for. Those in use or pinned stay, whatever they take."""
    pinned_adapters: tuple[Name, ...] = ()
    """Adapters by name that a replica loads before it is ready, and a new version of them before
    it is served; they never leave for the budget."""
    prefix_tokens: int = Field(16384, ge=0)
    """Tokens of prompts kept for requests of the same tenant and adapter that begin alike."""
    alias: Name = "stable"
    """The release alias that is served."""
    api_keys: tuple[str, ...] = ()
    """Bearer keys the endpoint accepts, as `tenant:key`; empty means open (bind to localhost)."""


class StoreConfig(Section):
    """The Redis-protocol store behind the agents."""

    url: str | None = None
    """redis://… of a Valkey or Redis >= 7. None: an embedded server, for one machine only."""
    fsync: Literal["always", "everysec"] = "always"
    """Of the embedded server. `everysec` may lose the last second of acknowledged tasks when
    the machine (not the process) dies."""
    partitions: int = Field(1, ge=1)
    """Hash-tagged partitions of the mailbox ({h0}, {h1}, …)."""
    max_depth: int = Field(10000, ge=1)
    """Unfinished tasks of an agent before submits are answered with 429."""
    max_tenant_depth: int = Field(50000, ge=1)
    """Unfinished tasks of a tenant before its submits are answered with 429."""
    max_events: int = Field(1000, ge=0)
    """Events kept of a root task and all beneath it, for those who listen; 0 keeps none."""
    max_steps: int = Field(10000, ge=1)
    """Journal entries of one task."""
    max_payload_mib: int = Field(64, ge=1)
    """MiB of one input or result. Over 256 KiB it is kept as a blob beside the registry."""
    lease_s: float = Field(15, gt=0)
    """Seconds a lease lasts without renewal."""
    max_attempts: int = Field(4, ge=1)
    """Attempts before a task goes to the dead letter."""
    retain_s: float = Field(86400, gt=0)
    """Seconds a finished task is kept."""


class AgentConfig(Section):
    """One agent: what it is for, which adapter it speaks through, how it behaves."""

    model_config = ConfigDict(allow_inf_nan=False)  # it is kept as JSON

    description: str = ""
    """What it answers; the router reads this."""
    behaviour: str = "answer"
    """`answer`, `chain`, `route`, `search` or a dotted path to an async function
    `(ctx) -> output`."""
    adapter: str | None = None
    """Adapter of the served release; None is the base."""
    template: str = "{input}\n"
    """Prompt for the model: must contain {input}."""
    choices: tuple[str, ...] | None = None
    """A closed set of answers, scored rather than generated."""
    max_tokens: int = Field(64, ge=1)
    """Longest generated answer."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    verify: str | None = None
    """Dotted path of `(input: str, output: str) -> str | None`: None is fine, a string says what
    is wrong; the built-ins are `nonempty`, `in_choices` and `json`."""
    examples: tuple[str, ...] = ()
    """Inputs the router learns this agent by."""
    routes: tuple[str, ...] = ()
    """For `route` and `chain`: the agents chosen among; empty means every agent but itself."""
    fallback: str | None = None
    """For `route` and `chain`: the agent that gets what no agent matches."""
    embedder: str | None = None
    """Adapter of kind `embed`: `route` and `chain` then choose by its vectors too and not by words
    alone; `search` needs it."""
    embedder_template: str = "{input}"
    """What each text is put into before it becomes a vector: as `adapters.NAME.template`."""
    threshold: float = Field(0.35, ge=0, le=1)
    """For `route` and `chain`: the calibrated score below which the router abstains."""
    max_concurrency: int = Field(8, ge=1)
    """Tasks of this agent in flight on one host."""
    timeout_s: float = Field(60, gt=0)
    """Default deadline of a task."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Free settings of a custom behaviour."""


class SwarmConfig(Section):
    """The hosts that run agents."""

    hosts: int = Field(2, ge=0)
    """Agent hosts, spread over the agents pool; the fewest, where `max_hosts` is more."""
    max_hosts: int | None = Field(None, ge=1)
    """The most hosts: more than `hosts` are started while work waits. None: always `hosts`."""
    wait_s: float = Field(1.0, gt=0)
    """Seconds a ready task may wait before another host is started."""
    idle_s: float = Field(30.0, gt=0)
    """Seconds in which fewer hosts are enough before one is ended."""
    blocked_s: float = Field(10.0, gt=0)
    """Seconds a behaviour may block its host's event loop before the host is replaced."""
    host_memory_mib: int = Field(2048, ge=64)
    """MiB of memory that behaviours may take on one host; what wants more gets a MemoryError."""
    concurrency: int = Field(32, ge=1)
    """Tasks in flight on one host."""


class AgentsConfig(Section):
    """The agents and the hosts they run on."""

    swarm: SwarmConfig = SwarmConfig()
    """How many hosts, how busy."""
    specs: dict[Name, AgentConfig] = Field(default_factory=dict)
    """Agents by name."""


class ProjectConfig(Section):
    """The whole of hybrid.yaml."""

    run: RunConfig
    registry: RegistryConfig = RegistryConfig()
    model: ModelConfig
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    adapters: dict[Name, AdapterConfig] = Field(default_factory=dict)
    """Specialists by name."""
    serving: ServingConfig = ServingConfig()
    store: StoreConfig = StoreConfig()
    agents: AgentsConfig = AgentsConfig()

    @model_validator(mode="after")
    def _sequence_fits(self) -> ProjectConfig:
        if self.model.source is None and self.training.sequence_length > self.model.context:
            raise ValueError(
                f"training.sequence_length ({self.training.sequence_length}) is longer than"
                f" model.context ({self.model.context})"
            )
        return self

    @model_validator(mode="after")
    def _embedders_embed(self) -> ProjectConfig:
        """An adapter that is not in this file may be in the served release all the same."""
        for name, agent in self.agents.specs.items():
            adapter = self.adapters.get(agent.embedder or "")
            if adapter is None:
                continue
            where = f"agents.specs.{name}.embedder"
            if adapter.kind != "embed":
                fine = [n for n, a in self.adapters.items() if a.kind == "embed"]
                raise ValueError(
                    f"{where}: adapter {agent.embedder!r} is of kind {adapter.kind}; one of kind"
                    f" embed is needed ({', '.join(fine) or 'there is none in adapters'})"
                )
            if adapter.template != agent.embedder_template:
                raise ValueError(
                    f"{where}_template: {agent.embedder_template!r} is not what"
                    f" adapters.{agent.embedder} is trained with, {adapter.template!r}"
                )
        return self
