"""The table of GPU products (gpus.csv): what each is known to be, by whom, and which fit a claim.

A blank cell is unknown: it excludes nothing and proves nothing. Names are what `nvidia-smi` prints;
`sold_as` is how sellers write them. docs/audit.md lists the sources by their keys.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.errors import DataError

TABLE = Path(__file__).with_name("gpus.csv")
ECC_SHARE = 0.92
"""Least share of the printed memory that is left when ECC lives in the memory itself: it takes a
sixteenth, and drivers differ by another per cent (T4: 15360 and 15109 MiB)."""
_PREFIXES = {"nvidia", "tesla", "geforce", "quadro", "corporation"}
_SELLERS = {"gpu", "gpus", "card", "pcie"}


@dataclass(frozen=True, kw_only=True)
class Sku:
    """One product. None is unknown.

    Attributes:
        product: our name of it; unique.
        names: the strings that nvidia-smi prints for it.
        sold_as: how sellers write it.
        pci_device_ids: "10de:20b2", lower case.
        memory_total_mib: as nvidia-smi prints it.
        mem_bw_gbs, nvlink_total_gbs: GB/s (1e9); NVLink is the sum of both directions.
        tensor_tflops: dense bf16 (fp16 where there is no bf16), TFLOP/s, by data sheet.
        measured_matmul_tflops: the best that somebody has measured in bf16.
        dcgm_min_membw_gbs: what NVIDIA's DCGM accepts as the least memory bandwidth.
        dcgm_min_link: (generation, width) that DCGM accepts as the least link.
        ecc: "yes", "no", "optional"; mig: whether it can be divided.
        source: keys of the sources.
    """

    product: str
    names: tuple[str, ...] = ()
    sold_as: str = ""
    pci_device_ids: tuple[str, ...] = ()
    architecture: str | None = None
    compute_capability: str | None = None
    sm_count: int | None = None
    memory_total_mib: int | None = None
    memory_type: str | None = None
    mem_bw_gbs: float | None = None
    tensor_tflops: float | None = None
    fp32_tflops: float | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    nvlink_gen: int | None = None
    nvlink_total_gbs: float | None = None
    tdp_w: float | None = None
    l2_mib: float | None = None
    ecc: str | None = None
    mig: bool | None = None
    measured_matmul_tflops: float | None = None
    dcgm_min_membw_gbs: float | None = None
    dcgm_min_link: tuple[int, int] | None = None
    source: str = ""

    @property
    def die(self) -> str | None:
        """The code name of the die alone, e.g. "GA100"."""
        found = re.search(r"\b(G[A-Z]\d{3}|AD\d{3}|TU\d{3})\b", self.architecture or "")
        return found[1] if found else None

    @property
    def family(self) -> str | None:
        """The architecture as nvidia-smi writes it, e.g. "Ampere"."""
        return self.architecture.split()[0] if self.architecture else None

    def fits_memory(self, mib: float) -> bool:
        """Whether a printed total can be this product's; true where it is unknown."""
        if self.memory_total_mib is None:
            return True
        low, high = memory_range(self)
        return low <= mib <= high


def memory_range(sku: Sku) -> tuple[float, float]:
    """(least, most) MiB that nvidia-smi may print as the total of a product, ECC on or off.

    Only for products whose total is known.
    """
    total = float(sku.memory_total_mib or 0)
    if sku.ecc == "no":
        return 0.97 * total, 1.01 * total
    return ECC_SHARE * total, total / ECC_SHARE


class Specs:
    """The products, and the look-ups."""

    def __init__(self, skus: Iterable[Sku]) -> None:
        self.skus = tuple(skus)

    def by_product(self, product: str) -> Sku | None:
        """The product of that name of ours."""
        return next((s for s in self.skus if s.product == product), None)

    def by_name(self, name: str) -> tuple[Sku, ...]:
        """Products that nvidia-smi prints so; a name that its table cut ("…") by its beginning."""
        wanted = words(name.removesuffix("...").removesuffix("…"))
        if name.endswith(("...", "…")):
            begun = "".join(wanted)
            return tuple(
                s for s in self.skus if any("".join(words(n)).startswith(begun) for n in s.names)
            )
        return tuple(s for s in self.skus if any(words(n) == wanted for n in s.names))

    def by_pci_id(self, pci_device_id: str) -> tuple[Sku, ...]:
        """Products with that "vendor:device"."""
        return tuple(s for s in self.skus if pci_device_id.lower() in s.pci_device_ids)

    def sold_as(self, text: str) -> tuple[Sku, ...]:
        """Products that a seller may mean: every word of the offer is one of the product's.

        "A100 80GB" is the SXM4 and the PCIe one; "RTX 4090" is not the 4090 D.
        """
        if exact := self.by_name(text):
            return exact
        wanted = set(words(text)) - (_SELLERS - {"pcie"})
        if not wanted:
            return ()
        found = []
        for sku in self.skus:
            for label in (sku.product, sku.sold_as, *sku.names):
                have = set(words(label))
                if have and all(_among(w, have) for w in wanted):
                    found.append((len(have - wanted), sku))
                    break
        variants = {"d", "ti", "super", "laptop", "3e"}
        plain = [s for _, s in found if not ((set(words(s.product)) & variants) - wanted)]
        return tuple(plain or [s for _, s in found])

    def find(
        self,
        name: str | None = None,
        pci_device_id: str | None = None,
        memory_mib: float | None = None,
        sm_count: int | None = None,
    ) -> tuple[Sku, ...]:
        """Products that contradict nothing that is given; what is None excludes nothing."""
        if name is None and pci_device_id is None and memory_mib is None and sm_count is None:
            return ()
        found = self.skus if name is None else self.by_name(name)
        return tuple(
            s
            for s in found
            if (pci_device_id is None or not s.pci_device_ids or s in self.by_pci_id(pci_device_id))
            and (memory_mib is None or s.fits_memory(memory_mib))
            and (sm_count is None or s.sm_count is None or s.sm_count == sm_count)
            # A row that knows nothing of what is asked for is no answer to it.
            and (name is not None or _says_something(s, pci_device_id, memory_mib, sm_count))
        )


def words(name: str) -> tuple[str, ...]:
    """A name's words without prefixes: "NVIDIA A100-SXM4-80GB" is ("a100", "sxm4", "80gb")."""
    text = re.sub(r"\((?:tm|r)\)|[™®]", " ", name.lower())
    text = re.sub(r"(\d)\s+(gi?b?)\b", r"\1gb", text)
    text = re.sub(r"(\d+)gi?b?\b", r"\1gb", text)
    text = re.sub(r"\b(rtx|gtx)(\d)", r"\1 \2", text)
    found = [w for w in re.split(r"[^a-z0-9.]+", text) if w]
    return tuple(w for w in found if w not in _PREFIXES) or tuple(found)


def _among(word: str, have: set[str]) -> bool:
    """A word is one of a product's; "sxm" is also "sxm4"."""
    return word in have or (word == "sxm" and any(h.startswith("sxm") for h in have))


def _says_something(
    sku: Sku, pci_device_id: str | None, memory_mib: float | None, sm_count: int | None
) -> bool:
    return (
        (pci_device_id is not None and bool(sku.pci_device_ids))
        or (memory_mib is not None and sku.memory_total_mib is not None)
        or (sm_count is not None and sku.sm_count is not None)
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def _row(row: dict[str, str]) -> Sku:
    link = re.fullmatch(r"(\d)x(\d+)", row["dcgm_min_pcie_gen_x_width"])
    bandwidth = _number(row["dcgm_min_membw_mbs"])
    whole: dict[str, Any] = {
        key: int(float(row[key])) if row[key] else None
        for key in ("sm_count", "memory_total_mib", "pcie_gen", "pcie_width", "nvlink_gen")
    }
    return Sku(
        product=row["product"],
        names=tuple(n for n in row["names"].split(";") if n),
        sold_as=row["sold_as"],
        pci_device_ids=tuple(i for i in row["pci_device_ids"].split(";") if i),
        architecture=row["architecture"] or None,
        compute_capability=row["compute_capability"] or None,
        memory_type=row["memory_type"] or None,
        mem_bw_gbs=_number(row["mem_bw_gbs"]),
        tensor_tflops=_number(row["tensor_bf16_fp16_dense_tflops"]),
        fp32_tflops=_number(row["fp32_tflops"]),
        nvlink_total_gbs=_number(row["nvlink_total_gbs"]),
        tdp_w=_number(row["tdp_w"]),
        l2_mib=_number(row["l2_mib"]),
        ecc=row["ecc"] or None,
        mig=None if not row["mig"] else row["mig"].startswith("yes"),
        measured_matmul_tflops=_number(row["measured_best_matmul_bf16_tflops"]),
        dcgm_min_membw_gbs=None if bandwidth is None else bandwidth / 1000,
        dcgm_min_link=(int(link[1]), int(link[2])) if link else None,
        source=row["source"],
        **whole,
    )


@cache
def load_specs(path: Path = TABLE) -> Specs:
    """Read the table.

    Raises:
        DataError: a row has a cell that is none; the message names the file and the product.
    """
    with path.open(encoding="utf-8", newline="") as file:
        skus = []
        for row in csv.DictReader(file):
            try:
                skus.append(_row(row))
            except (KeyError, ValueError) as e:
                raise DataError(f"{path}: product {row.get('product')!r}: {e}") from None
    return Specs(skus)
