"""Texts by meaning: vectors through an embedding adapter, search among texts, and routing by both.

    embed = Embedder(HttpModelClient("http://127.0.0.1:8000"), "legal-base:court-name")
    best = await SemanticIndex(names).search("Sup. Ct. of Ohio", embed, k=5)

An adapter of kind `embed` makes the vectors (`hybrid specialise`); nothing here needs torch.
"""

from __future__ import annotations

import asyncio
import heapq
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, Protocol, TypeVar

from hybrid.agents.router import Decision, Router
from hybrid.errors import InvalidRequest
from hybrid.wire import EmbedRequest, EmbedResult

if TYPE_CHECKING:
    from hybrid.agents.spec import AgentSpec

T = TypeVar("T")
Meaning = tuple[float, ...]
"""A vector of unit length."""
_BATCH = 64
_KEPT = 16
"""Sets of agents or documents whose vectors a process keeps."""


@dataclass(frozen=True)
class Vectors:
    """`vectors[i]` belongs to the i-th text; `digest` names the weights that made them."""

    vectors: tuple[Meaning, ...]
    digest: str


class Embeds(Protocol):
    """What makes vectors: any model client (`agents.clients`)."""

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors."""
        ...


class Embedder:
    """Vectors of texts from a served model.

    Args:
        client: how the model is reached.
        model: as clients write it, `base:adapter`.
        template: what the adapter was trained with (`adapters.NAME.template`).
        tenant: who asks.
    """

    def __init__(
        self,
        client: Embeds,
        model: str,
        *,
        template: str = "{input}",
        tenant: str = "default",
    ) -> None:
        self.client, self.model, self.template, self.tenant = client, model, template, tenant

    async def __call__(self, texts: Sequence[str]) -> Vectors:
        """One vector a text, in calls of 64.

        Raises:
            InvalidRequest: a text is empty, or the adapter is not of kind embed.
            ModelNotFound: the adapter is not in the served release.
        """
        if not all(text.strip() for text in texts):
            raise InvalidRequest("an empty text has no vector", param="input")
        while True:
            found: list[Meaning] = []
            digests: set[str] = set()
            for start in range(0, len(texts), _BATCH):
                result = await self.client.embed(
                    EmbedRequest(
                        id=f"emb-{uuid.uuid4().hex}",
                        model=self.model,
                        inputs=tuple(
                            self.template.replace("{input}", text)
                            for text in texts[start : start + _BATCH]
                        ),
                        tenant=self.tenant,
                    )
                )
                found += result.vectors
                made_by = result.provenance
                digests.add(made_by.adapter_digest or made_by.base_digest)
            if len(digests) <= 1:  # else another release came between: not comparable
                return Vectors(tuple(found), next(iter(digests), ""))


@dataclass(frozen=True)
class Hit:
    """A text that was found: its place among the index's texts, and the cosine."""

    text: str
    place: int
    score: float


class SemanticIndex:
    """A list of texts, to be searched by meaning; exact, for up to some ten thousand texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._made = Vectors((), "")

    async def search(self, query: str, embed: Embedder, *, k: int = 5) -> list[Hit]:
        """The k nearest texts, the nearest first; of equal ones the first in the list.

        The texts are embedded at the first search, and again when the served adapter was replaced.

        Raises:
            InvalidRequest, ModelNotFound: see `Embedder`.
        """
        asked = await embed([query])
        made = self._made
        while asked.digest != made.digest and self._texts:
            made = await embed(self._texts)
            asked = await embed([query])
        self._made = made

        def nearest() -> list[tuple[float, int]]:
            scored = (
                (sum(map(mul, asked.vectors[0], vector)), -place)
                for place, vector in enumerate(made.vectors)
            )
            return heapq.nlargest(k, scored)

        # A host's event loop is not held up by ten thousand products.
        found = await asyncio.to_thread(nearest)
        return [Hit(self._texts[-place], -place, score) for score, place in found]


class SemanticRouter:
    """`Router` with an embedder: agents are near by words, by meaning, or by both."""

    def __init__(self, specs: Sequence[AgentSpec]) -> None:
        self._specs = list(specs)
        self._texts = sorted({t for s in specs for t in (*s.examples, s.description) if t.strip()})
        self._router: Router | None = None
        self._digest = ""

    async def route(self, text: str, embed: Embedder, *, threshold: float = 0.35) -> Decision:
        """See `Router.route`. The agents are embedded when they are first asked for, and again
        when the served adapter was replaced.

        Raises:
            InvalidRequest, ModelNotFound: see `Embedder`.
        """
        if not text.strip() or not self._texts:
            return Router(self._specs).route(text, threshold=threshold)
        asked = await embed([text])
        router, digest = self._router, self._digest
        while router is None or asked.digest != digest:
            made = await embed(self._texts)
            meanings = dict(zip(self._texts, made.vectors, strict=True))
            router = await asyncio.to_thread(Router, self._specs, meanings=meanings)
            digest = made.digest
            asked = await embed([text])
        self._router, self._digest = router, digest
        return router.route(text, threshold=threshold, meaning=asked.vectors[0])


_routers: OrderedDict[object, SemanticRouter] = OrderedDict()
_indexes: OrderedDict[object, SemanticIndex] = OrderedDict()


def router_of(specs: Sequence[AgentSpec], embed: Embedder) -> SemanticRouter:
    """A router for these agents; kept, so that examples are embedded once and not once a task."""
    key = tuple((s.name, s.description, s.examples) for s in specs)
    return _kept(_routers, (embed.model, embed.template, key), lambda: SemanticRouter(specs))


def index_of(texts: Sequence[str], embed: Embedder) -> SemanticIndex:
    """An index of these texts; kept, so that they are embedded once and not once a task."""
    key = (embed.model, embed.template, tuple(texts))
    return _kept(_indexes, key, lambda: SemanticIndex(texts))


def _kept(cache: OrderedDict[object, T], key: object, make: Callable[[], T]) -> T:
    if key not in cache:
        cache[key] = make()
    cache.move_to_end(key)
    while len(cache) > _KEPT:
        cache.popitem(last=False)
    return cache[key]
