"""Taking a citation apart by choosing: every way to read a sentence, scored by a specialist.

A model this small cannot copy numbers, but it can tell a good reading from a bad one. Agent hosts
import this module (as `parts.extract`), so it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

PARTS = ("volume", "reporter", "page", "year")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])|(?<![\w.])\d+(?=\.$)")


def candidates(sentence: str) -> list[str]:
    """Every reading as JSON: two neighbouring numbers with a name between them, and a year.

    At least one, so that there is always an answer; a sentence without a citation gets an empty
    reading.
    """
    numbers = list(_NUMBER.finditer(sentence))
    years = [n.group() for n in numbers if len(n.group()) == 4] or [""]
    found = []
    for volume, page in pairwise(numbers):
        between = sentence[volume.end() : page.start()].strip(" ,;(")
        if re.search(r"[A-Za-z]", between):
            for year in dict.fromkeys(years):
                values = (volume.group(), between, page.group(), year)
                found.append(dict(zip(PARTS, values, strict=True)))
    found = found or [dict.fromkeys(PARTS, "")]
    return list(dict.fromkeys(json.dumps(reading) for reading in found))


async def extract(ctx: Any) -> dict[str, Any]:
    """The behaviour of the entities agent: the likeliest reading, as an object."""
    scored = await ctx.score(candidates(ctx.text))
    return {
        "agent": ctx.spec.name,
        "answer": json.loads(scored.answer),
        "score": round(scored.probability, 6),
        "provenance": scored.provenance,
    }
