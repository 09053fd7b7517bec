"""Facts of GPU products, from the package's one table of them (audit/gpus.csv, read as data)."""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

ACHIEVABLE = 0.8
"""Share of a data sheet's dense peak that big matmuls reach where nobody measured: between 0.73
and 0.87 for the products of which both figures are known."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One product. `others` are products that the same words may also mean."""

    product: str
    memory_gb: float | None
    sheet_tflops: float | None
    measured_tflops: float | None
    others: tuple[str, ...] = ()

    @property
    def matmul_tflops(self) -> float | None:
        """Dense bfloat16 TFLOP/s of big matmuls: as published, else from the data sheet."""
        if self.measured_tflops is not None:
            return self.measured_tflops
        return None if self.sheet_tflops is None else ACHIEVABLE * self.sheet_tflops


@cache
def table() -> tuple[dict[str, str], ...]:
    """The rows of gpus.csv."""
    text = files("hybrid").joinpath("audit/gpus.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def find_gpu(text: str) -> Gpu:
    """The product that the words mean: each of them is a word of one of its names.

    "H100" fits several: the first of the table is taken, and `others` names the rest.

    Raises:
        ValueError: no product of the table fits; the message names near ones.
    """
    wanted = _words(text)
    found = [row for row in table() if wanted and any(wanted <= have for have in _names(row))]
    exact = [row for row in found if any(wanted == have for have in _names(row))]
    found = exact or found
    if not found:
        known = sorted(row["product"] for row in table())
        near = difflib.get_close_matches(text, known, 3, 0.3)
        hint = f"; near are {', '.join(near)}" if near else ""
        raise ValueError(f"gpu: {text!r} is not in the table of GPUs{hint}")
    row = found[0]
    memory, sheet = row["memory_total_mib"], row["tensor_bf16_fp16_dense_tflops"]
    measured = row["measured_best_matmul_bf16_tflops"]
    return Gpu(
        product=row["product"],
        memory_gb=float(memory) * 2**20 / 1e9 if memory else None,
        sheet_tflops=float(sheet) if sheet else None,
        measured_tflops=float(measured) if measured else None,
        others=tuple(r["product"] for r in found[1:]),
    )


def _words(text: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return frozenset(words) - {"nvidia", "tesla", "geforce", "gpu"}


def _names(row: dict[str, str]) -> list[frozenset[str]]:
    return [_words(n) for n in (row["product"], row["sold_as"], *row["names"].split(";")) if n]
