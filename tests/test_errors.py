"""Each kind of error: one status, one exit code, and itself again on the other side of a wire."""

from __future__ import annotations

import pickle
import time
from email.utils import formatdate

import pytest

from hybrid import errors
from hybrid.errors import HybridError, from_envelope, retry_after_s

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, HybridError)]


def test_there_are_kinds_and_their_codes_are_their_own() -> None:
    assert len(KINDS) > 20
    assert len({k.code for k in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_a_kind_survives_pickle_and_the_envelope(kind: type[HybridError]) -> None:
    assert kind.__doc__
    assert 400 <= kind.status < 600
    assert 1 <= kind.exit_code < 128
    error = kind("what went wrong", param="field", retry_after=2.0)
    for back in (
        pickle.loads(pickle.dumps(error)),
        from_envelope(error.envelope()["error"], kind.status, "2"),
    ):
        assert type(back) is kind
        assert (back.message, back.param, back.retry_after) == ("what went wrong", "field", 2.0)


def test_a_strangers_envelope_becomes_an_error_of_its_status() -> None:
    assert isinstance(from_envelope({"code": "unheard_of"}, 429), errors.RateLimited)
    assert from_envelope({}, 418).message == "HTTP 418"
    for odd in ("it is on fire", None, ["x"], 5):
        assert isinstance(from_envelope(odd, 502), errors.Unavailable)
    assert from_envelope("it is on fire", 502).message == "it is on fire"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7),
        (" 1.5 ", 1.5),
        ("9" * 400, 86400),
        (None, None),
        ("", None),
        ("²", None),
        ("-1", None),
        ("nan", None),
        ("soon", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0),
        ("Sun Nov  6 08:49:37 1994", 0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86400),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


def test_retry_after_counts_from_now() -> None:
    after = retry_after_s(formatdate(time.time() + 60, usegmt=True))
    assert after is not None
    assert 55 < after <= 60
