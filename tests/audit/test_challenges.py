"""Challenges: the right answer passes, and whatever is not it does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lying_devices import Honest, WrongProduct

from hybrid.audit import challenges
from hybrid.audit.challenges import Answer, Shape, answer, check, fingerprint, new_seed, reveal
from hybrid.audit.device import CpuDevice

SHAPE = Shape(48, 160, 64, 3)


def test_an_honest_answer_passes_and_is_the_same_bits_again() -> None:
    seed = new_seed()
    first, again = (answer(device, seed, SHAPE) for device in (CpuDevice(), Honest()))
    assert first.digest == again.digest
    for t in range(SHAPE.products):
        assert check(seed, SHAPE, first, t, reveal(CpuDevice(), seed, SHAPE, t)) is None


def test_products_are_exact_in_any_order_of_summation() -> None:
    here = torch.device("cpu")
    a, b = challenges.operands(5, SHAPE, here)
    assert a.min() == -8 and a.max() == 7
    order = challenges.order(5, 1, SHAPE, here)
    assert sorted(order.tolist()) == list(range(SHAPE.k))
    b = b[order]
    exact = a.to(torch.int64) @ b.to(torch.int64)
    assert torch.equal((a @ b).to(torch.int64), exact)
    assert torch.equal((a.flip(1) @ b.flip(0)).to(torch.int64), exact)


def test_seeds_and_products_differ() -> None:
    found = {answer(CpuDevice(), seed, SHAPE).digest for seed in range(4)}
    assert len(found) == 4
    shown = {reveal(CpuDevice(), 0, SHAPE, t) for t in range(SHAPE.products)}
    assert len(shown) == SHAPE.products


def test_a_wrong_product_is_found_though_it_was_committed_to() -> None:
    given_answer = answer(WrongProduct(), 7, SHAPE)
    shown = reveal(WrongProduct(), 7, SHAPE, 2)
    assert check(7, SHAPE, given_answer, 2, shown) == "product 2 is wrong (Freivalds)"


def test_what_is_shown_must_be_what_was_committed_to() -> None:
    lie = answer(WrongProduct(), 7, SHAPE)
    text = check(7, SHAPE, lie, 2, reveal(CpuDevice(), 7, SHAPE, 2))
    assert text == "product 2 is not the one that was committed to"


@settings(max_examples=40, deadline=None)
@given(
    row=st.integers(0, SHAPE.m - 1),
    column=st.integers(0, SHAPE.n - 1),
    by=st.integers(-(2**31), 2**31 - 1).filter(bool),
)
def test_any_one_changed_entry_is_found(row: int, column: int, by: int) -> None:
    seed, t = 11, 1
    honest = torch.frombuffer(bytearray(reveal(CpuDevice(), seed, SHAPE, t)), dtype=torch.int32)
    c = honest.view(SHAPE.m, SHAPE.n).clone()
    c[row, column] = (int(c[row, column]) + by + 2**31) % 2**32 - 2**31
    prints = torch.frombuffer(
        bytearray(answer(CpuDevice(), seed, SHAPE).fingerprints), dtype=torch.int64
    ).view(SHAPE.products, SHAPE.m)
    prints[t] = fingerprint(c)  # a liar commits to the lie
    found = check(seed, SHAPE, Answer(prints.numpy().tobytes()), t, c.numpy().tobytes())
    assert found is not None and found.startswith("product 1")


@given(junk=st.binary(max_size=64))
def test_answers_of_the_wrong_size_are_refused(junk: bytes) -> None:
    assert check(1, SHAPE, Answer(junk), 0, junk) == "an answer of the wrong size"


@pytest.mark.parametrize(("m", "k", "n"), [(8, 2**18, 8), (8, 2**17, 2**16)])
def test_shapes_that_would_round_are_refused(m: int, k: int, n: int) -> None:
    with pytest.raises(ValueError, match="not exact"):
        Shape(m, k, n, 1)
