"""Every private Ray name we touch, in one place; tests/test_ray_compat.py checks each is there."""

from __future__ import annotations

from typing import Any


def validate_cluster(config: dict[str, Any]) -> str | None:
    """What Ray's own schema has against a cluster file; None when nothing. Needs no cloud."""
    from jsonschema.exceptions import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(config))
    except ValidationError as e:
        return str(e.message)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"
    return None


def draining_nodes() -> dict[str, float]:
    """Nodes that are being taken away: node id → UNIX time at which each is gone."""
    from ray._private.state import state

    return {node: at / 1000 for node, at in state.get_draining_nodes().items()}


def available_by_node() -> dict[str, dict[str, float]]:
    """What is free on each node, by node id; a second or so old."""
    from ray._private.state import state

    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found
