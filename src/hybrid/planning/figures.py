"""What an audit measured, put in the place of assumptions: reads `hybrid audit --json FILE`.

The JSON is the contract (docs/audit.md), not the audit's code: planning imports none of it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.planning.workload import ClusterPart, Workload

FORMAT = 1
MATMUL = "measured.matmul_tflops.bf16"


@dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """What the fit nodes of an audit were measured to do.

    Attributes:
        path: the file.
        nodes: how many were audited, and how many of them are fit.
        matmul_tflops: median of their GPUs; None: no GPU was measured.
        unfit: names of nodes that were found unfit or not what they claim to be.
    """

    path: Path
    nodes: int
    fit: int
    matmul_tflops: float | None
    unfit: tuple[str, ...]


def read_audit(path: Path) -> AuditFigures:
    """Read an audit's JSON.

    Raises:
        DataError: it is missing, not an audit's, or of a later format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise DataError(f"{path}: an audit of format {data['format']}; {FORMAT} is read here")
        unfit = [node["name"] for node in data["nodes"] if _unfit(node)]
        speeds = [
            float(reading["value"])
            for node in data["nodes"]
            if node["name"] not in unfit
            for reading in node["readings"]
            if reading["name"] == MATMUL and reading["value"] is not None
        ]
        count = len(data["nodes"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path} is not an audit's JSON: {type(e).__name__}: {e}") from None
    return AuditFigures(
        path=path,
        nodes=count,
        fit=count - len(unfit),
        matmul_tflops=statistics.median(speeds) if speeds else None,
        unfit=tuple(unfit),
    )


def measured_workload(w: Workload, figures: AuditFigures) -> tuple[Workload, str]:
    """The workload with the audited speed of its GPUs, and a sentence on what was taken.

    A speed that workload.yaml gives itself stays.
    """
    if figures.matmul_tflops is None:
        return w, f"{figures.path}: no GPU's {MATMUL} in it; speeds stay as assumed"
    cluster = w.cluster or ClusterPart()
    if cluster.matmul_tflops is not None:
        return w, f"{figures.path}: not used, as cluster.matmul_tflops is given"
    said = f"{figures.path}: {figures.matmul_tflops:.0f} TFLOP/s a GPU on {figures.fit} fit nodes"
    if figures.unfit:
        said += f"; left out as unfit: {', '.join(figures.unfit)}"
    changed = cluster.model_copy(update={"matmul_tflops": figures.matmul_tflops})
    return w.model_copy(update={"cluster": changed}), said


def _unfit(node: dict[str, Any]) -> bool:
    return bool({f["severity"] for f in node["findings"]} & {"contradicted", "unfit"})
