"""What pages are made of: any text is shown as that text, and a page runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid import pages
from hybrid.pages import Html, prose, table, tag, text

HOSTILE = "</script><script>a()</script>&lt;b&gt;\"' on=x <!-- ]]> \u202e \x00 \ud800 \ufffe é 漢 🜚"
ANY = st.text(st.characters(exclude_categories=()), min_size=1)


class Parsed(HTMLParser):
    """The elements with the names of their attributes, and the text of each that has some."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.values: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs if name != "class")))
        self.values += [str(value) for _, value in attrs]
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


def everything(given: str) -> str:
    """A page with a text in every place that takes one."""
    return pages.document(
        given,
        pages.paragraph(given),
        pages.bullets([given, given]),
        pages.section(given, pages.details(given, given)),
        pages.tiles([(given, given, given)]),
        pages.toned(given, "bad"),
        pages.figure(given, given, unit=given, legend=pages.key([(given, "red")]), note=given),
        table((given, given), [(given, given)], numbers=[1], caption=given),
        tag("svg", tag("title", given), aria_label=given, class_=given),
        pages.data("d", given),
        given,
        script="1;",
    )


def cleaned(given: str) -> str:
    """Computed in another way than the code does."""
    odd = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFFFE, 0xFFFF}
    kept = [
        c
        if c in "\t\n\r" or (ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000 and ord(c) not in odd)
        else "\ufffd"
        for c in given
    ]
    return "".join(kept)


@given(ANY)
@example(HOSTILE)
@example("x" * pages.LONG)
def test_any_text_in_any_place_is_shown_as_that_text(given: str) -> None:
    page = everything(given)
    page.encode()  # no half of a surrogate pair
    found, plain = Parsed(page), Parsed(everything("x"))
    assert found.tags == plain.tags, "it makes no element and no attribute"
    shown = cleaned(given)
    for mine, of_x in zip(found.texts, plain.texts, strict=True):
        if of_x in ("x", "x\n"):
            assert mine == of_x.replace("x", shown)
    assert found.values.count(shown) >= 2
    assert plain.texts.count("x") >= 13
    [stored] = re.findall(r'id="d">(.*?)</script>', page)
    assert json.loads(stored) == given
    ElementTree.fromstring(tag("svg", given, aria_label=given))


@given(ANY, ANY)
def test_html_is_no_attribute_and_text_stays_text_however_often(one: str, other: str) -> None:
    made = tag("b", one, title=Html(f'"{other}'))
    found = Parsed(made)
    assert found.tags == [("b", ("title",))]
    assert found.values == ['"' + cleaned(other)]
    assert text(made) == made
    assert text(made + "<i>") == text("".join([made, "<i>"])), "what is added makes all of it text"
    assert "<i>" not in text(made + "<i>")


@given(st.text("a`<&", max_size=12))
def test_what_is_between_backticks_is_code(given: str) -> None:
    found = Parsed(f"<p>{prose(given)}</p>")
    closed = given.count("`") % 2 == 0
    assert len(found.tags) == 1 + (given.count("`") // 2 if closed else 0)
    plain = re.sub(r"</?code>", "", prose(given))
    assert plain == text(given.replace("`", "") if closed else given)


def test_a_page_may_load_nothing_and_run_its_own_script_only() -> None:
    def policy(page: str) -> str:
        [found] = [v for v in Parsed(page).values if v.startswith("default-src 'none'")]
        return found

    digest = base64.b64encode(hashlib.sha256(b"a < b;").digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy(pages.document("t", script="a < b;"))
    assert "script-src 'none'" in policy(pages.document("t"))


def test_a_table_aligns_numbers_and_breaks_long_text_only() -> None:
    made = table(("name", "ms"), [("a", "1.5"), ("b" * pages.LONG, "")], numbers=[1])
    assert made.startswith('<div class="wide"><table>'), "it scrolls within its own box"
    assert '<td>a</td><td class="n">1.5</td>' in made
    assert '<td class="long">b' in made
    assert '<th scope="col" class="n">ms</th>' in made
    assert "caption" not in made
    with pytest.raises(TypeError):
        table(("a",), [[1]])  # type: ignore[list-item]


def test_what_has_no_content_is_left_out() -> None:
    none = (pages.section("h", "", Html("")), pages.paragraph(""), pages.bullets([]))
    assert none == ("", "", "")
    assert pages.gallery("", Html("")) == ""
