"""Adapters come and go under a real engine: budget, pinning, refusals, new versions of a name."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hybrid import config
from hybrid.errors import AdapterRefused
from hybrid.registry import Registry
from hybrid.serving import adapter_cache
from hybrid.serving.engine_backend import EngineBackend
from hybrid.serving.model import ModelServer
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Chunk, EmbedRequest, GenerateRequest, Sampling, ScoreRequest

_IDS = itertools.count()
NAMES = ("a0", "a1", "a2", "a3")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny_base(root / "base", max_position_embeddings=16384)
    for i, name in enumerate((*NAMES, "new")):
        tiny_adapter(root / "base", root / name, seed=i)
    return root


@pytest.fixture
def registry(made: Path, tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "registry")
    base = registry.publish("base", "base", made / "base").digest
    adapters = {
        name: registry.publish("adapter", name, made / name, base_digest=base).digest
        for name in NAMES
    }
    registry.publish_release("base", base, adapters)
    return registry


def publish(registry: Registry, name: str, folder: Path) -> str:
    """A new version of an adapter, in a new release."""
    base = registry.release("base@stable").base_digest
    digest = registry.publish("adapter", name, folder, base_digest=base).digest
    registry.update_release("base", add={name: digest})
    return digest


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[ModelServer, Any]]:
    """A server and its engine, whose answers are as long as was asked for."""
    project = config.parse(
        {
            "run": {"name": "t"},
            "model": {"name": "base"},
            "registry": {"root": str(tmp_path / "registry")},
            "serving": settings,
        }
    )
    server = ModelServer(project)
    try:
        await server.check_health()  # as Serve does before a replica is ready
        backend = (await server._resident()).backend
        assert isinstance(backend, EngineBackend)
        backend._engine.codec.ends = frozenset()
        yield server, backend._engine
    finally:
        await server.close()


def request(name: str, n: int = 4) -> GenerateRequest:
    sampling = Sampling(max_tokens=n)
    return GenerateRequest(
        id=f"r{next(_IDS)}", model=f"base:{name}", prompt="the fox", sampling=sampling
    )


async def counters(server: ModelServer) -> dict[str, float]:
    found: dict[str, float] = (await server.info())["counters"]
    return found


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def digest_of(registry: Registry, name: str) -> str:
    return registry.release("base@stable").adapters[name]


def test_the_longest_unused_leaves_and_comes_back(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as (server, engine):
            first = await server.generate_full(request("a0"))
            size = (await counters(server))["adapter_bytes"]
            assert size == engine.adapters[digest_of(registry, "a0")].size_bytes > 0
            (await server._resident()).cache._budget = int(2.5 * size)
            await server.generate_full(request("a1"))
            await server.generate_full(request("a0"))  # a1 is now the longest unused
            await server.generate_full(request("a2"))

            async def left() -> bool:
                return set(engine.adapters) == {digest_of(registry, n) for n in ("a0", "a2")}

            await until(left, "a1 left")
            seen = await counters(server)
            assert (seen["adapter_loads"], seen["adapter_evictions"]) == (3, 1)
            assert seen["adapter_bytes"] == 2 * size
            again = await server.generate_full(request("a1"))
            assert again.provenance and again.provenance.adapter == "a1"
            assert (await server.generate_full(request("a0"))).token_ids == first.token_ids
            assert (await counters(server))["adapter_bytes"] <= 2.5 * size

    run(test)


def test_what_is_in_use_stays_whatever_the_budget(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, adapter_cache_mib=0) as (server, engine):
            used = digest_of(registry, "a0")
            stream = server.generate(request("a0", n=16000))
            await anext(stream)
            for name in ("a1", "a2", "a1"):
                await server.generate_full(request(name))
            assert used in engine.adapters
            assert engine.adapters[used].in_use == 1
            await stream.aclose()  # type: ignore[attr-defined]

            async def empty() -> bool:
                return not engine.adapters

            await until(empty, "all left")
            seen = await counters(server)
            assert (seen["adapter_bytes"], seen["adapter_evictions"]) == (0, 4)

    run(test)


def test_adapters_that_come_and_go_all_the_time(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, adapter_cache_mib=0) as (server, engine):
            alone = {n: (await server.generate_full(request(n))).token_ids for n in NAMES}

            async def one(i: int) -> None:
                name = NAMES[i * 7 % len(NAMES)]
                if i % 5 == 0:
                    ask = ScoreRequest(id=str(i), model=f"base:{name}", prompt="x", choices=("y",))
                    await server.score(ask)
                elif i % 5 == 1:
                    await server.embed(EmbedRequest(id=str(i), model=f"base:{name}", inputs=("x",)))
                else:
                    answer = await server.generate_full(request(name, n=4))
                    assert answer.token_ids == alone[name]

            for start in range(0, 60, 6):
                tasks = [asyncio.create_task(one(i)) for i in range(start, start + 6)]
                await asyncio.sleep(0.001 * (start % 4))
                tasks[start % 6].cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                wrong = [r for r in results if isinstance(r, Exception)]
                assert not wrong

            async def empty() -> bool:
                return not engine.adapters and (await counters(server))["adapter_bytes"] == 0

            await until(empty, "all left")

    run(test)


def test_a_refusal_is_remembered_for_a_while(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        weights = registry.by_digest(digest_of(registry, "a0")).path / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(whole[:100])
        async with serving(tmp_path) as (server, engine):
            reads = []
            read = engine.read_adapter
            engine.read_adapter = lambda *a, **k: reads.append(a) or read(*a, **k)
            monkeypatch.setattr(adapter_cache, "REFUSED_S", 1000.0)
            for _ in range(3):
                with pytest.raises(AdapterRefused, match="cannot be read"):
                    await server.generate_full(request("a0"))
            assert len(reads) == 1
            assert (await counters(server))["adapter_refusals"] == 3
            assert (await server.generate_full(request("a1"))).text
            cache = (await server._resident()).cache
            cache._refused = {d: (0.0, why) for d, (_, why) in cache._refused.items()}  # later
            weights.write_bytes(whole)
            assert (await server.generate_full(request("a0"))).text

    run(test)


def test_a_load_goes_on_when_all_who_asked_have_left(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as (server, engine):
            began, go, read = threading.Event(), threading.Event(), engine.read_adapter

            def slow(*args: Any, **options: Any) -> Any:
                began.set()
                assert go.wait(20)
                return read(*args, **options)

            engine.read_adapter = slow
            calls = [asyncio.create_task(server.generate_full(request("a0"))) for _ in range(3)]
            await asyncio.to_thread(began.wait, 20)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            go.set()

            async def loaded() -> bool:
                return (await counters(server))["adapter_loads"] == 1

            await until(loaded, "it is loaded")
            assert (await server.generate_full(request("a0"))).text
            assert (await counters(server))["adapter_loads"] == 1

    run(test)


def test_pinned_adapters_are_there_first_and_stay(
    registry: Registry, made: Path, tmp_path: Path
) -> None:
    async def test() -> None:
        bad = registry.by_digest(digest_of(registry, "a3")).path / "adapter_config.json"
        bad.unlink()
        pinned = {"pinned_adapters": ("a1", "a3", "nobody"), "adapter_cache_mib": 0}
        async with serving(tmp_path, **pinned) as (server, engine):
            kept = digest_of(registry, "a1")
            assert list(engine.adapters) == [kept]
            await server.generate_full(request("a0"))
            await server.generate_full(request("a1"))
            with pytest.raises(AdapterRefused):
                await server.generate_full(request("a3"))
            new = publish(registry, "a1", made / "new")

            async def swapped() -> bool:
                return (await server.info())["adapters"]["a1"] == new

            await until(swapped, "the new release is served")
            assert new in engine.adapters, "the new version is loaded before it is served"

            async def alone() -> bool:
                return list(engine.adapters) == [new]

            await until(alone, "the old version left")

    run(test)


def test_a_new_version_of_a_name_while_the_old_one_answers(
    registry: Registry, made: Path, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as (server, engine):
            old = digest_of(registry, "a0")
            short = await server.generate_full(request("a0"))
            stream = server.generate(request("a0", n=4000))
            chunks: list[Chunk] = [await anext(stream)]
            new = publish(registry, "a0", made / "new")

            async def swapped() -> bool:
                return (await server.info())["adapters"]["a0"] == new

            await until(swapped, "the new release is served")
            answer = await server.generate_full(request("a0"))
            assert answer.provenance and answer.provenance.adapter_digest == new
            assert answer.token_ids != short.token_ids
            chunks += [chunk async for chunk in stream]
            assert chunks[-1].completion_tokens == 4000
            digests = {c.provenance.adapter_digest for c in chunks if c.provenance}
            assert digests == {old}

            async def dropped() -> bool:
                return old not in engine.adapters

            await until(dropped, "the old version left")
            assert (await counters(server))["adapter_evictions"] == 0

    run(test)
