"""Checks of cluster.yaml: Ray's own schema, and what it does not catch.

python -m hybrid.cluster.spec cluster.yaml
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid import _ray_compat
from hybrid.config import read_mapping
from hybrid.pools import LABEL, POOLS

# Kubernetes' syntax of label keys and values, which Ray follows.
_PREFIX = r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?"
_WORD = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


@dataclass(frozen=True)
class Problem:
    """Something wrong at a key path."""

    where: str
    level: Literal["error", "warning"]
    text: str


def check(path: Path) -> list[Problem]:
    """All problems of a cluster file; empty when it is fine.

    Raises:
        ConfigError: it cannot be read, or is no YAML mapping.
    """
    raw = read_mapping(path)
    refused = _ray_compat.validate_cluster(raw)
    problems = [Problem("(file)", "error", f"Ray refuses it: {refused}")] if refused else []
    types = raw.get("available_node_types")
    if isinstance(types, dict):
        for name, node in types.items():
            if isinstance(node, dict):
                problems += _node(f"available_node_types.{name}", node, raw)
        problems += _pools(types)
    problems += _shared(raw)
    return problems


def _node(where: str, node: dict[str, Any], raw: dict[str, Any]) -> Iterator[Problem]:
    low, high = node.get("min_workers", 0), node.get("max_workers", raw.get("max_workers", 0))
    if isinstance(low, int) and isinstance(high, int) and low > high:
        yield Problem(f"{where}.min_workers", "error", f"{low} is more than max_workers ({high})")
    for key, value in (node.get("labels") or {}).items():
        if not re.fullmatch(_PREFIX + _WORD, str(key)):
            yield Problem(f"{where}.labels.{key}", "error", "no legal label key")
        if value and not re.fullmatch(_WORD, str(value)):
            yield Problem(f"{where}.labels.{key}", "error", f"{value!r} is no legal label value")
    for key, value in (node.get("resources") or {}).items():
        if not isinstance(value, int):
            yield Problem(f"{where}.resources.{key}", "error", f"{value!r} is no whole number")
    config = node.get("node_config") or {}
    if _provider(raw) == "aws" and not config.get("ImageId"):
        yield Problem(
            f"{where}.node_config.ImageId", "error", "missing: Ray's default is an old Ubuntu"
        )
    spot = "InstanceMarketOptions" in config
    labelled = (node.get("labels") or {}).get("ray.io/market-type")
    if spot != (labelled == "spot") and labelled is not None:
        yield Problem(
            f"{where}.labels", "error", f"ray.io/market-type says {labelled}, node_config differs"
        )


def _pools(types: dict[str, Any]) -> Iterator[Problem]:
    for pool in POOLS:
        members = {
            name: node
            for name, node in types.items()
            if isinstance(node, dict) and (node.get("labels") or {}).get(LABEL) == pool.name
        }
        if not members:
            yield Problem(
                "available_node_types", "error", f"no node type has the label {LABEL}: {pool.name}"
            )
        for name, node in members.items():
            if pool.resource not in (node.get("resources") or {}):
                yield Problem(
                    f"available_node_types.{name}.resources", "error", f"{pool.resource} is missing"
                )


def _shared(raw: dict[str, Any]) -> Iterator[Problem]:
    if "setup_commands" not in raw:
        yield Problem(
            "setup_commands", "error", "missing: Ray would install a nightly build of itself"
        )
    if (raw.get("provider") or {}).get("cache_stopped_nodes", True):
        yield Problem(
            "provider.cache_stopped_nodes", "error", "must be false: a spot node cannot be stopped"
        )
    commands = raw.get("head_start_ray_commands")
    start = " ".join(map(str, commands or ()))
    if "--dashboard-host=127.0.0.1" not in start and "--include-dashboard=false" not in start:
        yield Problem(
            "head_start_ray_commands",
            "error",
            "bind the dashboard with --dashboard-host=127.0.0.1: its job port runs code",
        )
    for name in ("RAY_AUTH_MODE=token", "RAY_SERVE_ENABLE_HA_PROXY=1"):
        if name not in start:
            yield Problem("head_start_ray_commands", "warning", f"{name} is not set")


def _provider(raw: dict[str, Any]) -> str | None:
    return (raw.get("provider") or {}).get("type")


def main() -> int:
    """Print the problems; 1 when there is an error."""
    problems = check(Path(sys.argv[1] if len(sys.argv) > 1 else "cluster.yaml"))
    for p in problems:
        sys.stdout.write(f"{p.level}: {p.where}: {p.text}\n")
    return int(any(p.level == "error" for p in problems))


if __name__ == "__main__":
    sys.exit(main())
