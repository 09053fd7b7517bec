"""Sets of times: held against counting each moment by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybrid.planning.intervals import Times, clip, intersect, length, subtract, union

PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(times: Times) -> set[int]:
    return {m for start, end in times for m in range(int(start), int(end))}


@given(PARTS, PARTS)
def test_sets_of_times_are_sets_of_moments(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    one, two = union(a), union(b)
    assert moments(one) == {m for start, end in a for m in range(start, end)}
    assert all(one[i][1] < one[i + 1][0] for i in range(len(one) - 1))
    assert moments(intersect(one, two)) == moments(one) & moments(two)
    assert moments(subtract(one, two)) == moments(one) - moments(two)
    assert moments(union([*one, *two])) == moments(one) | moments(two)
    assert length(one) == len(moments(one))
    for window in b:
        assert clip(one, window) == intersect(one, union([window]))
