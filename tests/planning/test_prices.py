"""The table of prices: the package's own, stale ones, and bad ones by line and column."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from hybrid.planning.gpus import find_gpu
from hybrid.planning.prices import GPU_STALE_DAYS, load_prices

HEAD = "item,market,usd_per_hour,provider,date,source\n"
DAY = datetime.date(2026, 12, 2)


def test_the_table_of_the_package() -> None:
    prices = load_prices(today=DAY)
    for row in prices.rows:
        assert row.source.startswith("https://")
        assert row.date <= DAY
        if row.item not in ("vCPU", "GB"):
            assert find_gpu(row.item).product == row.item, "the name is the GPU table's"
    usual = prices.of("H100 80GB HBM3", "on-demand")
    assert usual is not None
    assert usual.low < usual.mid < usual.high
    assert not prices.warnings


def test_stale_prices_are_used_and_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text(HEAD + "L4,on-demand,0.7,Somebody,2026-01-02,https://x\n")
    prices = load_prices(file, today=DAY)
    assert prices.gpu("L4", "on-demand").mid == 0.7
    assert len(prices.warnings) == 1
    for word in ("stale", "L4", "Somebody", "2026-01-02", "https://x", "--prices"):
        assert word in prices.warnings[0]
    fresh = load_prices(file, today=datetime.date(2026, 1, 2) + datetime.timedelta(GPU_STALE_DAYS))
    fresh.gpu("L4", "on-demand")
    assert not fresh.warnings


def test_no_spot_price_is_said(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text(HEAD + "L4,on-demand,0.7,Somebody,2026-11-02,https://x\n")
    prices = load_prices(file, today=DAY)
    assert prices.gpu("L4", "spot").mid == 0.7
    assert "no spot price of L4" in prices.warnings[0]
    assert prices.node(1, 4, "spot") is None
    with pytest.raises(ConfigError, match=r"cluster\.usd_per_hour"):
        prices.gpu("H200", "on-demand")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "columns"),
        ("item,market\nL4,spot\n", "usd_per_hour"),
        (HEAD, "no price"),
        (HEAD + "L4,spot,0.7,X,2026-01-02,\n", ":2: source: missing"),
        (HEAD + "L4,spot,0.7,X\n", ":2: date: missing"),
        (HEAD + "L4,spot,free,X,2026-01-02,https://x\n", ":2: usd_per_hour: 'free'"),
        (HEAD + "L4,spot,-1,X,2026-01-02,https://x\n", ":2: usd_per_hour"),
        (HEAD + "L4,spot,inf,X,2026-01-02,https://x\n", ":2: usd_per_hour"),
        (HEAD + "L4,spot,0.7,X,yesterday,https://x\n", ":2: date: 'yesterday'"),
        (HEAD + "L4,spot,0.7,X,2027-01-02,https://x\n", ":2: date: 2027-01-02"),
        (HEAD + "L4,auction,0.7,X,2026-01-02,https://x\n", ":2: market: 'auction'"),
    ],
)
def test_bad_tables_are_refused_by_line_and_column(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "p.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_prices(file, today=DAY)
    assert named in caught.value.message
    assert "p.csv" in caught.value.message


def test_a_missing_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv"):
        load_prices(tmp_path / "none.csv")
