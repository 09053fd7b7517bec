"""The preflight of a run: every node of the gpu pool is asked at once; Ray must be initialised."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybrid.config import ProjectConfig, TrainingConfig
from hybrid.errors import HybridError, PlacementError
from hybrid.pools import GPU
from hybrid.training.data import PreparedData, load_tokenizer, prepared
from hybrid.training.memory import Estimate, estimate
from hybrid.training.model import architecture
from hybrid.training.preflight import (
    Check,
    check_batches,
    check_driver,
    check_memory,
    check_model,
    check_nodes,
    check_shards,
    check_space,
    check_storage,
    check_versions,
    failure,
)
from hybrid.training.preflight_strategy import check_layout, fewest_on_a_node, space_of
from hybrid.training.probe import Asked, Probe, clear, probe, try_shards, versions, wait_for
from hybrid.training.shards import ShardSet
from hybrid.training.slots import NOBODY, Avoid, has_gpus, pool_nodes, wait_for_workers
from hybrid.training.storage import Storage

ANSWER_S = 30.0
"""Seconds a node has to answer."""
MARKET = "ray.io/market-type"


def guard(
    config: ProjectConfig,
    say: Callable[[dict[str, Any]], None],
    *,
    wait_s: float,
    checkpoints: str | None = None,
    avoid: Avoid = NOBODY,
) -> None:
    """Make the checks as `training.preflight` says, and say what is not well.

    Args:
        wait_s: seconds to wait for free slots.
        checkpoints: path or URL of this run's own checkpoints.
        avoid: nodes that the run will not use.

    Raises:
        ConfigError, PlacementError: checks failed and are required; the message has all of them.
    """
    mode = config.training.preflight
    if mode == "off":
        return
    checks = preflight(config, wait_s=wait_s, checkpoints=checkpoints, avoid=avoid)
    error = failure(checks)
    if error is not None and mode == "require":
        raise error
    bad = [c for c in checks if c.status != "ok"]
    for c in bad:
        do = f"; {c.do}" if c.do else ""
        say({"message": f"preflight: {c.name}: {c.said}{do}"})
    if not bad:
        say({"message": f"preflight: {len(checks)} checks, all well"})


def preflight(
    config: ProjectConfig,
    *,
    wait_s: float = 0.0,
    checkpoints: str | None = None,
    avoid: Avoid = NOBODY,
) -> list[Check]:
    """Make every check, whatever the others find. The arguments are those of `guard`."""
    settings = config.training
    slots = _check_slots(config, wait_s, avoid)
    data = prepared(config)
    home, kept = str(config.run.dir), settings.checkpoint.storage
    storages = (home, kept) if kept else (home,)
    asked = Asked(
        storages=storages,
        token=secrets.token_hex(8),
        shards=tuple(str(f) for f in (data.train, data.holdout) if f) if data else (),
    )
    pool = pool_nodes(avoid)
    mine = {url: _write_token(url, asked) for url in storages}
    try:
        nodes, failed = _ask([n["NodeID"] for n in pool], asked)
        unseen = {url: _unseen(url, asked, nodes) for url in storages if mine[url] is None}
    finally:
        clear(storages, asked, ["driver", *(n["NodeID"] for n in pool)])
    has = [int(n["Resources"].get(GPU.resource, 1)) for n in pool]
    unread = try_shards(asked.shards)
    tokens = ShardSet(data.train).tokens if data and unread is None else None
    return [
        check_nodes(len(pool), nodes, failed),
        slots,
        check_driver(_driver_labels().get(MARKET)),
        check_versions(versions(), nodes),
        *(check_storage(url, mine[url], nodes, unseen.get(url, set())) for url in storages),
        check_shards(data is not None, unread, nodes),
        check_batches(settings, tokens, None if config.model.source else config.model.context),
        *_of_model(config, data, has, nodes, checkpoints),
    ]


def _check_slots(config: ProjectConfig, wait_s: float, avoid: Avoid) -> Check:
    settings = config.training
    try:
        fit = wait_for_workers(settings, wait_s, avoid)
    except PlacementError as e:
        return Check(name="slots", status="fail", said=e.message)
    return Check(name="slots", status="ok", said=f"{fit} workers fit now")


def _of_model(
    config: ProjectConfig,
    data: PreparedData | None,
    slots: Sequence[int],
    nodes: Sequence[Probe],
    checkpoints: str | None,
) -> list[Check]:
    """What depends on the base. Where it cannot be spread as asked, its memory is not known."""
    settings = config.training
    vocabulary = len(load_tokenizer(data.tokenizer)) if data else config.data.tokenizer.vocab_size
    shape = partial(architecture, config.model, vocabulary)
    try:
        layout = check_layout(settings, shape(), slots, nodes, has_gpus())
        if layout.status == "fail":
            return [layout]
        needs = _estimate(settings, shape, slots, nodes)
    except HybridError as e:
        return [check_model(e)]
    url = settings.checkpoint.storage or str(config.run.dir)
    ranks = min(max(slots, default=1), settings.most_workers)
    space = check_space(needs, settings, _free(url), _held(checkpoints), url)
    return [layout, space, check_memory(needs, nodes, ranks)]


def _estimate(
    settings: TrainingConfig,
    shape: Callable[[], Any],
    slots: Sequence[int],
    nodes: Sequence[Probe],
) -> Estimate:
    """For as few workers as may be: a rank then holds most.

    Of `auto` the combination that needs least: the others are left out by its trials.
    """
    count, gpu = settings.fewest_workers, has_gpus()
    if settings.strategy == "auto":
        space = space_of(settings, shape(), slots, nodes, gpu)
        settings = space.frugal().applied(settings)
    return estimate(
        shape, settings, workers=count, per_node=fewest_on_a_node(count, slots), gpu=gpu
    )


def _ask(
    nodes: Sequence[str], asked: Asked, answer_s: float = ANSWER_S
) -> tuple[list[Probe], dict[str, str]]:
    """Every node's answer, and of those without one why. All are asked at once."""
    remote = ray.remote(num_cpus=0, max_retries=0)(probe)
    asking = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            node, asked
        ): node
        for node in nodes
    }
    done, late = (
        ray.wait(list(asking), num_returns=len(asking), timeout=answer_s) if asking else ([], [])
    )
    answers, failed = [], {}
    for reference in done:
        try:
            answers.append(ray.get(reference))
        except RayError as e:
            failed[asking[reference]] = str(e).strip().splitlines()[-1]
    for reference in late:
        ray.cancel(reference, force=True)
        failed[asking[reference]] = f"none within {answer_s:g} s"
    return answers, failed


def _write_token(url: str, asked: Asked) -> str | None:
    try:
        Storage(url).put(asked.file("driver"), asked.token.encode())
    except OSError as e:
        return f"cannot be written: {e}"
    return None


def _unseen(url: str, asked: Asked, nodes: Sequence[Probe]) -> set[str]:
    at = Storage(url)
    return {
        n.node
        for n in nodes
        if url not in n.storage and not wait_for(at, asked.file(n.node), asked.token)
    }


def _driver_labels() -> dict[str, str]:
    own = ray.get_runtime_context().get_node_id()
    return next((dict(n["Labels"]) for n in ray.nodes() if n["NodeID"] == own), {})


def _free(url: str) -> int | None:
    """Bytes free for a folder that need not be there yet; None in an object store."""
    at = Storage(url).local
    if at is None:
        return None
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def _held(url: str | None) -> int:
    folder = Storage(url).local if url else None
    if folder is None or not folder.exists():
        return 0
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
