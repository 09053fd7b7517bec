"""Inputs and results over the store's limit: kept as blobs, whole again wherever they are read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests_support import play

from hybrid.agents.payloads import Payloads
from hybrid.config import AgentConfig
from hybrid.errors import IntegrityError, InvalidRequest
from hybrid.testing import Agents

BIG = "naïve 🦜 " * 100_000


def test_large_inputs_and_results_go_through_children_and_back(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("outer", BIG))
        assert view.state == "done", view.error
        assert view.result == [len(BIG), BIG.upper()]
        assert view.task.input == BIG
        assert (await agents.mailbox.run(view.task.child("upper", "x", key="k"), 10)).result == "X"

    specs = {
        "outer": AgentConfig(behaviour="behaviours.outer"),
        "upper": AgentConfig(behaviour="behaviours.upper"),
    }
    root = str(tmp_path / "registry")
    play(store_url, specs, scene, settings={"registry": {"root": root}})
    kept = list((tmp_path / "registry/payloads").rglob("*/*"))
    assert any(len(p.name) == 64 for p in kept)


def test_the_limit_damage_and_age(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path, keep_s=3600, limit=1000)

    async def scene() -> None:
        ref = await payloads.put("x" * 900, "the input")
        assert await payloads.put("x" * 900, "the input") == ref
        assert await payloads.get(ref) == "x" * 900
        with pytest.raises(InvalidRequest, match="max_payload_mib"):
            await payloads.put("x" * 1001, "the input")
        for bad in ("", "nonsense", "1/../../etc:1", ref.replace("/", "/0")):
            with pytest.raises(IntegrityError):
                await payloads.get(bad)
        blob = tmp_path / ref.partition(":")[0]
        blob.chmod(0o644)
        blob.write_text("y" * 900)
        with pytest.raises(IntegrityError, match="damaged"):
            await payloads.get(ref)
        assert payloads.prune() == 0
        assert payloads.prune(time.time() + 3 * 86400) == 1
        with pytest.raises(IntegrityError, match="gone"):
            await payloads.get(ref)

    asyncio.run(scene())
