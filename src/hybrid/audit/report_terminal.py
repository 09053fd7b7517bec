"""The report of an audit in a terminal: a table of verdicts, and each node's figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Column, Table

from hybrid.audit.facts import as_number
from hybrid.audit.reading import Finding
from hybrid.audit.report import NodeReport, worst_first

_SHOWN = (
    ("matrix products", "measured.matmul_tflops.bf16", "TFLOP/s in bf16"),
    ("matrix products", "cpu.torch.matmul_tflops.fp32", "TFLOP/s in fp32"),
    ("memory", "measured.memory_gib_s", "GiB/s"),
    ("memory", "cpu.memory_gib_s", "GiB/s"),
    ("copies to the device", "measured.h2d_gib_s", "GiB/s"),
    ("disk", "disk.read_mib_s", "MiB/s"),
    ("all-reduce", "collective.busbw_gib_s", "GiB/s over the links"),
)
"""What a line of figures names, of the readings that there are."""


def figures(node: NodeReport) -> str:
    """Measured figures of a node in a sentence, medians over its GPUs; "" where none are."""
    said: dict[str, str] = {}
    for what, name, unit in _SHOWN:
        values = [
            v
            for r in node.result.readings
            if r.name == name and not r.fakeable and (v := as_number(r)) is not None
        ]
        if values and what not in said:
            said[what] = f"{what} {statistics.median(values):.3g} {unit}"
    return f"{node.result.name}: {', '.join(said.values())}" if said else ""


def host(node: NodeReport) -> str:
    """ "2 cores, 3.8 GiB" of a node as measured; "" where they were not."""
    by_name = {r.name: as_number(r) for r in node.result.readings if r.gpu is None}
    cores, memory = (by_name.get(f"cpu.{n}_measured") for n in ("cores", "memory_bytes"))
    parts = [f"{cores:.3g} cores"] if cores is not None else []
    if memory is not None:
        parts.append(f"{memory / 2**30:.3g} GiB")
    return ", ".join(parts)


_COLOUR = {
    "genuine": "green", "fit": "green", "unknown": "yellow", "degraded": "yellow",
    "contradicted": "red", "unfit": "red",
}  # fmt: skip


def table(nodes: Sequence[NodeReport]) -> Table:
    """A row for each node and GPU, worst findings first."""
    made = Table(
        Column("node", overflow="fold"), "GPU", Column("product", overflow="fold"), "identity",
        "health", Column("findings", overflow="fold", ratio=1),
    )  # fmt: skip
    for node in nodes:
        rows: list[tuple[str, str, str, str, list[Finding]]] = []
        general = [f for f in node.verdict.findings if f.gpu is None]
        if general or not node.verdict.gpus:
            rows.append(("", host(node), node.verdict.identity, node.verdict.health, general))
        for g in node.verdict.gpus:
            own = [f for f in node.verdict.findings if f.gpu == g.gpu]
            name = g.product or g.name or "?"
            rows.append((str(g.gpu), name, g.identity, g.health, own))
        for i, (gpu, name, identity, health, findings) in enumerate(rows):
            text = "\n".join(f"{f.kind}: {f.text}" for f in worst_first(findings))
            made.add_row(
                escape(node.result.name) if i == 0 else "", gpu, escape(name),
                f"[{_COLOUR[identity]}]{identity}[/]", f"[{_COLOUR[health]}]{health}[/]",
                escape(text) or "-",
            )  # fmt: skip
    return made
