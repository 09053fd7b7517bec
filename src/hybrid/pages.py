"""HTML pages that need nothing but themselves: what all of the reports are made of.

Everything is shown as text unless `tag` made it, so that no name, message or reading of a
stranger can become markup. A page has one stylesheet, for light and dark screens and for phones,
and a policy that lets it load nothing and run no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any, Literal

from hybrid.pages_style import STYLE

Colour = Literal[
    "blue",
    "orange",
    "green",
    "purple",
    "teal",
    "grey",
    "yellow",
    "pink",
    "red",
    "slate",
    "pale",
    "ink",
]
"""Of plots and their keys; each has a shade for light and one for dark screens."""
Tone = Literal["good", "mid", "bad"]
LONG = 28
"""Characters from which a cell's text is broken into lines, of a width to be read on a phone."""
_VOID = ("br", "meta")
_NOT_SHOWN = re.compile(
    "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)
"""What no document can hold (NUL, half of a surrogate pair, …), and what turns around the text that
comes after it, such as a verdict. Scripts from right to left need none of it."""


class Html(str):
    """Text that is HTML already. Only `tag` and what is built on it makes any."""

    __slots__ = ()


def text(content: str) -> Html:
    """A string as HTML that shows just it; `Html` stays as it is."""
    return content if isinstance(content, Html) else _escaped(content)


def _escaped(content: str) -> Html:
    return Html(escape(_NOT_SHOWN.sub("\N{REPLACEMENT CHARACTER}", content)))


def group(*content: str) -> Html:
    """Several after another."""
    return Html("".join(text(c) for c in content))


def tag(name: str, /, *content: str, **attributes: str | float | None) -> Html:
    """An element.

    Args:
        content: `Html`, or text to be shown.
        attributes: with `_` for `-`, and one more at the end where Python has the word; None is
            left out.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in _VOID else f"{group(*content)}</{name}>"
    return Html(f"<{name}{told}>{end}")


def _number(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def document(title: str, *body: str, script: str = "") -> str:
    """A whole page.

    Args:
        title: of the window and above the page: what it says, not what it is.
        script: JavaScript of ours, run at the end.
    """
    allowed = "'none'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none';"
        " form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    main = tag("main", tag("h1", title), *(group(part, "\n") for part in body))
    end = tag("script", Html(script)) if script else Html("")
    page = tag("html", head, "\n", tag("body", main, end), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def data(name: str, value: Any) -> Html:
    """JSON within the page, for programs: `<script type="application/json" id=name>`."""
    shown = Html(json.dumps(value).replace("<", "\\u003c"))
    return tag("script", shown, type="application/json", id=name)


def section(heading: str, *content: str) -> Html:
    """A heading with what belongs to it; nothing where there is no content."""
    shown = [c for c in content if c]
    return tag("section", tag("h2", heading), *shown) if shown else Html("")


def paragraph(*content: str, class_: str | None = None) -> Html:
    """A paragraph; nothing where there is no content."""
    return tag("p", *content, class_=class_) if any(content) else Html("")


def bullets(items: Iterable[str], class_: str | None = None) -> Html:
    """A list; nothing where there are no items."""
    rows = [tag("li", item) for item in items]
    return tag("ul", *rows, class_=class_) if rows else Html("")


def prose(content: str) -> Html:
    """A text in which what stands between backticks is code."""
    parts = content.split("`")
    if len(parts) % 2 == 0:  # one that is not closed
        return text(content)
    return group(*(tag("code", part) if n % 2 else part for n, part in enumerate(parts)))


def toned(word: str, tone: Tone | None) -> Html:
    """A word that stands out: well, doubtful or bad."""
    return tag("strong", word, class_=tone)


def sentence(content: str) -> str:
    """With a capital."""
    return content[:1].upper() + content[1:]


def details(summary: str, *content: str) -> Html:
    """What is shown when it is asked for."""
    return tag("details", tag("summary", summary), *content)


def tiles(entries: Iterable[tuple[str, str, str]]) -> Html:
    """Main figures side by side: (name, value, more)."""
    shown = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more)))
        for name, value, more in entries
    ]
    return tag("dl", *shown)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[int] = (),
    caption: str = "",
) -> Html:
    """A table; one wider than the screen scrolls within its own box.

    Args:
        numbers: the columns, from 0, whose cells are aligned to the right.
        caption: its heading.
    """

    def cell(column: int, content: str) -> Html:
        long = len(re.sub("<[^>]*>", "", text(content))) >= LONG
        classes = ["n"] * (column in numbers) + ["long"] * long
        return tag("td", content, class_=" ".join(classes) or None)

    head = [
        tag("th", name, scope="col", class_="n" if column in numbers else None)
        for column, name in enumerate(heads)
    ]
    body = [tag("tr", *(cell(column, c) for column, c in enumerate(row))) for row in rows]
    whole = tag(
        "table",
        tag("caption", caption) if caption else "",
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
    )
    return tag("div", whole, class_="wide")


def swatch(colour: Colour) -> Html:
    """A patch of a colour, before what is drawn in it."""
    return tag("i", style=f"background:var(--{colour})")


def key(entries: Iterable[tuple[str, Colour]]) -> Html:
    """Which colour is what."""
    return tag("p", *(tag("span", swatch(c), name) for name, c in entries), class_="key")


def figure(plot: str, caption: str, *, unit: str = "", legend: str = "", note: str = "") -> Html:
    """A plot under its caption.

    Args:
        plot: HTML of the `plots` module, or a sentence where there is nothing to draw.
        unit: of what goes up.
        legend: HTML of `key`.
        note: below it.
    """
    return tag(
        "figure",
        tag("figcaption", caption, *((" ", tag("small", unit)) if unit else ())),
        legend,
        plot if isinstance(plot, Html) else paragraph(plot, class_="soft"),
        paragraph(note, class_="note"),
    )


def gallery(*figures: str) -> Html:
    """Figures side by side where there is room."""
    shown = [figure for figure in figures if figure]
    return tag("div", *shown, class_="gallery") if shown else Html("")
