"""Our engine as a Backend: a thread steps it, an event loop talks to it, neither blocks.

Everything that touches the engine runs on its thread, in the order it was asked for; tokens are
handed to the loop that asked. An adapter is read and checked in another thread, so that a load
never stops decoding.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from hybrid.engine.engine import Engine, Event
from hybrid.engine.kernels import alone
from hybrid.engine.lora import Adapter
from hybrid.engine.scheduler import Sequence
from hybrid.errors import HybridError, Unavailable
from hybrid.serving.backend import AdapterRef, BackendInfo
from hybrid.wire import (
    Alternative,
    Chunk,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    Provenance,
    ScoreRequest,
    ScoreResult,
    join,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_STOP_S = 10.0


class _Listener:
    """Where one request's events go: to the loop that asked, those of a step together.

    Args:
        whole: nobody looks at pieces; they are kept back until the end.
    """

    def __init__(self, *, whole: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self._whole = whole
        self._kept: list[Event | HybridError] = []
        self._come: list[Event | HybridError] = []
        self._there = asyncio.Event()

    def keep(self, item: Event | HybridError) -> list[Event | HybridError]:
        """On the engine's thread: what is to be handed over now."""
        self._kept.append(item)
        if self._whole and isinstance(item, Event) and not item.finish_reason:
            return []
        kept, self._kept = self._kept, []
        return kept

    def hand_over(self, items: list[Event | HybridError]) -> None:
        """On the loop."""
        self._come += items
        self._there.set()

    async def next(self) -> list[Event | HybridError]:
        """All that has come since the last time; waits for something."""
        await self._there.wait()
        self._there.clear()
        come, self._come = self._come, []
        return come


class EngineBackend:
    """See `hybrid.serving.backend.Backend`.

    Args:
        engine: the engine, or what makes it; from now on only this backend's thread touches it.
        release: shown in provenance, e.g. `legal-base@stable`.
    """

    def __init__(self, engine: Engine | Callable[[], Engine], *, release: str) -> None:
        self._engine: Engine
        self.release = release
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: set[Sequence] = set()  # ids may come twice: a client's retry
        self._failure: Unavailable | None = None
        self._closing = False
        self._made: Future[None] = Future()
        if isinstance(engine, Engine):
            self._engine = engine
        make = (lambda: engine) if isinstance(engine, Engine) else engine
        self._thread = threading.Thread(target=self._work, args=(make,), name="engine", daemon=True)
        self._thread.start()

    async def made(self) -> None:
        """Wait for the engine. Raises what making it raised."""
        await asyncio.wrap_future(self._made)

    # --- the engine's thread --------------------------------------------------------------

    def _work(self, make: Callable[[], Engine]) -> None:
        try:
            # Here and nowhere else: OpenMP keeps threads for every thread that ever worked in
            # parallel, and lets them sleep between two products once there are more than cores.
            self._engine = engine = make()
        except BaseException as e:  # noqa: BLE001 - whoever waits for the engine gets it
            self._made.set_exception(e)
            return
        self._made.set_result(None)
        torch.set_num_threads(torch.get_num_threads())  # OpenMP's number is each thread's own
        try:
            while not self._closing:
                try:
                    # With nothing to step, wait; otherwise only look whether something came in.
                    self._inbox.get(block=engine.idle, timeout=1.0)()
                    continue
                except queue.Empty:
                    pass
                if not engine.idle:
                    self._deliver(engine.step())
            self._end_all(Unavailable("the model is shutting down", retry_after=1))
        except BaseException as e:
            log.exception("the engine's thread ended")
            self._end_all(Unavailable(f"the engine failed ({type(e).__name__}: {e})"))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if event.finish_reason or event.error:
                self._running.discard(event.sequence)
        self._tell([(event.sequence.tag, event.error or event) for event in events])

    @staticmethod
    def _tell(items: list[tuple[_Listener, Event | HybridError]]) -> None:
        """Wake each loop once, whatever there is for it."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        for listener, item in items:
            if now := listener.keep(item):
                by_loop.setdefault(listener.loop, []).append((listener, now))

        def hand_over(pairs: list[tuple[_Listener, list[Event | HybridError]]]) -> None:
            for listener, now in pairs:
                listener.hand_over(now)

        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(hand_over, pairs)
            except RuntimeError:  # the loop is closed: nobody listens any more
                log.debug("events had no listener")

    def _end_all(self, why: Unavailable) -> None:
        self._failure = why
        self._tell([(sequence.tag, why) for sequence in self._running])
        self._running.clear()
        while not self._inbox.empty():  # each finds `_failure` set and passes it on
            self._inbox.get()()

    def _ask(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` run on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(call())
            except BaseException as e:  # noqa: BLE001 - the asker gets it, whatever it is
                future.set_exception(e)

        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            self._inbox.put(run)
        return future

    async def _on_engine(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._ask(call))

    # --- Backend --------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, adapter: AdapterRef | None
    ) -> AsyncIterator[Chunk]:
        """Stream an answer; closing the iterator cancels it."""
        listener = _Listener(whole=not request.stream)
        digest = adapter.digest if adapter else None
        prompt = request.prompt if request.prompt is not None else request.prompt_ids or ()

        def submit() -> Sequence:
            sequence = self._engine.submit(
                request.id,
                prompt,
                request.sampling,
                adapter=digest,
                tenant=request.tenant,
                deadline=request.deadline,
                priority=request.priority,
                tag=listener,
            )
            self._running.add(sequence)
            return sequence

        asked = request.sampling
        if asked.constraint is not None:  # compiled here, or decoding would stop meanwhile
            await asyncio.to_thread(self._engine.constraints.prepare, asked.constraint)
        try:
            sequence = await self._on_engine(submit)
        except asyncio.CancelledError:  # perhaps after it was submitted
            self._ask(lambda: self._cancel(request.id))
            raise
        provenance = self._provenance(adapter)
        try:
            while True:
                chunks = []
                for event in await listener.next():
                    if isinstance(event, HybridError):
                        raise event
                    chunks.append(self._chunk(event, asked.logprobs, provenance))
                yield join(chunks)
                if chunks[-1].finish_reason:
                    return
        finally:
            if not sequence.ended:
                self._ask(lambda: self._drop([sequence]))

    async def score(self, request: ScoreRequest, adapter: AdapterRef | None) -> ScoreResult:
        """Log probabilities of a closed set."""
        digest = adapter.digest if adapter else None
        values, lengths, n = await self._on_engine(
            lambda: self._engine.score(
                request.prompt, request.choices, adapter=digest, end=request.end
            )
        )
        if request.normalise == "mean":
            values = [v / length for v, length in zip(values, lengths, strict=True)]
        return ScoreResult(
            logprobs=tuple(values),
            best=values.index(max(values)),
            prompt_tokens=n,
            provenance=self._provenance(adapter),
        )

    async def embed(self, request: EmbedRequest, adapter: AdapterRef | None) -> EmbedResult:
        """One vector a text; decoding goes on between two of them."""
        digest = adapter.digest if adapter else None
        vectors, total = [], 0
        for text in request.inputs:
            vector, n = await self._on_engine(
                lambda text=text: self._engine.embed(text, adapter=digest)  # type: ignore[misc]
            )
            vectors.append(tuple(vector))
            total += n
        return EmbedResult(
            vectors=tuple(vectors), prompt_tokens=total, provenance=self._provenance(adapter)
        )

    async def load(self, adapter: AdapterRef) -> int:
        """Read, check and add an adapter; returns its bytes."""
        digest = adapter.digest
        known = await self._on_engine(lambda: self._engine.adapters.get(digest))
        if known is not None:
            return known.size_bytes
        started = time.monotonic()
        read = await asyncio.to_thread(self._read, adapter)
        await self._on_engine(lambda: self._engine.add_adapter(read))
        log.info("loaded adapter %s in %.3f s", adapter.name, time.monotonic() - started)
        return read.size_bytes

    def _read(self, adapter: AdapterRef) -> Adapter:
        alone()
        return self._engine.read_adapter(
            adapter.path,
            name=adapter.name,
            digest=adapter.digest,
            base_digest=adapter.base_digest,
        )

    async def unload(self, digest: str) -> None:
        """Forget an adapter once nothing uses it."""
        while not await self._on_engine(  # noqa: ASYNC110
            lambda: self._engine.drop_adapter(digest)
        ):
            await asyncio.sleep(0.05)  # its last request ends on the engine's thread

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request."""
        return await self._on_engine(lambda: self._cancel(request_id))

    def _cancel(self, request_id: str) -> bool:
        found = [sequence for sequence in self._running if sequence.id == request_id]
        self._drop(found)
        return bool(found)

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        running = self._running.intersection(sequences)
        for sequence in running:
            self._running.discard(sequence)
            self._engine.cancel(sequence)
        self._tell([(s.tag, Event(s, finish_reason="cancelled")) for s in running])

    async def info(self) -> BackendInfo:
        """Facts and counters."""

        def look() -> BackendInfo:
            engine = self._engine
            now = {
                "running": len(engine.scheduler.running),
                "waiting": engine.scheduler.waiting,
                "kv_blocks_used": engine.cache.used,
                "kv_blocks": engine.cache.blocks,
                "prefix_blocks": len(engine.prefixes),
                "prefix_hit_tokens": engine.prefixes.hits,
                "prefix_missed_tokens": engine.prefixes.misses,
                "preemptions": engine.scheduler.preemptions,
                "adapters_loaded": len(engine.adapters),
            }
            return BackendInfo(
                kind="engine",
                base_digest=engine.base_digest,
                context=engine.context,
                counters={**engine.counters, **now},
                details={"adapters": sorted(engine.adapters), "served": engine.metrics.as_dict()},
            )

        return await self._on_engine(look)

    def check(self) -> None:
        """Raises Unavailable when the engine's thread has ended."""
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Stop the thread; running requests end as Unavailable."""
        self._closing = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join, _STOP_S)

    def _chunk(self, event: Event, logprobs: bool, provenance: Provenance) -> Chunk:
        token = event.token
        return Chunk(
            text=event.text,
            token_ids=() if token is None else (token,),
            **(self._probabilities(event) if token is not None and logprobs else {}),
            finish_reason=event.finish_reason,
            prompt_tokens=len(event.sequence.prompt),
            completion_tokens=len(event.sequence.output),
            provenance=provenance,
        )

    def _probabilities(self, event: Event) -> dict[str, Any]:
        """The fields of a Chunk that say how likely its token and others were."""
        assert event.token is not None
        piece = self._engine.codec.piece
        others = tuple(Alternative(token, piece(token), p) for token, p in event.top)
        return {
            "logprobs": (event.logprob,),
            "pieces": (piece(event.token),),
            "top_logprobs": (others,),
        }

    def _provenance(self, adapter: AdapterRef | None) -> Provenance:
        return Provenance(
            release=self.release,
            base_digest=self._engine.base_digest,
            adapter=adapter.name if adapter else None,
            adapter_digest=adapter.digest if adapter else None,
        )
