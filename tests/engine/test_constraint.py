"""Constrained answers: schemas, patterns, closed sets; log probabilities of likely tokens."""

from __future__ import annotations

import json
import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid.engine.engine import Engine, Event
from hybrid.errors import InvalidRequest, Unsupported
from hybrid.testing_models import tiny_base
from hybrid.wire import Constraint, Sampling

SCHEMA = {
    "type": "object",
    "properties": {
        "court": {"enum": ["SCOTUS", "ca9", "Hoge Raad"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "judges": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "héé": {"type": "string", "maxLength": 5},
    },
    "required": ["court", "year", "judges", "héé"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A base whose output layer is larger than its tokenizer's vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny_base(folder, vocab_size=340, max_position_embeddings=512)
    return Engine(folder, "b" * 64, max_rows=8, device="cpu")


def drain(engine: Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


def answer(
    engine: Engine, constraint: Constraint | None, *, n: int = 200, seed: int | None = None
) -> tuple[str, str | None]:
    temperature = float(seed is not None)
    how = Sampling(max_tokens=n, temperature=temperature, seed=seed, constraint=constraint)
    engine.submit("x", "the quick brown", how)
    events = drain(engine)
    assert all(e.error is None for e in events), events[-1].error
    assert not engine.constraints._walks, "an ended request is forgotten"
    return "".join(e.text for e in events), events[-1].finish_reason


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_json_is_valid_by_its_schema(engine: Engine, seed: int | None) -> None:
    text, reason = answer(engine, Constraint.json_schema(SCHEMA), seed=seed)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("seed", range(4))
def test_a_json_object_is_one_or_is_cut_by_its_limit(engine: Engine, seed: int) -> None:
    text, reason = answer(engine, Constraint.json_object(), n=400, seed=seed)
    if reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert reason == "length"
        assert text.startswith("{")


def test_a_choice_is_exactly_one_of_them(engine: Engine) -> None:
    choices = ("yes", "yes, and more", "één ☃ 😀", 'q"\\n\n', "a|b", "[x]{2}$")
    got = {answer(engine, Constraint.choice(choices), seed=seed)[0] for seed in range(30)}
    assert got <= set(choices)
    assert len(got) > 3
    for choice in choices:
        assert answer(engine, Constraint.choice([choice])) == (choice, "stop")


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{1,3} U\.S\. \d{1,4} \((19|20)\d\d\)",
        r"[a-z]{3}/[a-z]{2}",
        r'"\\[^"]{0,4}"',
        "(é|ü){2,6}",
        "^x{3}$",
        "",
    ],
)
def test_a_pattern_matches_the_whole_answer(engine: Engine, pattern: str) -> None:
    for seed in range(4):
        text, reason = answer(engine, Constraint.regex(pattern), seed=seed)
        assert reason == "stop"
        assert re.fullmatch(pattern, text)


_atom = st.one_of(
    st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=3).map(
        re.escape
    ),
    st.sampled_from(["[a-c]", "[^a]", "[0-9]", "(x|yz)"]),
)
_piece = st.tuples(_atom, st.sampled_from(["", "?", "{2}", "{0,3}"])).map(
    lambda pair: f"(?:{pair[0]}){pair[1]}"
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_piece, min_size=1, max_size=4).map("".join), st.integers(0, 9))
def test_any_small_pattern_is_matched(engine: Engine, pattern: str, seed: int) -> None:
    text, reason = answer(engine, Constraint.regex(pattern), seed=seed)
    assert reason == "stop"
    assert re.fullmatch(pattern, text), (pattern, text)


def test_the_limit_cuts_an_answer_and_a_whole_one_at_the_limit_is_whole(engine: Engine) -> None:
    letters = Constraint.regex("[xyz]{5}")
    text, reason = answer(engine, letters, n=3)
    assert (len(text), reason) == (3, "length")
    assert answer(engine, letters, n=5)[1] == "stop"


def test_a_stop_string_still_stops(engine: Engine) -> None:
    sampling = Sampling(stop=("b",), constraint=Constraint.choice(["abc"]))
    engine.submit("x", "fox", sampling)
    events = drain(engine)
    assert ("".join(e.text for e in events), events[-1].finish_reason) == ("a", "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_constraint_answer_as_they_do_alone(
    engine: Engine, temperature: float
) -> None:
    prompts = ["the quick brown", "fox", "ABC; def!"]

    def ask(i: int, constraint: Constraint | None = None) -> Any:
        how = Sampling(
            max_tokens=12, temperature=temperature, seed=i, logprobs=True, constraint=constraint
        )
        return engine.submit(str(i), prompts[i % 3], how)

    alone = []
    for i in range(3):
        s = ask(i)
        drain(engine)
        alone.append(s.output)
    held = [Constraint.regex("[ab]{12}"), Constraint.choice(["dog", "fox"]), None]
    mixed = [s for i in range(3) for s in (ask(i), ask(i, held[i]))]
    drain(engine)
    assert [s.output for s in mixed[::2]] == alone
    assert mixed[5].output == alone[2]
    assert re.fullmatch("[ab]{12}", engine.codec.decode(mixed[1].output))


def test_a_constrained_answer_is_the_same_whatever_runs_beside_it(engine: Engine) -> None:
    constraint = Constraint.regex("[a-z]{10}")
    alone = answer(engine, constraint, seed=3)[0]
    others = [
        engine.submit(f"o{i}", "fox", Sampling(max_tokens=9, temperature=1.0, seed=i))
        for i in range(5)
    ]
    how = Sampling(max_tokens=200, temperature=1.0, seed=3, constraint=constraint)
    s = engine.submit("x", "the quick brown", how)
    drain(engine)
    assert engine.codec.decode(s.output) == alone
    assert all(o.ended for o in others)


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        (Constraint.json_schema({"type": "objet"}), "json_schema"),
        (Constraint.json_schema({"$ref": "https://example.org/x.json"}), "json_schema"),
        (Constraint.json_schema({"$ref": "#"}), "json_schema"),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), "json_schema"),
        (Constraint.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "json_schema"),
        (Constraint.json_schema({"enum": ["x" * 200_000]}), "json_schema"),
        (
            Constraint.json_schema(
                {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
            ),
            "json_schema",
        ),
        (Constraint.json_schema({"const": "\ud800"}), "json_schema"),
        (Constraint.regex("[a"), "regex"),
        (Constraint.regex(r"(a)\1"), "regex"),
        (Constraint.regex("(?=a)a"), "regex"),
        (Constraint.regex("(a{1000}){1000}"), "regex"),
        (Constraint.regex(r"[^\x00-\U0010ffff]"), "regex"),
        (Constraint.regex("\ud800"), "regex"),
        (Constraint.choice([]), "choice"),
        (Constraint.choice(["a", ""]), "choice"),
        (Constraint.choice(["<|endoftext|>"]), "choice"),  # could only be said by ending
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Constraint) else value,
)
def test_what_cannot_be_held_to_is_refused_at_once(
    engine: Engine, constraint: Constraint, param: str
) -> None:
    for _ in range(2):  # a refusal is not remembered as a grammar
        with pytest.raises(InvalidRequest) as e:
            engine.submit("x", "fox", Sampling(constraint=constraint))
        assert e.value.param == param
        assert "verbose" not in e.value.message
    assert engine.idle


@pytest.mark.parametrize("schema", [{"const": float("nan")}, {"const": {1, 2}}])
def test_a_schema_that_is_no_json_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="no JSON"):
        Constraint.json_schema(schema)


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(engine: Engine) -> None:
    other = engine.submit("o", "fox", Sampling(max_tokens=4))
    s = engine.submit("x", "fox", Sampling(constraint=Constraint.regex("x{9}(y|z)")))

    engine.step()
    walk = engine.constraints._walks[s]
    while not walk.is_error():  # as if a limit had been reached
        walk.consume_token(5)
    events = drain(engine)
    [error] = [e.error for e in events if e.error]
    assert isinstance(error, InvalidRequest)
    assert error.param == "regex"
    assert s.ended
    assert other.ended


def test_a_grammar_is_built_once_however_many_ask(engine: Engine) -> None:
    grammars = engine.constraints.grammars
    before = grammars.built
    constraint = Constraint.regex("only once [0-9]+")
    threads = [
        threading.Thread(target=engine.constraints.prepare, args=(constraint,)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        answer(engine, constraint, n=20, seed=i)
    assert grammars.built == before + 1


def test_the_grammars_least_used_are_forgotten(engine: Engine) -> None:
    grammars = engine.constraints.grammars
    for i in range(80):
        engine.constraints.prepare(Constraint.regex(f"number {i}"))
    assert len(grammars._made) == grammars._size
    before = grammars.built
    engine.constraints.prepare(Constraint.regex("number 79"))
    assert grammars.built == before
    engine.constraints.prepare(Constraint.regex("number 0"))
    assert grammars.built == before + 1


def test_a_tokenizer_without_bytes_is_unsupported(tmp_path: Path) -> None:
    tiny_base(tmp_path / "base")
    path = tmp_path / "base/tokenizer.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "decoder": None}))
    engine = Engine(tmp_path / "base", "b" * 64, device="cpu")
    with pytest.raises(Unsupported):
        engine.submit("x", "fox", Sampling(constraint=Constraint.json_object()))


def test_a_constraint_travels() -> None:
    sampling = Sampling(constraint=Constraint.json_schema(SCHEMA))
    assert pickle.loads(pickle.dumps(sampling)) == sampling


def test_probabilities_are_the_models_own_before_temperature_cuts_and_masks(
    engine: Engine,
) -> None:
    prompt = engine.codec.encode("the quick brown")
    how = Sampling(max_tokens=1, logprobs=True, top_logprobs=20)
    engine.submit("plain", prompt, how)
    cut = replace(how, temperature=2.0, top_k=3, seed=1, constraint=Constraint.regex("xyz"))
    engine.submit("held", prompt, cut)
    engine.submit("quiet", prompt, Sampling(max_tokens=1))
    engine.submit("few", prompt, Sampling(max_tokens=1, logprobs=True, top_logprobs=2))
    by = {e.sequence.id: e for e in engine.step()}
    plain = by["plain"]
    assert len(plain.top) == 20
    assert plain.top[0] == (plain.token, pytest.approx(plain.logprob))
    assert [p for _, p in plain.top] == sorted((p for _, p in plain.top), reverse=True)
    assert [t for t, _ in by["held"].top] == [t for t, _ in plain.top]
    assert by["held"].logprob < 0
    assert engine.codec.piece(by["held"].token or 0) == b"x"
    assert by["quiet"].top == ()
    assert [t for t, _ in by["few"].top] == [t for t, _ in plain.top[:2]]
    drain(engine)


@pytest.mark.parametrize("how", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}])
def test_top_logprobs_have_bounds(engine: Engine, how: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as e:
        engine.submit("x", "fox", Sampling(**how))
    assert e.value.param == "top_logprobs"


def test_pieces_join_to_the_text(engine: Engine) -> None:
    text = "een héél kleine ☃ 😀 proef\n"
    ids = engine.codec.encode(text)
    assert b"".join(map(engine.codec.piece, ids)).decode() == text
    assert engine.codec.piece(engine.codec.end) == b"<|endoftext|>"
    assert engine.codec.piece(339) == b""
