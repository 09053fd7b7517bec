"""Every kind of finding that the code can make is in docs/audit.md, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = {"flags", "_ONCE"}
"""Names of tables whose second column is a kind; the loop over them makes the findings."""


def strings(node: ast.expr) -> set[str]:
    return {
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def kinds() -> set[str]:
    """First arguments of `finding(…)`; of an f-string its fixed part; columns of the tables."""
    found: set[str] = set()
    for path in sorted((ROOT / "src/hybrid/audit").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("finding"):
                found |= {s for s in strings(node.args[0]) if s != "memory"} if node.args else set()
            target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
            if getattr(target, "id", "") in TABLES and isinstance(node, ast.Assign | ast.AnnAssign):
                assert isinstance(node.value, ast.Tuple)
                found |= {next(iter(strings(row.elts[1]))) for row in node.value.elts}  # type: ignore[attr-defined]
    return found


def test_the_docs_list_every_kind_of_finding() -> None:
    page = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    section = page.split("## All findings")[1].split("\n## ")[0]
    listed = set(re.findall(r"`([a-z0-9-]+)`", section))
    made = {k for k in kinds() if re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", k)}
    assert len(made) > 60
    assert made <= listed, made - listed
    source = "".join(p.read_text() for p in (ROOT / "src/hybrid/audit").glob("*.py"))
    for kind in listed - made:  # put together where they are made, or in a table of their own
        head, _, tail = kind.partition("-")
        assert f'"{kind}"' in source or f'"{head}-{{' in source or f'-{tail}"' in source, kind
