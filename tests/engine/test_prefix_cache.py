"""Prompts that begin alike are read once, and answered as if they had been read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.engine.engine import Engine
from hybrid.engine.scheduler import Sequence
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

BASE = "b" * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prefixes")
    tiny_base(root / "base", max_position_embeddings=256)
    for i in range(2):
        tiny_adapter(root / "base", root / f"a{i}", seed=i)
    return root


def engine(folder: Path, tokens: int) -> Engine:
    made = Engine(folder / "base", BASE, prefix_tokens=tokens, device="cpu")
    made.codec.ends = frozenset()
    for i in range(2):
        made.add_adapter(
            made.read_adapter(folder / f"a{i}", name=f"a{i}", digest=f"a{i}", base_digest=BASE)
        )
    return made


def answer(e: Engine, prompt: list[int], adapter: str | None = None, tenant: str = "t") -> Sequence:
    s = e.submit("x", prompt, Sampling(max_tokens=12), adapter=adapter, tenant=tenant)
    while not e.idle:
        e.step()
    return s


COMMON = [5 + i % 280 for i in range(70)]


@pytest.mark.parametrize("adapter", [None, "a0"])
def test_what_is_known_is_not_computed_again(folder: Path, adapter: str | None) -> None:
    with_, without = engine(folder, 1024), engine(folder, 0)
    first = answer(with_, [*COMMON, 8, 9], adapter)
    assert first.cached == 0
    again = answer(with_, [*COMMON, 8, 9], adapter)
    assert again.cached == 64  # whole blocks of 16
    other = answer(with_, [*COMMON, 11, 12, 13], adapter)
    assert other.cached == 64
    assert with_.prefixes.hits == 128
    assert first.output == again.output == answer(without, [*COMMON, 8, 9], adapter).output
    assert other.output == answer(without, [*COMMON, 11, 12, 13], adapter).output


def test_the_last_token_is_always_computed(folder: Path) -> None:
    e = engine(folder, 1024)
    first = answer(e, COMMON[:64])
    again = answer(e, COMMON[:64])
    assert (first.cached, again.cached) == (0, 48)
    assert first.output == again.output


def test_nothing_is_shared_between_tenants_adapters_or_other_beginnings(folder: Path) -> None:
    e = engine(folder, 1024)
    answer(e, COMMON, "a0", "t")
    assert answer(e, COMMON, "a1", "t").cached == 0
    assert answer(e, COMMON, None, "t").cached == 0
    assert answer(e, COMMON, "a0", "u").cached == 0
    assert answer(e, [9, *COMMON[1:]], "a0", "t").cached == 0
    assert answer(e, [*COMMON[:40], 9, *COMMON[41:]], "a0", "t").cached == 32


def test_the_least_recently_used_goes_first(folder: Path) -> None:
    e = engine(folder, 8 * 16)
    a, b, c = ([k] * 70 for k in (5, 6, 7))
    answer(e, a)
    answer(e, b)
    assert len(e.prefixes) == 8
    assert answer(e, a).cached == 64
    answer(e, c)  # in the place of b
    assert answer(e, a).cached == 64
    assert answer(e, b).cached == 0


def test_it_can_be_switched_off(folder: Path) -> None:
    e = engine(folder, 0)
    answer(e, COMMON)
    assert answer(e, COMMON).cached == 0
    assert (len(e.prefixes), e.prefixes.hits, e.prefixes.misses) == (0, 0, 0)
