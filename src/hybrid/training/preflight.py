"""Checks before a run that would be expensive to fail: each pure, all of them told together.

What the nodes say comes from `probe.py`; who asks them is `preflight_nodes.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError, HybridError, PlacementError
from hybrid.training.memory import Estimate
from hybrid.training.probe import Probe

Status = Literal["ok", "warn", "fail"]
PLACEMENT = ("slots", "nodes", "driver")
"""Checks of where the run is, rather than of what was asked for."""
GPU_RUNTIME = int(1.5 * 2**30)
"""Bytes of a GPU that a process takes besides tensors: CUDA's context, NCCL's buffers."""
CPU_RUNTIME = int(0.6 * 2**30)
"""Bytes of main memory of a worker without a model: Python, Ray, torch, transformers."""
MARGIN = 1.15
"""The estimate is held to 15 % of what is measured; a caching allocator loses some too."""
EPOCHS = 16
"""Passes over a corpus after which more of them are worth little (Muennighoff et al. 2023)."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was looked at, how it is, what was found, what to do about it."""

    name: str
    status: Status
    said: str
    do: str = ""


def failure(checks: Sequence[Check]) -> HybridError | None:
    """One error with all that failed; None if nothing did."""
    failed = [c for c in checks if c.status == "fail"]
    if not failed:
        return None
    text = "\n".join(f"  {c.name}: {c.said}{f'; {c.do}' if c.do else ''}" for c in failed)
    kind = PlacementError if all(c.name in PLACEMENT for c in failed) else ConfigError
    return kind(
        f"preflight: {len(failed)} of {len(checks)} checks failed, nothing was started"
        f" (training.preflight: warn goes on all the same)\n{text}"
    )


def check_model(error: HybridError) -> Check:
    """The base cannot be looked at: nothing is known of its memory and its checkpoints."""
    return Check(name="model", status="fail", said=error.message)


def check_memory(estimate: Estimate, nodes: Sequence[Probe], ranks: int) -> Check:
    """The estimate of a rank against what the tightest node has.

    Args:
        ranks: at most so many run on one node.
    """
    largest = ", ".join(
        f"{term} {size(n)}" for term, n in sorted(estimate.terms.items(), key=lambda t: -t[1])[:3]
    )
    said = f"a rank needs {size(estimate.total)} ({largest}), at its most in: {estimate.moment}"
    if not nodes:
        return Check(name="memory", status="ok", said=f"{said}; no node to hold it against")
    if all(node.gpus for node in nodes):
        where, has = min(
            ((f"{g.name} on {n.host}", g.free) for n in nodes for g in n.gpus), key=lambda x: x[1]
        )
        runtime, on_host = GPU_RUNTIME, estimate.host
    else:
        tightest = min(nodes, key=lambda n: n.memory)
        where, has = f"{tightest.host} for each of {ranks} ranks", tightest.memory // ranks
        has -= estimate.host
        runtime, on_host = CPU_RUNTIME, 0
    said += f"; {size(has)} are free on {where}, {size(runtime)} of it for the runtime"
    room = has - runtime
    do = f"{estimate.dominant} dominates: {estimate.advice}"
    tightest_host = min(n.memory for n in nodes)
    if on_host * ranks > tightest_host:
        said += (
            f"; offloaded states take {size(on_host * ranks)} of the {size(tightest_host)} main"
            " memory"
        )
        return Check(name="memory", status="fail", said=said, do="more workers or nodes")
    if estimate.total > room:
        return Check(name="memory", status="fail", said=said, do=do)
    if estimate.total * MARGIN > room:
        return Check(name="memory", status="warn", said=f"{said}: barely", do=do)
    return Check(name="memory", status="ok", said=said)


def check_batches(settings: TrainingConfig, tokens: int | None, context: int | None) -> Check:
    """The arithmetic of a step, of the workers and of the corpus.

    Args:
        tokens: of the corpus, where it is prepared.
        context: longest sequence the model is made for.
    """
    count = settings.micro_batches
    said = [
        f"{settings.tokens_per_step:,} tokens a step in {count} micro-batches of"
        f" {settings.micro_batch} x {settings.sequence_length}"
    ]
    do = []
    for workers in sorted({settings.fewest_workers, settings.most_workers}):
        if wasted := -count % workers:
            share = 100 * wasted / (count + wasted)
            said.append(f"{workers} workers leave {share:.0f} % of their micro-batch slots empty")
            do.append(f"make training.micro_batches a multiple of {workers}")
    if tokens is not None:
        needed = settings.steps * settings.tokens_per_step
        epochs = needed / tokens
        said.append(f"{settings.steps:,} steps read {needed:,} tokens: {epochs:.3g} epochs")
        if tokens <= settings.sequence_length:
            return Check(
                name="batches",
                status="fail",
                said=f"the corpus' {tokens} tokens are no whole sequence",
                do="add text or lower training.sequence_length",
            )
        if epochs > EPOCHS:
            do.append(f"more text: past {EPOCHS} epochs there is little to gain")
    if context is not None and settings.sequence_length > context:
        said.append(f"sequences are longer than the model's context of {context}")
        do.append("lower training.sequence_length or raise model.context")
    if settings.warmup_steps >= settings.steps:
        said.append(f"all of its {settings.steps} steps are warm-up")
        do.append("lower training.warmup_steps")
    return Check(
        name="batches", status="warn" if do else "ok", said="; ".join(said), do="; ".join(do)
    )


def check_storage(url: str, driver: str | None, nodes: Sequence[Probe], unseen: set[str]) -> Check:
    """Whether a folder is one and the same on every node.

    Args:
        driver: what is wrong with it as the driver sees it.
        unseen: nodes that wrote there without the driver seeing it.
    """
    name = f"storage {url}"
    share = "give a path on a shared file system, or an fsspec URL such as s3://bucket/prefix"
    if driver is not None:
        return Check(name=name, status="fail", said=f"the driver: {driver}", do=share)
    faults = [f"{n.host}: {n.storage[url]}" for n in nodes if url in n.storage]
    faults += [
        f"{n.host}: what it writes is not seen by the driver" for n in nodes if n.node in unseen
    ]
    if faults:
        return Check(name=name, status="fail", said="; ".join(faults), do=share)
    return Check(name=name, status="ok", said=f"shared by the driver and {_nodes(len(nodes))}")


def check_space(
    estimate: Estimate, settings: TrainingConfig, free: int | None, held: int, url: str
) -> Check:
    """Room for all checkpoints that are kept, one more while it is written, and the export.

    Args:
        free: bytes free there; None in an object store.
        held: bytes that this run's earlier checkpoints take already.
    """
    copies = settings.checkpoint.keep + settings.checkpoint.keep_best + 1
    needed = copies * estimate.checkpoint + estimate.export
    said = f"{copies} checkpoints of {size(estimate.checkpoint)} and the model: {size(needed)}"
    if free is None:
        return Check(name="space", status="ok", said=f"{said} in {url}, which has no limit we know")
    said += f"; {size(free)} free in {url}"
    if held:
        said += f", {size(held)} taken by this run before"
    if needed > free + held:
        do = "free some, lower training.checkpoint.keep, or set training.checkpoint.storage"
        return Check(name="space", status="fail", said=said, do=do)
    return Check(name="space", status="ok", said=said)


def check_shards(prepared: bool, driver: str | None, nodes: Sequence[Probe]) -> Check:
    """Whether every node can read the corpus as it was prepared.

    Args:
        driver: what is wrong with it as the driver sees it.
    """
    if not prepared:
        return Check(name="shards", status="ok", said="not made yet: looked at again before step 1")
    if driver is not None:
        return Check(name="shards", status="fail", said=f"the driver: {driver}")
    faults = [f"{n.host}: {n.shards}" for n in nodes if n.shards]
    if faults:
        do = "keep run.dir where every node sees it"
        return Check(name="shards", status="fail", said="; ".join(faults), do=do)
    return Check(name="shards", status="ok", said=f"readable from {_nodes(len(nodes))}")


def check_versions(driver: Mapping[str, str], nodes: Sequence[Probe]) -> Check:
    """Whether all run the same software. What the driver has no GPU for is compared among nodes.

    A build's suffix (torch 2.13.0+cpu) may differ on the driver, which computes nothing.
    """
    differ = []
    names = sorted({name for n in nodes for name in n.versions} | set(driver))
    for name in names:
        by_version: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            by_version[node.versions.get(name, "missing")].append(node.host)
        if name not in ("torch's CUDA", "NVIDIA driver"):
            mine = driver.get(name, "missing")
            same = [v for v in by_version if v.partition("+")[0] == mine.partition("+")[0]]
            by_version[same[0] if same else mine].append("driver")
        if len(by_version) > 1:
            told = ", ".join(f"{v} ({', '.join(sorted(set(w)))})" for v, w in by_version.items())
            differ.append(f"{name}: {told}")
    if differ:
        return Check(
            name="versions",
            status="fail",
            said="; ".join(differ),
            do="install the same wheel and constraints on every node",
        )
    shown = ", ".join(f"{name} {driver[name]}" for name in ("python", "torch", "ray", "hybrid"))
    return Check(name="versions", status="ok", said=f"the same on {_nodes(len(nodes))}: {shown}")


def check_driver(market: str | None) -> Check:
    """The driver's node must outlive the run.

    Args:
        market: its label ray.io/market-type.
    """
    if market == "spot":
        return Check(
            name="driver",
            status="fail",
            said="the driver runs on a spot node: the run ends with it",
            do="submit the job so that its entrypoint is placed on the head or on-demand",
        )
    said = "on an on-demand node" if market else "its node is not labelled as spot"
    return Check(name="driver", status="ok", said=said)


def check_nodes(asked: int, nodes: Sequence[Probe], failed: Mapping[str, str]) -> Check:
    """Whether all nodes of the pool answered.

    Args:
        failed: nodes and why there is no answer of them.
    """
    if failed:
        told = "; ".join(f"{node[:12]}: {why}" for node, why in failed.items())
        said = f"{len(failed)} of {_nodes(asked)} of the gpu pool gave no answer: {told}"
        return Check(name="nodes", status="fail", said=said, do="look at them, or drain them")
    if not asked:
        return Check(name="nodes", status="warn", said="the gpu pool has none now")
    hosts = ", ".join(sorted({n.host for n in nodes}))
    return Check(name="nodes", status="ok", said=f"{_nodes(asked)} answered ({hosts})")


def size(count: float) -> str:
    """Bytes with a unit."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
