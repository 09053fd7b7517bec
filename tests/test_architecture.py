"""The house's rules: who may import whom, which rooms know no Ray, what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid import sections, sections_training
from hybrid.sections_base import Section

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src/hybrid"
FILES = sorted(SRC.rglob("*.py"))
BESIDE = [
    path
    for folder in ("benchmarks", "examples", "jobs", "serve", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
COMMON = {
    "__init__", "_ray_compat", "config", "sections", "sections_base", "sections_training",
    "errors", "pages", "pages_style", "plots", "pools", "registry", "registry_models",
    "registry_records", "registry_store", "wire",
}  # fmt: skip
MAY_IMPORT = {
    "engine": set(),
    "training": {"engine"},  # specialists are judged by the engine that will serve them
    "serving": {"engine"},
    "agents": set(),
    "gateway": {"serving", "agents"},
    "audit": set(),
    "planning": set(),
    "cluster": {"agents"},  # the local cluster starts the embedded store
}
OUTER = {
    "project",
    "project_runs",
    "planning_verbs",
    "audits",
    "scaling_runs",
    "profiles",
    "profiles_nsight",
    "cli",
    "cli_audit",
    "cli_common",
    "cli_runs",
    "cli_plan",
    "cli_scale",
    "demo",
    "deploy",
    "client",
    "doctor",
    "show",
    "testing",
    "testing_chaos",
    "testing_models",
    "testing_traces",
}
NO_RAY = [
    *sorted((SRC / "engine").glob("*.py")),
    *(p for p in sorted((SRC / "audit").glob("*.py")) if p.name != "cluster.py"),
    *sorted((SRC / "planning").glob("*.py")),
    SRC / "training/step.py",
    SRC / "training/data.py",
    SRC / "agents/behaviour.py",
    SRC / "agents/durable.py",
    SRC / "agents/mailbox.py",
    SRC / "agents/senders.py",
]


def imported(path: Path) -> set[str]:
    """Every module a file imports anywhere in it, in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_follow_the_graph(path: Path) -> None:
    own = room(path)
    if own in OUTER:
        return
    allowed = COMMON | MAY_IMPORT.get(own, set()) | {own}
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "hybrid" and len(parts) > 1 and (SRC / parts[1]).exists():
            assert parts[1] in allowed, f"{path.name} imports {name}"
        elif parts[0] == "hybrid" and len(parts) > 1 and (SRC / f"{parts[1]}.py").exists():
            front_door = own == "__init__" and parts[1] == "project"
            assert parts[1] in allowed or front_door, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", NO_RAY, ids=lambda p: str(p.relative_to(SRC)))
def test_inner_rooms_know_no_ray(path: Path) -> None:
    assert not [n for n in imported(path) if n.split(".")[0] == "ray"]


def test_private_names_of_ray_are_in_one_place() -> None:
    for path in FILES:
        private = [n for n in imported(path) if n.startswith("ray.") and "._" in n]
        assert not private or path.name == "_ray_compat.py", f"{path}: {private}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hybrid", ("torch", "ray", "transformers", "httpx")),
        ("hybrid.config", ("torch", "ray")),
        ("hybrid.cli", ("torch", "ray")),
        ("hybrid.registry", ("torch", "ray")),
        ("hybrid.agents.host", ("torch", "transformers")),
        ("hybrid.audit.worker", ("torch", "ray", "numpy")),
        ("hybrid.audit.cluster", ("torch",)),
        ("hybrid.planning.advise", ("torch", "ray", "numpy")),
        ("hybrid.agents.swarm", ("torch",)),
        ("hybrid.agents.router", ("torch", "numpy")),
        ("hybrid.agents.clients", ("torch", "ray")),
        ("hybrid.gateway.app", ("torch",)),
        ("hybrid.serving.model", ("torch",)),
    ],
)
def test_importing_stays_light(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [*FILES, *BESIDE], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_concept_and_says_which(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""'), "the first line says what the file is"
    assert len(text.splitlines()) <= 400


def test_every_key_of_the_configuration_is_described() -> None:
    found = {**vars(sections), **vars(sections_training)}.values()
    models = [c for c in found if isinstance(c, type) and issubclass(c, Section)]
    assert len(models) > 10
    for model in models:
        for name, field in model.model_fields.items():
            section = isinstance(field.default, Section) or field.is_required()
            assert field.description or section, f"{model.__name__}.{name}"
