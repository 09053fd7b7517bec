"""Readings and findings as JSON: what nodes send, what is kept, and what `--json` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from hybrid.audit.reading import Expectation, Finding, Reading


def reading_to_json(reading: Reading) -> dict[str, Any]:
    """Plain data of a reading."""
    return {**dataclasses.asdict(reading), "curve": [list(p) for p in reading.curve]}


def reading_from_json(data: dict[str, Any]) -> Reading:
    """The reading of `reading_to_json`'s data.

    Raises:
        TypeError: it has other fields.
    """
    # In JSON an infinity is null: such a point is left out.
    given = [p for p in data.get("curve", ()) if None not in p]
    points = tuple((float(x), float(y)) for x, y in given)
    return Reading(**{**data, "curve": points})


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """Plain data of a finding, its readings included."""
    return {
        **dataclasses.asdict(finding),
        "readings": [reading_to_json(r) for r in finding.readings],
    }


def finding_from_json(data: dict[str, Any]) -> Finding:
    """The finding of `finding_to_json`'s data."""
    expected = data.get("expected")
    if expected is not None:
        expected = Expectation(**{**expected, "allowed": tuple(expected.get("allowed", ()))})
    readings = tuple(reading_from_json(r) for r in data.get("readings", ()))
    return Finding(**{**data, "readings": readings, "expected": expected})
