"""What each adapter's requests had and cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.engine.engine import Engine
from hybrid.errors import ContextTooLong
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

BASE = "b" * 64


def test_they_are_counted_by_adapter(tmp_path: Path) -> None:
    tiny_base(tmp_path / "base")
    tiny_adapter(tmp_path / "base", tmp_path / "a")
    engine = Engine(tmp_path / "base", BASE, max_rows=2, device="cpu")
    engine.codec.ends = frozenset()
    engine.add_adapter(
        engine.read_adapter(tmp_path / "a", name="a", digest="a" * 64, base_digest=BASE)
    )
    adapter = "a" * 64
    for _ in range(2):
        engine.submit("x", [7] * 40, Sampling(max_tokens=5), adapter=adapter)
        while not engine.idle:
            engine.step()
    cut = engine.submit("y", [8] * 10, Sampling(max_tokens=50))
    engine.step()
    engine.step()
    engine.cancel(cut)
    with pytest.raises(ContextTooLong):
        engine.submit("z", [7], Sampling(max_tokens=1000), adapter=adapter)
    served = engine.metrics.as_dict()
    of_adapter, of_base = served[adapter], served[""]
    counted = {k: v for k, v in of_adapter.items() if not k.endswith("_s")}
    assert counted == {
        "requests": 2, "answered": 2, "rejected": 1, "cancelled": 0, "preempted": 0,
        "prompt_tokens": 48, "cached_tokens": 32, "output_tokens": 10,
    }  # fmt: skip
    assert 0 <= of_adapter["queue_s"] <= of_adapter["first_token_s"]
    assert of_adapter["decode_s"] > 0
    assert (of_base["cancelled"], of_base["output_tokens"], of_base["requests"]) == (1, 2, 1)
