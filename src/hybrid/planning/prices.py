"""The dated price table: what a GPU, a vCPU and a GB of memory cost an hour, where and when.

The package brings prices.csv; `--prices FILE` replaces it. Its columns: item (a product of the
table of GPUs, `vCPU` or `GB`), market (on-demand | spot), usd_per_hour, provider, date
(YYYY-MM-DD), source. A figure older than STALE_DAYS is used, and is said to be stale.
"""

from __future__ import annotations

import csv
import datetime
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from hybrid.errors import ConfigError
from hybrid.planning.ranges import Range, shown

COLUMNS = ("item", "market", "usd_per_hour", "provider", "date", "source")
STALE_DAYS = {"vCPU": 365, "GB": 365}
GPU_STALE_DAYS = 180
"""Days after which a price is stale: those of GPUs move within months."""
ODD = 2.0
"""A given price this many times over or under the table's median looks like a slip."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """One figure of the table."""

    item: str
    market: str
    usd_per_hour: float
    provider: str
    date: datetime.date
    source: str


class Prices:
    """The table, and the ranges it gives.

    Args:
        rows: its figures.
        today: the day that ages are counted from.
    """

    def __init__(self, rows: Iterable[Price], today: datetime.date) -> None:
        self.rows = tuple(rows)
        self.today = today
        self.warnings: list[str] = []

    def of(self, item: str, market: str) -> Range | None:
        """USD an hour of one item: the cheapest, the median and the dearest; None: not listed.

        Stale figures that were used are added to `warnings`.
        """
        rows = [r for r in self.rows if r.item == item and r.market == market]
        if not rows:
            return None
        oldest = min(rows, key=lambda r: r.date)
        age = (self.today - oldest.date).days
        if age > STALE_DAYS.get(item, GPU_STALE_DAYS):
            self._warn(
                f"stale: the {market} price of {item} at {oldest.provider} is of {oldest.date},"
                f" {age} days old ({oldest.source}); replace the table with --prices"
            )
        usd = [r.usd_per_hour for r in rows]
        dates = sorted({str(r.date) for r in rows})
        named = ", ".join(f"{r.provider} {r.date}" for r in rows)
        source = f"price table: {named}" if len(rows) < 4 else (
            f"price table: {len(rows)} prices, {dates[0]} to {dates[-1]}"
        )  # fmt: skip
        return Range(min(usd), statistics.median(usd), max(usd), source)

    def gpu(self, product: str, market: str) -> Range:
        """USD an hour of one GPU; without a price on the spot market, that on demand, said so.

        Raises:
            ConfigError: the table has no price of it at all.
        """
        found = self.of(product, market)
        if found is None and market == "spot" and (found := self.of(product, "on-demand")):
            self._warn(f"no spot price of {product} is in the table; its on-demand price is used")
        if found is None:
            raise ConfigError(
                f"cluster.usd_per_hour: missing, and the price table has no price of {product};"
                " give it, or a table with --prices"
            )
        return found

    def node(self, vcpus: float, memory_gb: float, market: str) -> Range | None:
        """USD an hour of a CPU node of so many vCPU and GB; None: one of both is not listed."""
        cpu, memory = self.of("vCPU", market), self.of("GB", market)
        if cpu is None or memory is None:
            return None
        a, b = cpu.scaled(vcpus), memory.scaled(memory_gb)
        return Range(a.low + b.low, a.mid + b.mid, a.high + b.high, cpu.source)

    def odd(self, usd: float, what: str, usual: Range | None) -> str | None:
        """What to say of a given price that is far from the table's; None: it is near."""
        if usual is None or 1 / ODD <= usd / usual.mid <= ODD:
            return None
        times = usd / usual.mid
        far = f"{times:.2g} times" if times > 1 else f"{100 * times:.0f} % of"
        return (
            f"looks off: ${shown(usd)} is {far} the table's median of ${shown(usual.mid)} a {what}"
            f" (${shown(usual.low)} – ${shown(usual.high)}; {usual.source})"
        )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def load_prices(path: Path | None = None, today: datetime.date | None = None) -> Prices:
    """The package's table, or the user's in its place.

    Raises:
        ConfigError: the file is missing, or a row is wrong: the message names line and column.
    """
    day = today or datetime.datetime.now(datetime.UTC).date()
    if path is None:
        name = "prices.csv"
        text = files("hybrid").joinpath("planning/prices.csv").read_text(encoding="utf-8")
    else:
        name = str(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: {e}") from None
    reader = csv.DictReader(text.splitlines())
    if missing := set(COLUMNS) - set(reader.fieldnames or ()):
        raise ConfigError(f"{name}: columns {', '.join(sorted(missing))} are missing")
    rows = [_row(row, f"{name}:{reader.line_num}", day) for row in reader]
    if not rows:
        raise ConfigError(f"{name}: no price in it")
    return Prices(rows, day)


def _row(row: dict[str, str | None], where: str, today: datetime.date) -> Price:
    values = {c: (row[c] or "").strip() for c in COLUMNS}
    for column, value in values.items():
        if not value:
            raise ConfigError(f"{where}: {column}: missing; every price has a source and a date")
    if values["market"] not in ("on-demand", "spot"):
        raise ConfigError(f"{where}: market: {values['market']!r}: allowed are on-demand and spot")
    try:
        usd = float(values["usd_per_hour"])
    except ValueError:
        usd = math.nan
    if not (math.isfinite(usd) and usd > 0):
        raise ConfigError(
            f"{where}: usd_per_hour: {values['usd_per_hour']!r}: expected US dollars above 0"
        )
    try:
        date = datetime.date.fromisoformat(values["date"])
    except ValueError:
        raise ConfigError(f"{where}: date: {values['date']!r}: expected YYYY-MM-DD") from None
    if date > today:
        raise ConfigError(f"{where}: date: {date} has not come yet")
    return Price(
        item=values["item"],
        market=values["market"],
        usd_per_hour=usd,
        provider=values["provider"],
        date=date,
        source=values["source"],
    )
