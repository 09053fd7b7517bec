"""Agents as data: who owns them, what is refused, how changes are seen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from hybrid.agents.spec import AgentSpec, SpecStore
from hybrid.agents.store import EmbeddedStore, connect
from hybrid.config import AgentConfig
from hybrid.errors import ConfigError, Conflict, HybridError, NotFound, StoreUnavailable


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


def test_of_two_writers_at_once_the_later_is_judged_by_what_the_earlier_wrote(
    store_url: str,
) -> None:
    async def scene(specs: SpecStore) -> None:
        async def refused(*writers: Awaitable[object]) -> list[type[HybridError] | None]:
            met = await asyncio.gather(*writers, return_exceptions=True)
            assert all(isinstance(m, HybridError) for m in met if isinstance(m, BaseException))
            return [type(m) if isinstance(m, HybridError) else None for m in met]

        both = await refused(
            specs.put("a", AgentConfig(description="the API's")),
            specs.apply_file({"a": AgentConfig(description="the file's")}),
        )
        assert sorted(both, key=str) == [Conflict, None], "one of them owns it"
        await specs.put("b", AgentConfig())
        both = await refused(
            specs.put("c", AgentConfig(behaviour="route", routes=("b",))), specs.delete("b")
        )
        assert sum(kind is None for kind in both) == 1, "no route leads nowhere"
        names = [f"n{i}" for i in range(20)]
        made = await asyncio.gather(*(specs.put(name, AgentConfig()) for name in names))
        assert len({spec.version for spec in made}) == 20
        assert {*names} <= {*(await specs.list())}

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


def test_values_without_a_json_form_are_refused_by_key() -> None:
    deep: list[object] = []
    for _ in range(1000):
        deep = [deep]
    for bad, said in (
        ({"params": {"x": object()}}, "params: it has no JSON form"),
        ({"params": {"x": deep}}, "params: it has no JSON form"),
        ({"params": {"x": "\ud800"}}, "params: it has no JSON form"),
        ({"template": "{input}\ud800"}, "template: it has no JSON form"),
        ({"timeout_s": float("inf")}, "timeout_s: inf: Input should be a finite number"),
        ({"threshold": float("nan")}, "threshold: nan: Input should be a finite number"),
    ):
        with pytest.raises(ConfigError, match=said):
            AgentSpec.of("a", bad, "api")


def test_a_file_applied_again_changes_nothing(store_url: str) -> None:
    params = yaml.safe_load("{day: 2020-01-31, at: 2020-01-31T12:00:00Z, most: .inf, odd: .nan}")
    given = AgentConfig(params={**params, "pair": (1, 2), "by_number": {1: "x"}, "set": {1}})

    async def scene(specs: SpecStore) -> None:
        first = (await specs.apply_file({"a": given}))["a"]
        assert (await specs.apply_file({"a": given}))["a"] == first
        assert first.params["day"] == "2020-01-31"
        assert first.params["pair"] == [1, 2]
        made = await specs.put("b", given)
        assert made == await specs.get("b"), "what is answered is what is stored"
        await specs.apply_file({"a": given, "b": given})
        assert (await specs.get("b")).owner == "file", "the API's is the same"

    play(store_url, scene)


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
        with pytest.raises(StoreUnavailable):
            await anext(specs.changes())

    play("redis://127.0.0.1:9/0", scene)


def test_a_store_that_goes_away_while_it_is_watched_is_said_so(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path) as store:

        async def scene(specs: SpecStore) -> None:
            changes = specs.changes()
            assert await anext(changes) == {}
            store.kill()
            with pytest.raises(StoreUnavailable):
                await anext(changes)

        play(store.url, scene)
