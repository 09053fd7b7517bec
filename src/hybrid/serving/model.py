"""The model deployment: one resident base behind Ray Serve, adapters loaded when asked for.

The served release is looked up every second. One more adapter is a new catalog and nothing else:
no process restarts, no other weight is touched. A new base is loaded beside the old one; traffic
moves when it is ready, and the old one closes when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hybrid.config import ProjectConfig
from hybrid.errors import HybridError, InvalidRequest
from hybrid.pools import GPU
from hybrid.registry import Registry
from hybrid.serving.adapter_cache import AdapterCache
from hybrid.serving.adapters import Catalog
from hybrid.serving.backend import AdapterRef, Backend
from hybrid.serving.prometheus import PERIOD_S, Exporter
from hybrid.wire import (
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    ModelCard,
    ScoreRequest,
    ScoreResult,
    join,
)

log = logging.getLogger("hybrid.serving")
POLL_S = 0.5
DEPLOYMENT = "model"


@dataclass(eq=False)
class _Resident:
    """A loaded base, what is served of it, and how many requests it answers now."""

    backend: Backend
    catalog: Catalog
    cache: AdapterCache
    requests: int = 0

    async def close(self) -> None:
        """Stop the backend once adapters on their way are there."""
        await self.cache.close()
        await self.backend.close()


class ModelServer:
    """What runs in a replica; usable without Ray Serve.

    Args:
        config: the project; `serving`, `registry` and `model.name` are read.
        exporter: where counters are reported; None: nowhere but in `info`.
    """

    def __init__(self, config: ProjectConfig, exporter: Exporter | None = None) -> None:
        self._config = config
        self._exporter, self._reported = exporter, 0.0
        self._registry = Registry(config.registry.root, cache=config.registry.cache)
        self._current: _Resident | None = None
        self._starting = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    # --- calls ------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream an answer; closing the iterator cancels it."""
        if (request.prompt is None) == (request.prompt_ids is None):
            raise InvalidRequest("give either prompt or prompt_ids", param="prompt")
        async with self._serving(request.model) as (backend, adapter):
            stream = backend.generate(request, adapter)
            async with aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    yield chunk

    async def generate_full(self, request: GenerateRequest) -> Chunk:
        """The whole answer as one chunk; cancelled with its caller."""
        parts: list[Chunk] = []
        whole = replace(request, stream=False)
        async with aclosing(self.generate(whole)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                parts.append(chunk)
        return join(parts)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score a closed set."""
        async with self._serving(request.model) as (backend, adapter):
            return await backend.score(request, adapter)

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Embed texts.

        Raises:
            InvalidRequest: the adapter was trained for answers, so that its vectors mean little.
        """
        async with self._serving(request.model) as (backend, adapter):
            kind = adapter.kind() if adapter else None
            if adapter and kind not in (None, "embed"):
                raise InvalidRequest(
                    f"adapter {adapter.name!r} is of kind {kind} and makes no vectors: ask one of"
                    " kind embed, or the base",
                    param="model",
                )
            return await backend.embed(request, adapter)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request."""
        return await (await self._resident()).backend.cancel(request_id)

    async def models(self) -> list[ModelCard]:
        """The base and the adapters of the served release."""
        return (await self._resident()).catalog.cards()

    async def info(self) -> dict[str, Any]:
        """Process, release, digests, counters."""
        resident = await self._resident()
        info = await resident.backend.info()
        return {
            "pid": os.getpid(),
            "release": resident.catalog.label,
            "base_digest": info.base_digest,
            "adapters": dict(resident.catalog.release.adapters),
            "kind": info.kind,
            "counters": {**info.counters, **resident.cache.counters},
            "details": info.details,
        }

    async def check_health(self) -> None:
        """Called by Serve; raises when the model cannot answer."""
        check = getattr((await self._resident()).backend, "check", None)
        if check is not None:
            check()

    async def close(self) -> None:
        """Stop watching and close what is resident."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._current is not None:
            await self._current.close()
            self._current = None

    # --- the release ------------------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self, model: str) -> AsyncIterator[tuple[Backend, AdapterRef | None]]:
        """The backend for a request, its adapter loaded; both kept until it is over."""
        resident = await self._resident()
        resident.requests += 1
        try:
            adapter = None
            if model != resident.catalog.name:
                adapter = await asyncio.to_thread(resident.catalog.resolve, model, self._registry)
            if adapter is None:
                yield resident.backend, None
                return
            async with resident.cache.hold(adapter):
                yield resident.backend, adapter
        finally:
            resident.requests -= 1

    async def _resident(self) -> _Resident:
        if self._current is None:
            async with self._starting:
                if self._current is None:
                    catalog = await asyncio.to_thread(self._read)
                    self._current = await self._load(catalog)
                    self._watcher = asyncio.create_task(self._watch(), name="release-watcher")
        return self._current

    def _read(self) -> Catalog:
        return Catalog.read(self._registry, self._config.model.name, self._config.serving.alias)

    async def _load(self, catalog: Catalog) -> _Resident:
        """A base beside what is served now, its pinned adapters loaded."""
        backend = await self._start(catalog)
        cache = AdapterCache(backend, self._config.serving.adapter_cache_mib * 2**20)
        resident = _Resident(backend, catalog, cache)
        await self._warm(resident, catalog)
        return resident

    async def _warm(self, resident: _Resident, catalog: Catalog) -> None:
        """Serve a catalog of the resident base, once what is pinned of it is loaded.

        A pinned adapter that is refused is logged, and is refused again when it is asked for: it
        holds up neither the others nor the base.
        """
        digests = {name: manifest.digest for name, manifest in catalog.adapters.items()}
        names = self._config.serving.pinned_adapters
        pinned = [digests[name] for name in names if name in digests]
        before = [manifest.digest for manifest in resident.catalog.adapters.values()]
        resident.cache.serve([*before, *digests.values()], pinned)
        for name in names:
            try:
                model = catalog.model_of(name)
                adapter = await asyncio.to_thread(catalog.resolve, model, self._registry)
                assert adapter is not None
                async with resident.cache.hold(adapter):
                    pass
            except HybridError as e:
                log.error("pinned adapter %s is not loaded: %s", name, e.message)
        resident.catalog, resident.backend.release = catalog, catalog.label
        resident.cache.serve(digests.values(), pinned)

    async def _start(self, catalog: Catalog) -> Backend:
        serving = self._config.serving
        path = (await asyncio.to_thread(self._registry.by_digest, catalog.base.digest)).path
        if serving.backend == "vllm":
            from hybrid.serving.vllm_backend import VLLMBackend

            made: Backend = VLLMBackend(path, catalog.base.digest, release=catalog.label)
            return made

        def start() -> Any:
            import torch

            from hybrid.engine.engine import Engine

            if not torch.cuda.is_available():
                torch.set_num_threads(serving.threads)
            return Engine(
                path,
                catalog.base.digest,
                max_rows=serving.max_rows,
                max_queue=serving.max_queue,
                kv_tokens=serving.kv_tokens,
                prefix_tokens=serving.prefix_tokens,
            )

        from hybrid.serving.engine_backend import EngineBackend

        backend = EngineBackend(start, release=catalog.label)
        await backend.made()
        return backend

    async def _watch(self) -> None:
        """Follow the alias. What cannot be read or loaded leaves the old release serving."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._refresh()
                await self._report()
            except HybridError as e:
                log.error("the new release is not served: %s", e.message)

    async def _report(self) -> None:
        if self._exporter is None or time.monotonic() - self._reported < PERIOD_S:
            return
        self._reported = time.monotonic()
        info = await self.info()
        names = {digest: name for name, digest in info["adapters"].items()}
        self._exporter.report(info["counters"], info["details"].get("served", {}), names)

    async def _refresh(self) -> None:
        assert self._current is not None
        old = self._current
        release = await asyncio.to_thread(
            self._registry.release, f"{old.catalog.name}@{old.catalog.alias}"
        )
        if release.version == old.catalog.release.version:
            return
        catalog = await asyncio.to_thread(self._read)
        log.info("release %s: %d adapters", catalog.label, len(catalog.adapters))
        if catalog.base.digest == old.catalog.base.digest:
            await self._warm(old, catalog)
            return
        self._current = await self._load(catalog)
        task = asyncio.create_task(_close_when_idle(old))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close_when_idle(resident: _Resident) -> None:
    while resident.requests:  # noqa: ASYNC110 - counted in many places, waited for in one
        await asyncio.sleep(0.05)
    with suppress(HybridError):
        await resident.close()


def deployment(config: ProjectConfig) -> Any:
    """The bound Serve deployment, on the gpu pool."""
    from ray import serve

    serving = config.serving
    options: dict[str, Any] = {
        "num_cpus": serving.cpus,
        "resources": {GPU.resource: 1},
        "label_selector": GPU.label_selector,
    }
    if serving.gpus:
        options["num_gpus"] = serving.gpus
    return serve.deployment(
        name=DEPLOYMENT,
        num_replicas=serving.replicas,
        max_ongoing_requests=1000,
        ray_actor_options=options,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
        logging_config={"enable_access_log": False},
    )(ModelServer).bind(config, Exporter(config.model.name))
