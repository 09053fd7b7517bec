"""Arithmetic on sets of times: each set is a sorted list of disjoint half-open (start, end)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

Interval = tuple[float, float]
Times = list[Interval]


def union(parts: Iterable[Interval]) -> Times:
    """Any intervals, overlapping and in any order, as a set; empty ones vanish."""
    done: Times = []
    for start, end in sorted(parts):
        if end <= start:
            continue
        if done and start <= done[-1][1]:
            if end > done[-1][1]:
                done[-1] = (done[-1][0], end)
        else:
            done.append((start, end))
    return done


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> Times:
    """What is in both sets."""
    done: Times = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            done.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return done


def clip(a: Sequence[Interval], window: Interval) -> Times:
    """What of `a` is in the window, without a look at what is before or after it."""
    begin, until = window
    if until <= begin:
        return []
    first = bisect_right(a, begin, key=itemgetter(1))
    last = bisect_left(a, until, key=itemgetter(0))
    return [(max(start, begin), min(end, until)) for start, end in a[first:last]]


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> Times:
    """What is in `a` and not in `b`."""
    done: Times = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                done.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            done.append((start, end))
    return done


def length(a: Iterable[Interval]) -> float:
    """Time in a set."""
    return sum(end - start for start, end in a)
