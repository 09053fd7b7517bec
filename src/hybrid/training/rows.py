"""A specialist's data: rows of input and acceptable outputs, its closed set, its augmentation."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.config import AdapterConfig
from hybrid.errors import ConfigError, DataError

Augment = Callable[[str, random.Random], str]
Candidates = Callable[[str], list[str]]


@dataclass(frozen=True)
class Row:
    """`outputs`: every acceptable answer; the first is trained on."""

    input: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class AdapterData:
    """All of one specialist's data, and a digest of it."""

    train: list[Row]
    holdout: list[Row]
    choices: tuple[str, ...]
    augment: Augment | None
    digest: str
    candidates: Candidates | None = None

    def choices_of(self, row: Row) -> tuple[str, ...]:
        """The answers a row's is chosen among."""
        return tuple(self.candidates(row.input)) if self.candidates else self.choices

    @property
    def majority(self) -> float:
        """Share of held-out rows that the commonest training answer gets right."""
        common = Counter(row.outputs[0] for row in self.train).most_common(1)[0][0]
        return sum(common in row.outputs for row in self.holdout) / len(self.holdout)


def read(name: str, spec: AdapterConfig) -> AdapterData:
    """Read and check everything the spec names.

    Raises:
        DataError: a file is missing, empty, not UTF-8, or a row is malformed (file and line named).
        ConfigError: `augment` names no function.
    """
    train, holdout = read_rows(Path(spec.train)), read_rows(Path(spec.holdout))
    choices: tuple[str, ...] = ()
    if spec.kind == "choice" and not spec.candidates:
        choices = read_choices(Path(spec.choices)) if spec.choices else distinct(train)
        foreign = next((o for r in train for o in r.outputs if o not in set(choices)), None)
        if foreign is not None:
            raise DataError(
                f"{spec.train}: output {foreign!r} is none of the {len(choices)} choices of {name}"
            )
    augment = load_function(spec.augment) if spec.augment else None
    candidates = load_function(spec.candidates) if spec.candidates else None
    hasher = hashlib.sha256()
    script = (spec.augment or "").rpartition(":")[0]
    for path in (
        spec.train,
        spec.holdout,
        spec.choices,
        script if script.endswith(".py") else None,
    ):
        hasher.update(Path(path).read_bytes() if path else b"-")
    return AdapterData(
        train=train,
        holdout=holdout[: spec.max_holdout],
        choices=choices,
        augment=augment,
        candidates=candidates,
        digest=hasher.hexdigest(),
    )


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSONL file. Raises DataError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold U+2028 and its like
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: not UTF-8 at byte {e.start}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            raw = json.loads(line)
        except ValueError as e:
            raise DataError(f"{where}: not JSON: {e}") from None
        if not isinstance(raw, dict) or not {"input", "output"} <= raw.keys():
            raise DataError(f'{where}: expected {{"input": …, "output": …}}')
        output = raw["output"]
        outputs = tuple(output) if isinstance(output, list) else (output,)
        if not isinstance(raw["input"], str) or not all(isinstance(o, str) for o in outputs):
            raise DataError(f"{where}: input and output must be text (output may be a list of it)")
        if not outputs or not all(outputs):
            raise DataError(f"{where}: output is empty")
        rows.append(Row(raw["input"], outputs))
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def read_choices(path: Path) -> tuple[str, ...]:
    """A closed set from a JSON list of distinct texts. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: no list of choices: {e}") from None
    if not isinstance(found, list) or not all(isinstance(c, str) and c for c in found):
        raise DataError(f"{path}: expected a JSON list of texts")
    if len(set(found)) != len(found) or not found:
        raise DataError(f"{path}: choices must be distinct, and at least one")
    return tuple(found)


def distinct(rows: Sequence[Row]) -> tuple[str, ...]:
    """Every output of the rows, sorted."""
    return tuple(sorted({o for row in rows for o in row.outputs}))


def load_function(ref: str) -> Any:
    """`FILE.py:name`, or the dotted path of an importable function.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = ref.rpartition(":") if ":" in ref else ref.rpartition(".")
    if not module.endswith(".py"):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as e:
            raise ConfigError(f"{ref!r} does not import: {e}") from None
    path = Path(module)
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    try:
        found = runpy.run_path(str(path)).get(name)
    finally:
        sys.path.remove(str(path.parent))
    if not callable(found):
        raise ConfigError(f"{path} defines no function {name!r}")
    return found
