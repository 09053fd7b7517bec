"""The command `hybrid audit`: what to audit, and what to make of it; no logic."""

from __future__ import annotations

import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid import project
from hybrid.cli_common import err, out

if TYPE_CHECKING:
    from hybrid.audit.report import NodeReport

EPILOG = """Example: hybrid audit --html audit.html. Or: hybrid audit --full --pool all
--usd-per-hour 12.5 --json audit.json; hybrid audit --from-smi nvidia-smi.xml. Exit status: 1 when
a node is not what it claims to be, or not fit to compute on; else 0."""


class PoolChoice(StrEnum):
    """Which nodes of a cluster."""

    gpu = "gpu"
    agents = "agents"
    all = "all"


def audit(
    config: Annotated[
        Path, typer.Option("-c", "--config", help="The project file; none is needed.")
    ] = Path("hybrid.yaml"),
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Minutes for certainty, or one minute.")
    ] = False,
    pool: Annotated[PoolChoice, typer.Option(help="Which nodes of a cluster.")] = PoolChoice.gpu,
    from_smi: Annotated[
        list[Path] | None,
        typer.Option(
            help="Judge saved outputs (nvidia-smi -q -x, -q, tables; a file or a folder of one"
            " node's) and measure nothing (repeatable: one node each)."
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write all readings here; - is stdout.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves here.")] = None,
    letter: Annotated[Path | None, typer.Option(help="Write a text for the seller here.")] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="What one node costs, for the loss in money.")
    ] = None,
    sold_as: Annotated[
        str | None, typer.Option(help='What every GPU is sold as, e.g. "A100 80GB".')
    ] = None,
    sold_cores: Annotated[
        float | None, typer.Option(min=0, help="The cores (vCPUs) that every node is sold with.")
    ] = None,
    sold_memory_gib: Annotated[
        float | None, typer.Option(min=0, help="The memory that every node is sold with.")
    ] = None,
    aws_certificate: Annotated[
        Path | None, typer.Option(help="PEM to check AWS's signed documents with.")
    ] = None,
    gcp_keys: Annotated[
        Path | None, typer.Option(help="JSON key set to check Google's tokens with.")
    ] = None,
    azure_certificates: Annotated[
        Path | None, typer.Option(help="PEM to check Azure's signed documents with.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier --json file, in place of the last audit kept.")
    ] = None,
) -> None:
    """Is this the hardware that is paid for, and is it well? Every node and every GPU at once."""
    from hybrid import audits
    from hybrid.audit import report
    from hybrid.audit.proof import Trust

    p = project.open(config) if config.exists() or config != Path("hybrid.yaml") else None
    options: dict[str, Any] = {
        "earlier": report.read_document(compare) if compare is not None else [],
        "sold_as": sold_as,
    }
    trust = Trust(aws=aws_certificate, gcp=gcp_keys, azure=azure_certificates)
    trust.check()
    when, level = time.time(), "full" if full else "quick"
    if from_smi:
        level, nodes = "saved outputs", audits.read_saved(from_smi, **options)
    else:
        memory = None if sold_memory_gib is None else int(sold_memory_gib * 2**30)
        options |= {"cores": sold_cores, "memory_bytes": memory, "trust": trust}
        nodes = _measured(p, level=level, pool=pool.value, **options)
    options = {"when": when, "usd_per_hour": usd_per_hour}
    if html is not None:
        from hybrid.audit.report_html import to_html

        html.write_text(to_html(nodes, level=level, **options), encoding="utf-8")
    money = {c.node: c for c in report.costs(nodes, usd_per_hour)}
    if letter is not None:
        text = "\n".join(report.letter(n, money.get(n.result.name), when=when) for n in nodes)
        letter.write_text(text, encoding="utf-8")
    if json_file is not None:
        data = report.to_document(nodes, level=level, **options)
        text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")
    if json_file != "-":
        from hybrid.audit.report_terminal import figures, table

        out.print(table(nodes))
        for line in filter(None, map(figures, nodes)):
            out.print(line, markup=False)
        for cost in money.values():
            lost = cost.usd_lost_per_hour
            out.print(
                f"{cost.node}: {100 * cost.share:.0f} % of {cost.against} in {cost.reading}"
                + (f", {lost:.2f} USD an hour for nothing" if lost else ""),
                markup=False,
            )
    if any(audits.failed(node) for node in nodes):
        raise typer.Exit(1)


def _measured(p: project.Project | None, **options: Any) -> list[NodeReport]:
    from hybrid import audits

    done = 0
    with err.status("starting") as status:

        def show(record: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            status.update(f"{done} steps done; {record['node']} {record['device']}: "
                          f"{record['probe']} {record['outcome']}")  # fmt: skip

        return audits.audit(p, on_progress=show, **options)
