"""The shipped cluster.yaml is fine, and each kind of mistake is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid.cluster.spec import check
from hybrid.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "cluster.yaml"


def test_the_shipped_file_has_no_problems() -> None:
    assert check(SHIPPED) == []


def node(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["available_node_types"][name].update(changes)

    return change


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        at = raw
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (node("gpu", min_workers=9), "available_node_types.gpu.min_workers"),
        (node("gpu", labels={"pool": "gpu", "-x": "y"}), "available_node_types.gpu.labels.-x"),
        (node("gpu", labels={"pool": "gpu", "x": "a b"}), "available_node_types.gpu.labels.x"),
        (node("gpu", labels={}), "available_node_types"),
        (node("gpu", resources={"CPU": 1}), "available_node_types.gpu.resources"),
        (node("gpu", resources={"pool_gpu": 0.5}), "available_node_types.gpu.resources.pool_gpu"),
        (node("gpu", setup_commands=[]), "(file)"),
        (
            node("agents_spot", labels={"pool": "agents", "ray.io/market-type": "on-demand"}),
            "available_node_types.agents_spot.labels",
        ),
        (
            drop("available_node_types", "head", "node_config", "ImageId"),
            "available_node_types.head.node_config.ImageId",
        ),
        (drop("setup_commands"), "setup_commands"),
        (drop("head_start_ray_commands"), "head_start_ray_commands"),
        (drop("provider", "cache_stopped_nodes"), "provider.cache_stopped_nodes"),
        (lambda raw: raw.update(bogus=1), "(file)"),
        (lambda raw: raw.update(available_node_types=3), "(file)"),
    ],
)
def test_mistakes_are_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], where: str
) -> None:
    raw = copy.deepcopy(yaml.safe_load(SHIPPED.read_text()))
    change(raw)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert where in [p.where for p in check(path)]


@pytest.mark.parametrize("text", ["", "- a", "{", "\xff"])
def test_what_is_no_cluster_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        check(path)
    with pytest.raises(ConfigError):
        check(tmp_path / "missing.yaml")
