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
from parts import PARTS, candidates
from records import Record

PARTIES = (
    "Adams", "Baker", "Carter", "Davis", "Evans", "Foster", "Garcia", "Hughes", "Irving", "Jones",
    "Keller", "Lopez", "Miller", "Nelson", "Owens", "Parker", "Quinn", "Roberts", "Smith", "Turner",
)  # fmt: skip
SENTENCES = (
    "{a} v. {b}, {cite} ({year})",
    "See {a} v. {b}, {cite}, {pin} ({year}).",
    "On May {day}, {later} the court followed {a} v. {b}, {cite} ({year}).",
    "In re {a}, No. {day} of {later}, {cite} ({year})",
)


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
        year, page = rng.randint(1880, 2000), rng.randint(1, 899)
        truth = {
            "volume": str(rng.randint(1, 999)),
            "reporter": rng.choice(editions),
            "page": str(page),
            "year": str(year),
        }
        a, b = rng.sample(PARTIES, 2)
        sentence = rng.choice(SENTENCES).format(
            a=a,
            b=b,
            cite=f"{truth['volume']} {truth['reporter']} {page}",
            year=year,
            pin=page + rng.randint(1, 30),
            day=rng.randint(1, 31),
            later=rng.randint(year, 2020),
        )
        answer = json.dumps(truth)
        if parts(sentence) == truth and answer in candidates(sentence):
            made += 1
            yield {"input": sentence, "output": answer}
