"""The envelope: stored and read again, whatever is in it; children inherit."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hybrid.agents.task import ENVELOPE_VERSION, Budget, Task
from hybrid.errors import InvalidRequest

texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(
    input=values, agent=texts, tenant=texts, conversation=st.none() | texts,
    deadline=st.none() | st.floats(0, 1e11), priority=st.integers(-1000, 1000),
    tokens=st.none() | st.integers(0, 10**9), stream=st.booleans(),
)  # fmt: skip
def test_an_envelope_is_read_as_it_was_written(
    input: Any, agent: str, tokens: int | None, **fields: Any
) -> None:
    task = Task(agent=agent, input=input, budget=Budget(tokens=tokens), **fields)
    assert Task.from_json(task.to_json()) == task
    child = task.child("b", input, key="k")
    assert child.id == task.child("b", None, key="k").id != task.child("b", None, key="l").id
    assert (child.parent, child.root, child.tenant) == (task.id, task.id, task.tenant)
    assert (child.deadline, child.budget, child.priority) == (
        task.deadline, task.budget, task.priority,
    )  # fmt: skip
    assert child.stream == task.stream
    assert child.conversation is None, "children do not queue behind a conversation"
    assert child.child("c", 1, key="k").root == task.id


@given(texts, texts, texts, texts)
def test_no_two_places_have_one_name(a: str, b: str, c: str, d: str) -> None:
    def child(id: str, key: str) -> str:
        return Task(agent="a", input=1, id=id).child("b", 1, key=key).id

    assert (child(a, b) == child(c, d)) == ((a, b) == (c, d))
    assert child(f"{a}/{b}", c) != child(a, f"{b}/{c}")


def test_what_is_no_envelope_is_said_so() -> None:
    good = Task(agent="a", input=1).to_json()
    for cut in (0, 1, len(good) // 2, len(good) - 1):
        with pytest.raises(InvalidRequest, match="not a task envelope"):
            Task.from_json(good[:cut])
    for wrong in ("[" * 100_000, "[]", "null", '{"v":1}', '{"v":1,"budget":{},"agent":"a"}'):
        with pytest.raises(InvalidRequest):
            Task.from_json(wrong)
    newer = json.loads(good) | {"v": ENVELOPE_VERSION + 1}
    with pytest.raises(InvalidRequest, match="version 2; this hybrid reads 1"):
        Task.from_json(json.dumps(newer))
    for value in (float("nan"), {1, 2}, object()):
        with pytest.raises(InvalidRequest):
            Task(agent="a", input=value).to_json()
