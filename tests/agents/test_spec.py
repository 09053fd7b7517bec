"""Agents as data: who owns them, what is refused, how changes are seen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hybrid.agents.spec import AgentSpec, SpecStore
from hybrid.agents.store import connect
from hybrid.config import AgentConfig
from hybrid.errors import ConfigError, Conflict, NotFound, StoreUnavailable


def play(url: str, scene: Callable[[SpecStore], Awaitable[None]]) -> None:
    async def run() -> None:
        client = connect(url)
        try:
            async with asyncio.timeout(30):
                await scene(SpecStore(client))
        finally:
            await client.aclose()

    asyncio.run(run())


def test_file_and_api_own_their_agents(store_url: str) -> None:
    async def scene(specs: SpecStore) -> None:
        await specs.apply_file({"filed": AgentConfig(), "gone": AgentConfig()})
        made = await specs.put("added", AgentConfig(description="by hand"))
        assert made.version == 2
        with pytest.raises(Conflict, match=r"defined in hybrid\.yaml"):
            await specs.put("filed", AgentConfig())
        with pytest.raises(Conflict, match=r"defined in hybrid\.yaml"):
            await specs.delete("filed")
        with pytest.raises(Conflict, match="added differently"):
            await specs.apply_file({"added": AgentConfig()})
        after = await specs.apply_file({"filed": AgentConfig(max_tokens=3)})
        assert list(after) == ["filed"]
        assert list(await specs.list()) == ["added", "filed"], "one left out of the file is gone"
        await specs.delete("added")
        with pytest.raises(NotFound, match="no agent 'fild'; did you mean 'filed'"):
            await specs.get("fild")

    play(store_url, scene)


def test_what_is_named_must_be_there(store_url: str) -> None:
    async def scene(specs: SpecStore) -> None:
        with pytest.raises(ConfigError, match="routes: no agent 'b'"):
            await specs.put("a", AgentConfig(behaviour="route", routes=("b",)))
        await specs.put("b", AgentConfig())
        await specs.put("a", AgentConfig(behaviour="route", routes=("b",)))
        with pytest.raises(Conflict, match="'a' routes to 'b'"):
            await specs.delete("b")

    play(store_url, scene)


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "a\nb", "..", " a", "A" * 300])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        AgentSpec.of(name, {}, "api")


def test_bad_specs_are_refused_by_key() -> None:
    for bad, said in (
        ({"behavior": "answer"}, "behaviour"),
        ({"behaviour": "nope"}, "no 'nope'"),
        ({"behaviour": "json.loads"}, "behaviour"),
        ({"verify": "no.such"}, "verify"),
        ({"template": "no place"}, "template"),
        ({"params": {"extract": "("}}, "extract"),
        ({"params": {"extract": "no group"}}, "one group"),
        ({"timeout_s": -1}, "timeout_s"),
    ):
        with pytest.raises(ConfigError, match=said):
            AgentSpec.of("a", bad, "api")


def test_every_change_is_seen_within_a_second(store_url: str) -> None:
    async def scene(specs: SpecStore) -> None:
        changes = specs.changes()
        assert await anext(changes) == {}
        for name in ("a", "b"):
            await specs.put(name, AgentConfig())
            seen = await asyncio.wait_for(anext(changes), 1)
            assert name in seen
        await changes.aclose()  # type: ignore[attr-defined]

    play(store_url, scene)


def test_a_store_that_is_away_is_said_so() -> None:
    async def scene(specs: SpecStore) -> None:
        with pytest.raises(StoreUnavailable):
            await specs.list()
        with pytest.raises(StoreUnavailable):
            await specs.put("a", AgentConfig())

    play("redis://127.0.0.1:9/0", scene)
