"""The table of GPUs: every cell in its kind, blanks unknown, names and offers found or not."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from hybrid.audit import specs as module
from hybrid.audit.specs import TABLE, load_specs, memory_range, words
from hybrid.errors import DataError

SPECS = load_specs()


def products(found: tuple[module.Sku, ...]) -> set[str]:
    return {s.product for s in found}


def test_products_names_and_ids_are_unique_and_every_row_has_sources_that_the_docs_list() -> None:
    assert len({s.product for s in SPECS.skus}) == len(SPECS.skus) > 50
    names = [n for s in SPECS.skus for n in s.names]
    ids = [i for s in SPECS.skus for i in s.pci_device_ids]
    assert len(set(names)) == len(names) and len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"10de:[0-9a-f]{4}", i) for i in ids)
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\b[A-Z][A-Z0-9]+\b", page.split("## Sources of the table")[1]))
    for s in SPECS.skus:
        keys = [k.split()[0] for k in re.sub(r"\(.*?\)", "", s.source).split(";") if k.strip()]
        known = [k for k in keys if k.isupper()]
        assert known and set(known) <= listed, (s.product, known)


def test_blank_is_unknown_and_excludes_nothing() -> None:
    a10g = SPECS.by_product("A10G")
    assert a10g is not None
    assert (a10g.sm_count, a10g.mem_bw_gbs, a10g.die) == (None, None, "GA102")
    assert a10g in SPECS.find(pci_device_id="10de:2237", sm_count=80)
    assert a10g in SPECS.find(memory_mib=23028, sm_count=999)
    assert SPECS.find() == ()
    assert products(SPECS.find(sm_count=70, memory_mib=8192)) >= {"CMP 170HX"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"name": "NVIDIA H100 80GB HBM3"}, {"H100 80GB HBM3"}),
        ({"name": "Tesla T4"}, {"Tesla T4"}),
        ({"name": "NVIDIA T4"}, {"Tesla T4"}),
        ({"name": "nvidia a100-sxm4-80gb"}, {"A100-SXM4-80GB"}),
        ({"name": "NVIDIA GH200 120GB"}, {"GH200 480GB"}),
        ({"name": "NVIDIA A100-SXM4-80GB", "memory_mib": 24576}, set()),
        ({"name": "NVIDIA RTX X9000"}, set()),
        ({"name": "NVIDIA GeForce RTX 40...", "sm_count": 76}, {"GeForce RTX 4080"}),
        ({"pci_device_id": "10DE:20C2"}, {"CMP 170HX"}),
        ({"memory_mib": 143771}, {"H200", "L20X"}),
    ],
)
def test_claims_find_their_products(given: dict[str, object], expected: set[str]) -> None:
    assert products(SPECS.find(**given)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offer", "expected"),
    [
        ("A100 80GB", {"A100-SXM4-80GB", "A100 80GB PCIe"}),
        ("A100 SXM 80 GB", {"A100-SXM4-80GB"}),
        ("a100-40gb", {"A100-SXM4-40GB", "A100-PCIE-40GB"}),
        ("H100", {"H100 80GB HBM3", "H100 PCIe", "H100 NVL"}),
        ("RTX4090", {"GeForce RTX 4090"}),
        ("RTX 4090 D", {"GeForce RTX 4090 D"}),
        ("NVIDIA H20", {"H20"}),
        ("Tesla V100 32GB", {"Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"}),
        ("a toaster", set()),
        ("", set()),
    ],
)
def test_offers_are_understood_as_sellers_write_them(offer: str, expected: set[str]) -> None:
    assert products(SPECS.sold_as(offer)) == expected


def test_memory_may_lack_what_ecc_takes() -> None:
    t4, rtx = SPECS.by_product("Tesla T4"), SPECS.by_product("GeForce RTX 3090")
    assert t4 is not None and rtx is not None
    assert t4.fits_memory(15109) and t4.fits_memory(16127) and not t4.fits_memory(24576)
    assert not rtx.fits_memory(22000), "without ECC nothing takes a sixteenth"
    assert memory_range(rtx)[1] < 1.02 * 24576


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", ("a100", "sxm4", "80gb")),
        ("GeForce RTX(TM) 3090", ("rtx", "3090")),
        ("RTX4090 24 GiB", ("rtx", "4090", "24gb")),
        ("NVIDIA", ("nvidia",)),
    ],
)
def test_words_of_a_name(name: str, expected: tuple[str, ...]) -> None:
    assert words(name) == expected


def test_a_damaged_table_names_file_and_product(tmp_path: Path) -> None:
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows[3]["tdp_w"] = "lots"
    path = tmp_path / "gpus.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(DataError, match=rf"gpus\.csv: product '{rows[3]['product']}'.*lots"):
        load_specs(path)
