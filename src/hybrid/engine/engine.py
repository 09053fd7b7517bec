"""The engine: `step()` is schedule → run → sample. Synchronous, one thread, no framework."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid.engine import sampler, scoring
from hybrid.engine.adapters import load_adapter
from hybrid.engine.attention import Attention, Span
from hybrid.engine.constraint import Constraints
from hybrid.engine.fallback import FallbackDecoder, load_decoder
from hybrid.engine.fallback_lora import load_module_adapter
from hybrid.engine.kv_cache import KVCache
from hybrid.engine.lora import Adapter
from hybrid.engine.lora_plan import LoraPlan, Stacks
from hybrid.engine.metrics import Metrics
from hybrid.engine.prefix_cache import PrefixCache
from hybrid.engine.scheduler import Item, Scheduler, Sequence
from hybrid.engine.text import Codec, Stream
from hybrid.errors import ContextTooLong, DeadlineExceeded, HybridError, InvalidRequest
from hybrid.wire import FinishReason, Sampling


@dataclass(frozen=True)
class Event:
    """Something happened to a request: text, its end, or an error."""

    sequence: Sequence
    text: str = ""
    token: int | None = None
    logprob: float = 0.0
    top: sampler.Top = ()
    finish_reason: FinishReason | None = None
    error: HybridError | None = None


@dataclass(frozen=True)
class Request:
    """What `Engine.submit` was given."""

    id: str
    prompt: str | Seq[int]
    sampling: Sampling
    adapter: str | None
    tenant: str
    deadline: float | None
    priority: int
    tag: Any


class Engine:
    """One base, resident, and the adapters loaded beside it.

    Args:
        folder: a base in Hugging Face layout.
        base_digest: its digest in the registry; adapters must be trained on it.
        max_rows: requests decoded together.
        max_queue: requests that may wait.
        kv_tokens: tokens of key/value cache over all requests.
        prefix_tokens: tokens of prompts that are kept for requests that begin alike; 0 keeps none.
        device: `cpu` or `cuda`; by default what is there.
    """

    def __init__(
        self,
        folder: Path,
        base_digest: str,
        *,
        max_rows: int = 32,
        max_queue: int = 256,
        kv_tokens: int = 16384,
        prefix_tokens: int = 16384,
        device: str | None = None,
    ) -> None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
        self.base_digest = base_digest
        self.codec = Codec(folder)
        self.decoder = load_decoder(folder, where, dtype)
        self.context = self.decoder.shape.context
        self.cache = KVCache(self.decoder.shape, kv_tokens, self.context, where, dtype)
        self.prefixes = PrefixCache(self.decoder.shape, self.cache, prefix_tokens)
        self.scheduler = Scheduler(
            self.cache, max_rows=max_rows, max_queue=max_queue, begin=self.prefixes.begin
        )
        self.adapters: dict[str, Adapter] = {}
        self.counters: Counter[str] = Counter()
        self.metrics = Metrics()
        self._stacks = Stacks()
        self.constraints = Constraints(folder, self.codec, self.decoder.shape.vocab)

    # --- requests -----------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: str | Seq[int],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        tenant: str = "default",
        deadline: float | None = None,
        priority: int = 0,
        tag: Any = None,
    ) -> Sequence:
        """Queue a request.

        Args:
            adapter: digest of a loaded adapter; None is the base.
            deadline: UNIX seconds. priority: a higher one begins earlier.
            tag: kept on the sequence for the caller.

        Raises:
            InvalidRequest: an empty prompt, a bad setting, a constraint that cannot be held to.
            ContextTooLong. RateLimited. Unsupported: a constraint, with this base's tokenizer.
        """
        try:
            sequence = self._queue(
                Request(request_id, prompt, sampling, adapter, tenant, deadline, priority, tag)
            )
        except HybridError:
            self.metrics.of(adapter).rejected += 1
            raise
        self.metrics.of(adapter).requests += 1
        self.counters["requests"] += 1
        return sequence

    def _queue(self, request: Request) -> Sequence:
        sampling = request.sampling
        ids = self.prompt_ids(request.prompt)
        _check_sampling(sampling)
        if len(ids) + sampling.max_tokens > self.context:
            raise ContextTooLong(
                f"{len(ids)} prompt tokens and max_tokens={sampling.max_tokens} do not fit the"
                f" context of {self.context} tokens",
                param="prompt" if len(ids) >= self.context else "max_tokens",
            )
        walk = self.constraints.start(sampling.constraint)
        sequence = Sequence(
            id=request.id,
            prompt=ids,
            sampling=sampling,
            adapter=self._adapter(request.adapter),
            tenant=request.tenant,
            deadline=request.deadline,
            stream=Stream(self.codec, sampling.stop),
            draws=sampler.generator(sampling),
            priority=request.priority,
            tag=request.tag,
        )
        self.scheduler.add(sequence)
        self.constraints.hold(sequence, walk)
        if sequence.adapter:
            sequence.adapter.in_use += 1
        return sequence

    def prompt_ids(self, prompt: str | Seq[int]) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest when empty or out of the vocabulary."""
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("prompt is empty", param="prompt")
        wrong = next((t for t in ids if not 0 <= t < self.decoder.shape.vocab), None)
        if wrong is not None:
            raise InvalidRequest(
                f"prompt: token {wrong} is not in the vocabulary of {self.decoder.shape.vocab}",
                param="prompt",
            )
        return ids

    @torch.inference_mode()  # another request's keys and values may move into its row
    def cancel(self, sequence: Sequence) -> None:
        """Take a request out; its slot is free for the next step. Ended ones are left alone."""
        if not sequence.ended:
            self._end(sequence, whole=False)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.scheduler.running or self.scheduler.waiting)

    # --- the step -----------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advance every running request by one token, or by a piece of its prompt."""
        events = self._expire()
        items = self.scheduler.plan()
        if not items:
            return events
        chosen, logits = self._run(items)
        for sequence in chosen:
            if not sequence.output:
                self.prefixes.keep(sequence)
        if chosen:
            how = [(s.sampling, s.draws) for s in chosen]
            masks = self.constraints.masks(chosen)
            drawn = sampler.sample(logits, how, masks)
            for sequence, token, logprob, top in zip(chosen, *drawn, strict=True):
                events.append(self._advance(sequence, token, logprob, top))
        return events

    def _run(self, items: list[Item]) -> tuple[list[Sequence], torch.Tensor]:
        """The sequences for which a token is to be chosen, and their logits [N, vocab]."""
        self.counters["steps"] += 1
        self.counters["run_tokens"] += sum(item.count for item in items)
        if isinstance(self.decoder, FallbackDecoder):
            return self.decoder.run(items)
        counts: Counter[Adapter] = Counter()
        for item in items:
            if item.sequence.adapter is not None:
                counts[item.sequence.adapter] += item.count
        order: dict[Adapter | None, int] = {a: i for i, a in enumerate(self._stacks.order(counts))}
        order[None] = len(order)
        items = sorted(items, key=lambda i: order[i.sequence.adapter])

        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        last: list[int] = []
        for item in items:
            s, start = item.sequence, len(ids)
            ids += s.tokens(s.computed, s.computed + item.count)
            positions += range(s.computed, s.computed + item.count)
            assert s.row is not None
            spans.append(Span(start, len(ids), s.row, s.computed))
            s.computed += item.count
            if item.last:
                last.append(len(ids) - 1)
        device, decoder = self.decoder.device, self.decoder
        plan = LoraPlan.of(self._stacks, [(a, counts[a]) for a in order if a is not None])
        hidden = decoder.forward(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            Attention(self.cache, spans, decoder.shape.windows),
            plan,
        )
        chosen = [item.sequence for item in items if item.last]
        rows = torch.tensor(last, dtype=torch.long, device=device)
        return chosen, decoder.logits(hidden, plan, rows)

    def _advance(self, s: Sequence, token: int, logprob: float, top: sampler.Top) -> Event:
        if s.first_token is None:
            s.first_token = time.monotonic()
            self.metrics.first(s)
        if (error := self.constraints.accept(s, token)) is not None:
            self._end(s, whole=False)
            return Event(s, error=error)
        if token in self.codec.ends:
            self._end(s)
            return Event(s, text=s.stream.finish(), finish_reason="stop")
        s.output.append(token)
        self.scheduler.charge(s)
        self.counters["generated_tokens"] += 1
        text = s.stream.push(token)
        reason: FinishReason | None = None
        if s.stream.stopped:
            reason = "stop"
        elif self.constraints.whole(s):
            text += s.stream.finish()
            reason = "stop"
        elif len(s.output) >= s.sampling.max_tokens:
            text += s.stream.finish()
            reason = "stop" if s.stream.stopped else "length"
        if reason:
            self._end(s)
        return Event(s, text=text, token=token, logprob=logprob, top=top, finish_reason=reason)

    def _end(self, s: Sequence, *, whole: bool = True) -> None:
        s.ended = True
        self.metrics.ended(s, whole=whole)
        self.constraints.drop(s)
        if s.adapter is not None:
            s.adapter.in_use -= 1
        self.scheduler.remove(s)
        if isinstance(self.decoder, FallbackDecoder):
            self.decoder.release(s)

    def _expire(self) -> list[Event]:
        late = self.scheduler.expired(time.time())
        events = [
            Event(s, error=DeadlineExceeded(f"request {s.id}: its deadline has passed"))
            for s in late
        ]
        for s in late:
            self._end(s, whole=False)
        return events

    # --- scoring and embedding ------------------------------------------------------------

    @torch.inference_mode()
    def score(
        self, prompt: str, choices: Seq[str], *, adapter: str | None = None, end: bool = True
    ) -> tuple[list[float], list[int], int]:
        """Log probability of each choice after the prompt.

        Returns:
            (natural-log probabilities, tokens of each choice, tokens of the prompt)

        Raises:
            InvalidRequest: no choices, or an empty one. ContextTooLong.
        """
        ids = self.prompt_ids(prompt)
        tail = [self.codec.end] if end else []
        tokens = tuple(tuple(self.codec.encode_part(c) + tail) for c in choices)
        if not tokens or not all(map(len, tokens)):
            raise InvalidRequest("choices: at least one, none of them empty", param="choices")
        longest = len(ids) + max(map(len, tokens))
        if longest > self.context:
            raise ContextTooLong(
                f"prompt and the longest choice have {longest} tokens; the context is"
                f" {self.context}",
                param="prompt",
            )
        self.counters["scored_choices"] += len(tokens)
        values = scoring.score(self.decoder, self._adapter(adapter), ids, tokens)
        return values, [len(t) for t in tokens], len(ids)

    @torch.inference_mode()
    def embed(self, text: str, *, adapter: str | None = None) -> tuple[list[float], int]:
        """(vector, tokens) of a text. Raises InvalidRequest, ContextTooLong."""
        ids = self.prompt_ids(text)
        if len(ids) > self.context:
            raise ContextTooLong(
                f"input has {len(ids)} tokens; the context is {self.context}", param="input"
            )
        self.counters["embedded_tokens"] += len(ids)
        return scoring.embed(self.decoder, self._adapter(adapter), ids), len(ids)

    # --- adapters -----------------------------------------------------------------------

    def read_adapter(self, folder: Path, *, name: str, digest: str, base_digest: str) -> Adapter:
        """Read and check an adapter; safe beside a running step. Raises AdapterRefused."""
        what = {"name": name, "digest": digest, "base_digest": base_digest}
        if isinstance(self.decoder, FallbackDecoder):
            return load_module_adapter(folder, self.decoder, served_base=self.base_digest, **what)
        return load_adapter(folder, self.decoder, served_base=self.base_digest, **what)

    def add_adapter(self, adapter: Adapter) -> None:
        """Make a read adapter servable."""
        self.adapters[adapter.digest] = adapter
        self.counters["adapter_loads"] += 1

    def drop_adapter(self, digest: str) -> bool:
        """Forget an adapter; False while requests use it."""
        adapter = self.adapters.get(digest)
        if adapter is None:
            return True
        if adapter.in_use:
            return False
        del self.adapters[digest]
        self._stacks.forget(adapter)
        return True

    def _adapter(self, digest: str | None) -> Adapter | None:
        """Never the base for a digest that is not loaded: that would be a bug, and a KeyError."""
        return None if digest is None else self.adapters[digest]


def _check_sampling(s: Sampling) -> None:
    for name, fine, allowed in (
        ("max_tokens", s.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= s.temperature <= 10, "0 to 10"),
        ("top_p", 0 < s.top_p <= 1, "above 0, at most 1"),
        ("top_k", s.top_k >= 0, "0 (off) or more"),
        ("stop", all(s.stop), "no empty strings"),
        ("top_logprobs", 0 <= s.top_logprobs <= 20 * s.logprobs, "0 to 20, above 0 with logprobs"),
    ):
        if not fine:
            raise InvalidRequest(f"{name}={getattr(s, name)!r}: allowed is {allowed}", param=name)
