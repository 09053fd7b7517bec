"""Entities of the legal example: courts, reporters and codes of law, split so nothing leaks.

An entity is everything that goes by one of the same names: two courts called alike, a reporter
with all its editions and variations. A fixed hash of the entity holds out 15 % of them. An
entity whose name occurs inside another entity's name ("Ohio Supreme Court" in "Ohio Supreme
Court Commission") is never held out, since it could not be kept out of the training text.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from courts_db import courts
from reporters_db import LAWS, REPORTERS

HOLDOUT_PERCENT = 15
COURT_TYPES = {
    "trial": ("trial",),
    "appellate": ("appellate",),
    "trial & iac": ("appellate", "trial"),
    "special": ("special",),
    "bankruptcy": ("bankruptcy",),
    "ag": ("attorney general",),
    "international": ("international",),
}
FEDERAL = "United States"
# The areas that reporters-db spells `us:xx`; every other one (circuits, districts) is federal.
STATES = {
    "al": "Alabama", "ak": "Alaska", "az": "Arizona", "ar": "Arkansas", "ca": "California",
    "co": "Colorado", "ct": "Connecticut", "de": "Delaware", "dc": "Washington D.C.",
    "fl": "Florida", "ga": "Georgia", "hi": "Hawaii", "id": "Idaho", "il": "Illinois",
    "in": "Indiana", "ia": "Iowa", "ks": "Kansas", "ky": "Kentucky", "la": "Louisiana",
    "me": "Maine", "md": "Maryland", "ma": "Massachusetts", "mi": "Michigan", "mn": "Minnesota",
    "ms": "Mississippi", "mo": "Missouri", "mt": "Montana", "ne": "Nebraska", "nv": "Nevada",
    "nh": "New Hampshire", "nj": "New Jersey", "nm": "New Mexico", "ny": "New York",
    "nc": "North Carolina", "nd": "North Dakota", "oh": "Ohio", "ok": "Oklahoma", "or": "Oregon",
    "pa": "Pennsylvania", "pr": "Puerto Rico", "ri": "Rhode Island", "sc": "South Carolina",
    "sd": "South Dakota", "tn": "Tennessee", "tx": "Texas", "ut": "Utah", "vt": "Vermont",
    "va": "Virginia", "wa": "Washington", "wv": "West Virginia", "wi": "Wisconsin",
    "wy": "Wyoming", "gu": "Guam", "vi": "Virgin Islands", "as": "American Samoa",
    "mp": "Northern Mariana Islands", "tribal": "Tribal",
}  # fmt: skip


@dataclass
class Record:
    """One row of a source: the strings it goes by, and what is true of each of them."""

    kind: str
    strings: tuple[str, ...]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    held_out: bool = False


def words(text: str) -> str:
    """Lower-case words and numbers, joined by single blanks: how names are compared in text."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def compact(text: str) -> str:
    """The same without blanks: "A.D. 2d", "AD2d" and "A. D. 2d" are one name."""
    return words(text).replace(" ", "")


def load() -> list[Record]:
    """All records, each marked as held out or not. The same packages give the same split."""
    records = [*_courts(), *_reporters(), *_laws()]
    groups = _groups(records)
    inside = _inside_others(groups)
    for number, group in enumerate(groups):
        key = min(compact(s) for record in group for s in record.strings)
        bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % 100
        for record in group:
            record.held_out = bucket < HOLDOUT_PERCENT and number not in inside
    return records


def _courts() -> Iterator[Record]:
    for court in courts:
        strings = _names(court["name"], *court["examples"])
        place = court["location"]
        labels: dict[str, tuple[str, ...]] = {
            "location": ("Washington D.C." if place == "D.C." else place,)
        }
        if court["type"] in COURT_TYPES:
            labels["type"] = COURT_TYPES[court["type"]]
        yield Record("court", strings, labels)


def _reporters() -> Iterator[Record]:
    for entries in REPORTERS.values():
        for entry in entries:
            labels = {"jurisdiction": _places(entry["mlz_jurisdiction"])}
            labels["editions"] = tuple(entry["editions"])
            strings = _names(entry["name"], *entry["editions"], *entry["variations"])
            yield Record("reporter", strings, labels)


def _laws() -> Iterator[Record]:
    for short, entries in LAWS.items():
        for entry in entries:
            strings = _names(short, entry["name"], *entry["variations"])
            yield Record("law", strings, {"jurisdiction": (entry["jurisdiction"],)})


def _names(*names: str) -> tuple[str, ...]:
    """Distinct names with at least one letter or digit, on one line each."""
    lines = (" ".join(name.split()) for name in names)
    return tuple(dict.fromkeys(line for line in lines if compact(line)))


def _places(codes: list[str]) -> tuple[str, ...]:
    """The one state, or the federation, that codes such as `us:ny;court` and `us:c2` name.

    Codes with a district (`us:ny.sd`) are federal courts that sit in a state. Regional reporters
    cover several states: they have no one jurisdiction, and get no label.
    """
    areas = {code.split(";")[0].removeprefix("us:") for code in codes}
    states = sorted({STATES[area] for area in areas if area in STATES})
    if len(states) > 1:
        return ()
    return tuple(states) or (FEDERAL,)


def _groups(records: list[Record]) -> list[list[Record]]:
    """Records joined by any shared name (union-find)."""
    parent = list(range(len(records)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, record in enumerate(records):
        for string in record.strings:
            parent[root(i)] = root(first.setdefault(compact(string), i))
    found = defaultdict(list)
    for i, record in enumerate(records):
        found[root(i)].append(record)
    return list(found.values())


def _inside_others(groups: list[list[Record]]) -> set[int]:
    """Numbers of the groups one of whose names occurs, on word bounds, in another's name."""
    owner: dict[str, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for record in group:
            for string in record.strings:
                for run in _runs(words(string).split()):
                    owner[run].add(number)
    return {
        number
        for number, group in enumerate(groups)
        for record in group
        for string in record.strings
        if len(owner[words(string)]) > 1
    }


def _runs(parts: list[str]) -> Iterator[str]:
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield " ".join(parts[start:end])


class HeldOut:
    """Finds held-out names in text, on word bounds and whatever the case and punctuation."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.names = {words(s) for record in records if record.held_out for s in record.strings}
        parted = [name.split() for name in self.names]
        self._begun = {" ".join(p[:end]) for p in parted for end in range(1, len(p) + 1)}

    def first_in(self, text: str) -> str | None:
        """The first held-out name that occurs in `text`, or None."""
        parts = words(text).split()
        for start in range(len(parts)):
            name = parts[start]
            end = start + 1
            while name in self._begun:
                if name in self.names:
                    return name
                if end == len(parts):
                    break
                name = f"{name} {parts[end]}"
                end += 1
        return None
