"""The measured figures of an audit, for whoever plans with them in place of data sheets.

`python -m hybrid.audit.figures FILE` prints them; docs/audit.md describes the format.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from hybrid.errors import DataError

FORMAT = 1


def measured_figures(path: Path) -> dict[str, Any]:
    """What the nodes of an audit were measured to do.

    Args:
        path: what `hybrid audit --json FILE` wrote.

    Returns:
        `{"format": 1, "nodes": {NAME: {"node_id", "pool", "gpus", "fit", "figures": {READING:
        median over the node's GPUs}}}, "pools": {POOL: {READING: median over its fit nodes}}}`.
        Readings keep their names and units; unknown ones are left out.

    Raises:
        DataError: the file is none of an audit.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise DataError(f"{path}: an audit of format {data['format']}; {FORMAT} is read here")
        nodes = {node["name"]: _node(node) for node in data["nodes"]}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path} is not an audit's JSON: {type(e).__name__}: {e}") from None
    pools: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes.values():
        if node["fit"]:
            for name, value in node["figures"].items():
                pools[node["pool"] or "none"][name].append(value)
    return {
        "format": FORMAT,
        "nodes": nodes,
        "pools": {
            pool: {name: statistics.median(values) for name, values in figures.items()}
            for pool, figures in pools.items()
        },
    }


def _node(node: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, list[float]] = defaultdict(list)
    for r in node["readings"]:
        measured = r["name"].split(".")[0] in ("measured", "cpu", "disk", "collective", "challenge")
        value = r["value"]
        if measured and isinstance(value, int | float) and not isinstance(value, bool):
            values[r["name"]].append(float(value))
    bad = {f["severity"] for f in node["findings"]} & {"contradicted", "unfit"}
    return {
        "node_id": node.get("node_id"),
        "pool": node.get("pool"),
        "gpus": sum(d.startswith("cuda:") for d in node["devices"]),
        "fit": not bad,
        "figures": {name: statistics.median(v) for name, v in sorted(values.items())},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measured_figures(Path(sys.argv[1])), indent=2) + "\n")
