"""ModelServer over a real registry and engine: releases, adapters, cancellation, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hybrid import config
from hybrid.agents.store import EmbeddedStore
from hybrid.agents.task import Task
from hybrid.config import AgentConfig, ProjectConfig
from hybrid.errors import (
    AdapterRefused,
    ContextTooLong,
    HybridError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from hybrid.registry import Registry
from hybrid.serving.engine_backend import EngineBackend
from hybrid.serving.model import ModelServer
from hybrid.testing import run_agents
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Chunk, EmbedRequest, GenerateRequest, Sampling, ScoreRequest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny_base(root / "one", seed=1, max_position_embeddings=16384)
    tiny_base(root / "two", seed=2)
    for i in range(2):
        tiny_adapter(root / "one", root / f"a{i}", seed=i)
    tiny_adapter(root / "two", root / "b0", seed=5)
    return root


@pytest.fixture
def registry(made: Path, tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "registry")
    base = registry.publish("base", "base", made / "one").digest
    a0 = registry.publish("adapter", "a0", made / "a0", base_digest=base).digest
    registry.publish_release("base", base, {"a0": a0})
    return registry


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[ModelServer]:
    project: ProjectConfig = config.parse(
        {
            "run": {"name": "t"},
            "model": {"name": "base"},
            "registry": {"root": str(tmp_path / "registry")},
        }
    )
    server = ModelServer(project)
    try:
        yield server
    finally:
        await server.close()


def request(
    model: str, prompt: str | None = "the fox", n: int = 6, **how: object
) -> GenerateRequest:
    sampling = Sampling(max_tokens=n, **how)  # type: ignore[arg-type]
    return GenerateRequest(id=f"r{id(object())}", model=model, prompt=prompt, sampling=sampling)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)
    assert await condition(), what


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_answers_carry_the_digests_that_produced_them(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            plain = await server.generate_full(request("base"))
            special = await server.generate_full(request("base:a0"))
            assert plain.provenance and special.provenance
            release = registry.release("base@stable")
            assert plain.provenance.adapter_digest is None
            assert special.provenance.adapter_digest == release.adapters["a0"]
            assert special.provenance.base_digest == release.base_digest
            assert special.text != plain.text
            pieces = [c.text async for c in server.generate(request("base"))]
            assert "".join(pieces) == plain.text
            score = await server.score(
                ScoreRequest(id="s", model="base:a0", prompt="the", choices=("fox", "dog"))
            )
            assert score.provenance.adapter == "a0"
            embedded = await server.embed(EmbedRequest(id="e", model="base", inputs=("x", "y")))
            assert len(embedded.vectors) == 2

    run(test)


def test_unknown_models_are_404_and_never_the_base(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            for name in ("base:a9", "other", "base:", "a0", ""):
                with pytest.raises(ModelNotFound, match="base:a0"):
                    await server.generate_full(request(name))
            with pytest.raises(InvalidRequest):
                await server.generate_full(request("base", ""))
            with pytest.raises(InvalidRequest):
                await server.generate_full(request("base", None))
            with pytest.raises(ContextTooLong):
                await server.generate_full(request("base", n=16384))

    run(test)


def test_a_new_adapter_is_served_and_nothing_else_changes(
    registry: Registry, made: Path, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            before = await server.generate_full(request("base:a0", logprobs=True))
            info = await server.info()
            base = registry.release("base@stable").base_digest
            a1 = registry.publish("adapter", "a1", made / "a1", base_digest=base).digest
            registry.update_release("base", add={"a1": a1})

            async def there() -> bool:
                return "base:a1" in [card.id for card in await server.models()]

            await until(there, "the new adapter is listed")
            newest = await server.generate_full(request("base:a1"))
            assert newest.text != before.text
            assert newest.provenance
            assert newest.provenance.release == "base@stable#2"
            after = await server.generate_full(request("base:a0", logprobs=True))
            assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
            assert (await server.info())["pid"] == info["pid"]

    run(test)


def test_a_new_base_takes_over_while_the_old_one_finishes(
    registry: Registry, made: Path, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            old = registry.release("base@stable").base_digest
            backend = (await server._resident()).backend
            assert isinstance(backend, EngineBackend)
            backend._engine.codec.ends = frozenset()
            stream = server.generate(request("base", n=4000))
            first = await anext(stream)
            assert first.provenance and first.provenance.base_digest == old
            new = registry.publish("base", "base", made / "two").digest
            b0 = registry.publish("adapter", "a0", made / "b0", base_digest=new).digest
            registry.publish_release("base", new, {"a0": b0})

            async def switched() -> bool:
                return bool((await server.info())["base_digest"] == new)

            await until(switched, "traffic moves to the new base")
            rest = [chunk async for chunk in stream]
            assert rest[-1].finish_reason
            assert rest[-1].provenance and rest[-1].provenance.base_digest == old
            answer = await server.generate_full(request("base:a0"))
            assert answer.provenance and answer.provenance.adapter_digest == b0

    run(test)


def test_leaving_a_stream_frees_its_row(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            backend = (await server._resident()).backend
            assert isinstance(backend, EngineBackend)
            backend._engine.codec.ends = frozenset()  # so that the answers are long
            stream = server.generate(request("base:a0", n=16000))
            await anext(stream)
            assert (await server.info())["counters"]["running"] == 1
            await stream.aclose()  # type: ignore[attr-defined]

            async def free() -> bool:
                return (await server.info())["counters"]["running"] == 0

            await until(free, "the row is free")
            other = request("base", n=16000)
            task = asyncio.create_task(server.generate_full(other))

            async def runs() -> bool:
                return (await server.info())["counters"]["running"] == 1

            await until(runs, "it runs")
            assert await server.cancel(other.id)
            assert (await task).finish_reason == "cancelled"
            assert not await server.cancel("nobody")

            # A client's retry may bring an id that still runs: leaving one leaves the other be.
            twins = [server.generate(other), server.generate(other)]
            for twin in twins:
                await anext(twin)
            await twins[0].aclose()  # type: ignore[attr-defined]
            await until(runs, "one is left")
            assert (await anext(twins[1])).text is not None
            assert await server.cancel(other.id)
            await until(free, "and it can be cancelled")
            await twins[1].aclose()  # type: ignore[attr-defined]

    run(test)


def test_cancelling_a_root_stops_the_generation_of_its_child(tmp_path: Path) -> None:
    tiny_base(tmp_path / "long", max_position_embeddings=16384)
    registry = Registry(tmp_path / "registry")
    base = registry.publish("base", "base", tmp_path / "long").digest
    registry.publish_release("base", base, {})

    async def test(store_url: str) -> None:
        async with serving(tmp_path) as server:

            async def running() -> int:
                return int((await server.info())["counters"]["running"])

            class Client:
                async def generate(self, request: GenerateRequest) -> Chunk:
                    return await server.generate_full(request)

            specs = {
                "boss": AgentConfig(behaviour="behaviours.asker"),
                "echo": AgentConfig(template="{input}", max_tokens=16000, timeout_s=300),
            }
            async with run_agents(specs, Client(), store_url) as agents:
                root = await agents.mailbox.submit(Task(agent="boss", input="the fox"))

                async def runs() -> bool:
                    return await running() == 1

                await until(runs, "the child's generation runs")
                cancelled = time.monotonic()
                view = await agents.mailbox.cancel(root)
                assert view.state == "cancelled"

                async def free() -> bool:
                    return await running() == 0

                await until(free, "the row is free")
                assert time.monotonic() - cancelled < 10  # a second, on a machine that is not busy
                assert (await server.info())["counters"]["generated_tokens"] < 16000

    with EmbeddedStore(tmp_path / "store") as store:
        asyncio.run(test(store.url))


def test_a_damaged_adapter_is_refused_for_everyone(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        digest = registry.release("base@stable").adapters["a0"]
        weights = registry.by_digest(digest).path / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(whole[:100])
        async with serving(tmp_path) as server:
            calls = [server.generate_full(request("base:a0")) for _ in range(4)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(r, AdapterRefused) for r in results), results
            assert (await server.generate_full(request("base"))).text

    run(test)


def test_many_first_requests_load_an_adapter_once(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            await server.models()
            calls = [
                asyncio.create_task(server.generate_full(request("base:a0"))) for _ in range(8)
            ]
            await asyncio.sleep(0)
            calls[0].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError)
            assert len({r.text for r in results[1:]}) == 1  # type: ignore[union-attr]
            assert (await server.info())["counters"]["adapter_loads"] == 1

    run(test)


def test_a_failing_engine_fails_its_requests_by_name(registry: Registry, tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            await server.generate_full(request("base"))
            assert server._current is not None
            backend = server._current.backend
            assert isinstance(backend, EngineBackend)

            def broken() -> list[object]:
                raise RuntimeError("out of memory")

            backend._engine.step = broken  # type: ignore[assignment]
            with pytest.raises(Unavailable, match="out of memory"):
                await server.generate_full(request("base"))
            with pytest.raises(HybridError):
                await server.check_health()
            with pytest.raises(Unavailable):
                await server.generate_full(request("base"))

    run(test)
