"""A check: can the strategy run on these nodes, with this model, on every number of workers?

The same rules are held again when the model is spread: only then it is known which rank is where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training.candidates import Place, Space
from hybrid.training.preflight import Check
from hybrid.training.probe import Probe
from hybrid.training.rules import CPU_COMPILERS, GPU_COMPILERS, check_strategy


def arranged(count: int, slots: Sequence[int]) -> list[str]:
    """The node of each rank, where the largest nodes are filled first; those without a slot last.

    Args:
        slots: that each node of the pool has.
    """
    full = [f"node {n}" for n, s in enumerate(sorted(slots, reverse=True)) for _ in range(s)]
    return [*full[:count], *["a further node"] * (count - len(full))]


def fewest_on_a_node(count: int, slots: Sequence[int]) -> int:
    """Ranks on the node that has fewest of them, arranged so."""
    nodes = arranged(count, slots)
    return min(nodes.count(node) for node in nodes)


def check_layout(
    settings: TrainingConfig, model: Any, slots: Sequence[int], probes: Sequence[Probe], gpu: bool
) -> Check:
    """All that refuses a strategy, without a worker.

    Args:
        model: the transformers configuration of the base.
        slots: that each node of the gpu pool has, taken or not.
    """
    try:
        if settings.parallel.compile:
            _check_compilers(probes, gpu)
        if settings.strategy == "deepspeed":
            _check_deepspeed("strategy", probes)
        if settings.strategy == "auto":
            return _check_trials(settings, space_of(settings, model, slots, probes, gpu), probes)
        for count in sorted({settings.fewest_workers, settings.most_workers}):
            if settings.strategy == "hsdp" and settings.parallel.shard is None:
                _check_copies(count, slots)
            else:
                check_strategy(settings, model, arranged(count, slots))
    except ConfigError as e:
        return Check(name="layout", status="fail", said=e.message)
    said = f"{settings.strategy} on {settings.fewest_workers}"
    if settings.most_workers > settings.fewest_workers:
        said += f" to {settings.most_workers}"
        said += f" workers, by {step}" if (step := settings.worker_unit) > 1 else " workers"
    else:
        said += " workers"
    nodes = arranged(settings.most_workers, slots)
    if settings.strategy == "hsdp" and settings.parallel.shard is None and slots:
        counts = sorted({nodes.count(node) for node in nodes})
        if len(set(nodes)) == 1 or len(counts) > 1:
            return Check(
                name="layout",
                status="warn",
                said=f"{said}: where nodes are filled one by one, they get {counts} of them",
                do="set training.parallel.shard: copies then need not be nodes",
            )
    return Check(name="layout", status="ok", said=said)


def _check_copies(count: int, slots: Sequence[int]) -> None:
    """A copy of the model on each node: several of them, with as many ranks each."""
    do = "set training.parallel.shard, or use fsdp"
    if len(slots) == 1:
        raise ConfigError(
            "training.strategy: 'hsdp' keeps a copy on each node, and the gpu pool has one node:"
            f" {do}"
        )
    if slots and not any(
        count % nodes == 0 and sum(s >= count // nodes for s in slots) >= nodes
        for nodes in range(2, len(slots) + 1)
    ):
        raise ConfigError(
            f"training.strategy: 'hsdp' keeps a copy on each node, and {count} workers cannot be"
            f" spread equally over nodes with {', '.join(map(str, slots))} slots: {do}"
        )


def _check_trials(settings: TrainingConfig, space: Space, probes: Sequence[Probe]) -> Check:
    if "deepspeed" in settings.trials.vary:
        _check_deepspeed("trials.vary", probes)
    space.frugal()
    names = ", ".join(map(str, space.ways))
    said = f"auto: {names} are tried before the first step, and what is near the fastest"
    return Check(name="layout", status="ok", said=said)


def space_of(
    settings: TrainingConfig, model: Any, slots: Sequence[int], probes: Sequence[Probe], gpu: bool
) -> Space:
    """What `auto` can try on as few workers as may be."""
    place = Place(
        nodes=tuple(arranged(settings.fewest_workers, slots)),
        gpu=gpu,
        memory=0,
        deepspeed=bool(probes) and all(map(_has_deepspeed, probes)),
    )
    return Space(settings, model, place)


def _check_compilers(probes: Sequence[Probe], gpu: bool) -> None:
    wanted = GPU_COMPILERS if gpu else CPU_COMPILERS
    without = [p.host for p in probes if not set(wanted) & set(p.compilers)]
    if without:
        raise ConfigError(
            f"training.parallel.compile: {', '.join(without)} has none of {', '.join(wanted)}:"
            " install one, or switch it off"
        )


def _check_deepspeed(key: str, probes: Sequence[Probe]) -> None:
    without = [p.host for p in probes if not _has_deepspeed(p)]
    if without:
        raise ConfigError(
            f"training.{key}: 'deepspeed' needs the package of that name, which"
            f" {', '.join(without)} lacks: pip install 'hybrid[deepspeed]' on every node, or do"
            " without it"
        )


def _has_deepspeed(probe: Probe) -> bool:
    return probe.versions.get("deepspeed", "missing") != "missing"
