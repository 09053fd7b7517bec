"""hsdp and tp under real Ray Train, from the configuration to the published base."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_loop import job, losses
from test_workers import occupy

from hybrid.pools import GPU
from hybrid.registry import Registry
from hybrid.training.loop import train
from hybrid.training.progress import read_progress

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def trained(folder: Path, **training: Any) -> list[str]:
    """Train under Ray; the nodes of the workers. Losses must be those of one process."""
    from hybrid.training.trainer import train_base

    alone = job(folder, "alone", strategy="single", precision="float64")
    train(alone)
    made = job(folder, "r", precision="float64", **training)
    registry = Registry(str(folder / "registry"), cache=folder / "cache")
    manifest = train_base(made.config, registry, run_id="r")
    assert manifest.metrics["world_size"] == 2
    assert losses(made) == pytest.approx(losses(alone), abs=1e-9)
    records = read_progress(made.folder)
    assert {r["step"] for r in records if r["event"] == "checkpoint"} == {4, 8}
    [start] = [r for r in records if r["event"] == "start"]
    assert start["strategy"] == training["strategy"]
    return [worker["node"] for worker in start["workers"]]


def test_tensor_parallelism(ray_cluster: Any, tmp_path: Path) -> None:
    assert len(trained(tmp_path, strategy="tp", parallel={"tensor": 2})) == 2


def test_a_copy_on_each_of_two_nodes(ray_cluster: Any, tmp_path: Path) -> None:
    import ray

    holder = occupy(3)  # one slot is left there, and one is on the other node
    node = ray_cluster.cluster.add_node(
        num_cpus=1, resources=GPU.resources(1), labels=GPU.labels(), object_store_memory=128 << 20
    )
    try:
        nodes = trained(tmp_path, strategy="hsdp")
    finally:
        ray.kill(holder)
        ray_cluster.cluster.remove_node(node)
    assert len(set(nodes)) == 2
