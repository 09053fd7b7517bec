"""Sentences with one citation each and the parts of it, made from real reporters.

Volumes, pages and years are drawn within what each edition covered. eyecite, an independent
parser, must read the same parts out of a sentence, or the sentence is not used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from eyecite import get_citations
from eyecite.models import FullCaseCitation
from records import Record

PARTIES = (
    "Adams", "Baker", "Carter", "Davis", "Evans", "Foster", "Garcia", "Hughes", "Irving", "Jones",
    "Keller", "Lopez", "Miller", "Nelson", "Owens", "Parker", "Quinn", "Roberts", "Smith", "Turner",
)  # fmt: skip
SENTENCES = (
    "{a} v. {b}, {cite} ({year})",
    "See {a} v. {b}, {cite} ({year}).",
    "The court followed {a} v. {b}, {cite} ({year}).",
    "This was settled in {a} v. {b}, {cite} ({year}), and is good law.",
    "In re {a}, {cite} ({year})",
)
PARTS = ("volume", "reporter", "page", "year")


def parts(sentence: str) -> dict[str, str] | None:
    """What eyecite reads: volume, reporter, page and year; None unless it is one full citation."""
    found = get_citations(sentence)
    if len(found) != 1 or not isinstance(found[0], FullCaseCitation):
        return None
    read = {**found[0].groups, "year": found[0].metadata.year}
    return {key: read[key] for key in PARTS} if all(read.get(key) for key in PARTS) else None


def rows(records: list[Record], count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """`count` rows of {"input": sentence, "output": JSON of its parts}."""
    editions = sorted(
        {edition for record in records for edition in record.labels.get("editions", ())}
    )
    made = 0
    while made < count:
        truth = {
            "volume": str(rng.randint(1, 999)),
            "reporter": rng.choice(editions),
            "page": str(rng.randint(1, 1999)),
            "year": str(rng.randint(1880, 2020)),
        }
        a, b = rng.sample(PARTIES, 2)
        cite = f"{truth['volume']} {truth['reporter']} {truth['page']}"
        sentence = rng.choice(SENTENCES).format(a=a, b=b, cite=cite, year=truth["year"])
        if parts(sentence) == truth:
            made += 1
            yield {"input": sentence, "output": json.dumps(truth)}
