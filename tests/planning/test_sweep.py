"""Sweeps as records and as a page: what is in them, and that they hold no infinity."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from hybrid.errors import DataError
from hybrid.planning.scaling import usl
from hybrid.planning.scaling_page import to_html
from hybrid.planning.sweep import Measured, as_json, assess, law


def run(workers: int, rate: float, mode: str = "strong", wobble: float = 0.0) -> Measured:
    step = 1000 / rate
    times = tuple(step * (1 + wobble * (i % 5 - 2)) for i in range(10))
    return Measured(
        mode=mode, workers=workers, step_s=times, tokens_per_step=1000, nodes=workers,
        machines=workers, when=0.0,
    )  # type: ignore[arg-type]  # fmt: skip


def runs(*counts: int, kappa: float = 0.01) -> list[Measured]:
    return [run(n, usl(n, 100, 0.05, kappa), wobble=0.01) for n in counts]


def test_a_point_is_the_median_step_and_half_of_the_middle_half() -> None:
    point = run(2, 50, wobble=0.1).point
    assert point.rate == pytest.approx(50)
    assert point.spread == pytest.approx(0.1)
    with pytest.raises(DataError, match="2 workers"):
        _ = dataclasses.replace(run(2, 50), step_s=()).point


def test_the_record_is_plain_json_whatever_is_unbounded() -> None:
    for kappa in (0.0, 0.01):
        sweep = assess(runs(1, 2, 4, 8, kappa=kappa), {}, 2.0)
        data = json.loads(json.dumps(as_json(sweep), allow_nan=False))
        assert [p["workers"] for p in data["points"]] == [1, 2, 4, 8]
        assert data["points"][0]["tokens_per_usd"] == pytest.approx(100 * 1800)
        assert (data["fit"]["knee"] is None) == (kappa == 0)
        assert data["recommendation"]["workers"] >= 1
    assert "Universal Scalability Law" in law(sweep.fit)
    assert "90 % intervals" in law(sweep.fit)


def test_two_modes_are_not_one_sweep() -> None:
    with pytest.raises(DataError, match="2 modes"):
        assess([run(1, 100), run(2, 190, "weak")], {})


class _Balance(HTMLParser):
    """Counts tags that are opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("counts", [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8, 16, 32), (3, 5, 9, 20)])
def test_the_page_is_whole_and_needs_nothing_else(counts: tuple[int, ...]) -> None:
    page = to_html([assess(runs(*counts), {})], name="a <b>", when=0.0)
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    assert "a &lt;b&gt;" in page
    assert page.count("<circle") == len(counts)
    assert not re.search(r"https?://|<script|nan|inf\b", page)
