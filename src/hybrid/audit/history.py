"""Audits that are kept: one JSON file a node and audit, so that the next one can be compared."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

from hybrid.audit.conduct import NodeResult
from hybrid.audit.figures import FORMAT
from hybrid.audit.wire import (
    finding_from_json,
    finding_to_json,
    reading_from_json,
    reading_to_json,
)
from hybrid.errors import DataError

log = logging.getLogger(__name__)


def to_json(result: NodeResult, *, level: str, when: float) -> dict[str, Any]:
    """One node's audit as plain data; see docs/audit.md."""
    return {
        "format": FORMAT,
        "level": level,
        "when": when,
        "name": result.name,
        "node_id": result.node_id,
        "pool": result.pool,
        "boot_id": result.boot_id,
        "fabric_gib_s": result.fabric_gib_s,
        "devices": result.devices,
        "lost": result.lost,
        "readings": [reading_to_json(r) for r in result.readings],
        "findings": [finding_to_json(f) for f in result.findings],
    }


def from_json(data: dict[str, Any]) -> NodeResult:
    """The node's audit of `to_json`'s data.

    Raises:
        DataError: it is none.
    """
    try:
        return NodeResult(
            name=data["name"],
            node_id=data["node_id"],
            pool=data["pool"],
            boot_id=data["boot_id"],
            fabric_gib_s=data["fabric_gib_s"],
            devices=list(data["devices"]),
            lost=data["lost"],
            readings=[reading_from_json(r) for r in data["readings"]],
            findings=[finding_from_json(f) for f in data["findings"]],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise DataError(f"not an audit of a node: {type(e).__name__}: {e}") from None


def _folder(root: Path, name: str) -> Path:
    return root / re.sub(r"[^A-Za-z0-9._-]", "_", name)


def save(root: Path, result: NodeResult, *, level: str, when: float | None = None) -> Path:
    """Keep a node's audit below `root`, by node and time. Returns the file."""
    when = time.time() if when is None else when
    folder = _folder(root, result.name)
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder
        / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(when))}-{int(when * 1000) % 1000:03d}.json"
    )
    new = path.with_suffix(".new")
    new.write_text(json.dumps(to_json(result, level=level, when=when), ensure_ascii=False))
    new.replace(path)
    return path


def previous(root: Path, name: str) -> NodeResult | None:
    """The latest kept audit of a node that can be read; None when there is none.

    A damaged file is said, and passed over: an audit that was paid for must not be lost for it.
    """
    for path in sorted(_folder(root, name).glob("*.json"), reverse=True):
        try:
            return from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, DataError) as e:
            log.warning("%s cannot be read and is not compared with: %s", path, e)
    return None


def document(results: list[NodeResult], *, level: str, when: float) -> dict[str, Any]:
    """A whole audit as plain data: what `hybrid audit --json` writes."""
    nodes = [to_json(r, level=level, when=when) for r in results]
    return {"format": FORMAT, "level": level, "when": when, "nodes": nodes}
