"""Every page in a real browser: on a phone and on a wide screen, in light and in dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from sample_pages import PAGES

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium and no google-chrome here to show the pages in"
)
TEXT = "</script><script>window.ran=1</script><img src=x onerror=window.ran=1>'\"&amp; " + "é" * 90
VERDICTS = {
    "audit": "Audit of 2 nodes: 1 contradicted",
    "advice": "hybrid: a cluster for the base, agents for the skills",
    "scaling": "3 by strong scaling, 7 by weak scaling",
    "profile": "is compute-bound",
    "training": "failed after 1,200 of 2,000 steps",
}
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(e => !e.closest(".wide"))
  .map(e => [e.getBoundingClientRect(), e.tagName + " " + e.textContent.slice(0, 40)])
  .filter(([box]) => box.right > innerWidth + 0.5 || box.left < -0.5).map(([, told]) => told)
"""
"""Elements that stick out of the screen; tables do so within a box that scrolls."""
OVERLAPPING = """
[...document.querySelectorAll("svg[role=img]")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")]
    .map(t => [t.getBoundingClientRect(), t.textContent]);
  return texts.flatMap(([a, one], i) => texts.slice(i + 1).filter(([b]) => a.left < b.right
    && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom).map(([, o]) => [one, o]));
})
"""
"""Pairs of texts of one plot that run into one another."""
FAINT = """
(() => {
  const parts = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => parts(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (parts(c)[3] !== 0) return light(c);
    }
    return 1;
  };
  return [...document.querySelectorAll("body *")].filter(e => [...e.childNodes].some(
    n => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility()).map(e => {
    const style = getComputedStyle(e), ink = light(e.tagName === "text" ? style.fill : style.color);
    const [dim, bright] = [ink, behind(e)].sort((a, b) => a - b);
    return [(bright + .05) / (dim + .05), parseFloat(style.fontSize), e.textContent.slice(0, 40)];
  }).filter(([contrast, size]) => contrast < 4.5 || size < 11);
})()
"""
"""Texts of less contrast than WCAG 2.2 asks for (4.5), or smaller than 11 pixels."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_on_every_screen_and_loads_nothing(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / f"{name}.html"
    page.write_text(PAGES[name](TEXT), encoding="utf-8")
    for width, dark in ((390, False), (1280, True)):
        browser.show(page, width=width, dark=dark)
        assert VERDICTS[name] in browser.value("document.title")
        assert browser.value("document.querySelector('h1').textContent === document.title")
        assert browser.value("document.querySelector('h1').getBoundingClientRect().top") < 100
        browser.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert browser.value("innerWidth") == width, "the viewport is that of the screen"
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(OUTSIDE) == []
        assert browser.value(OVERLAPPING) == []
        assert browser.value(FAINT) == []
        assert browser.value("document.querySelectorAll('svg[role=img]').length") >= 2
        assert browser.value(f"document.body.textContent.includes({json.dumps(TEXT)})")
        assert browser.value("window.ran") is None
        asked = [p["request"]["url"] for m, p in browser.events if m == "Network.requestWillBeSent"]
        assert asked == [page.as_uri()]
        told = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        assert [event for event in browser.events if event[0] in told] == []


def test_a_curve_tells_the_values_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "training.html"
    page.write_text(PAGES["training"]("a run"), encoding="utf-8")
    browser.show(page, width=390)
    browser.value("document.querySelector('svg[data-chart]').scrollIntoView()")
    box = browser.value(
        "(({left, top, width}) => [left, top, width])"
        "(document.querySelector('svg[data-chart]').getBoundingClientRect())"
    )
    at = {"x": box[0] + box[2] * 499 / 1199, "y": box[1] + 50}
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
    read = browser.value("document.querySelector('.reading').textContent")
    assert read.startswith(("step 499: training", "step 500: training", "step 501: training"))
    assert "step 400: held out" in read or "step 600: held out" in read


def test_a_page_that_would_load_or_run_something_is_caught(
    browser: Browser, tmp_path: Path
) -> None:
    """The checks above can fail, and the policy of a page holds against what slipped through."""
    page = tmp_path / "bad.html"
    bad = PAGES["scaling"]("a").replace(
        "</main>", "<script>window.ran=1</script><img src='http://127.0.0.1:9/x.png'>"
        "<p style='width:2000px;color:#888;font-size:9px'>wide</p></main>",
    )  # fmt: skip
    page.write_text(bad, encoding="utf-8")
    browser.show(page, width=390)
    assert browser.value("window.ran") is None
    failed = [p["blockedReason"] for m, p in browser.events if m == "Network.loadingFailed"]
    assert failed == ["csp"], "the picture was not asked for"
    refused = [p["entry"]["text"] for m, p in browser.events if m == "Log.entryAdded"]
    assert len(refused) == 2
    assert all("Content Security Policy" in text for text in refused)
    assert len(browser.value(OUTSIDE)) == 1
    assert len(browser.value(FAINT)) == 1
