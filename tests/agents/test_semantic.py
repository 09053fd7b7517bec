"""Routing and searching by meaning: a trained embedding adapter behind the real model server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from lora_support import spec, trained, write_rows
from tests_support import play

from hybrid import config
from hybrid.agents.router import Router
from hybrid.agents.semantic import Embedder, SemanticIndex, SemanticRouter
from hybrid.agents.spec import AgentSpec
from hybrid.config import AgentConfig
from hybrid.errors import ConfigError, HybridError, InvalidRequest, ModelNotFound
from hybrid.registry import Registry
from hybrid.serving.model import ModelServer
from hybrid.testing import Agents, ScriptedModelClient
from hybrid.testing_models import tiny_adapter, tiny_base

MEANT = {"fox": "red", "dog": "bark", "ABC": "letters", "def": "more", "123": "count", "é": "e"}
WAYS = ("the quick {}", "een {}", "over {}!", "{} jumps", "lazy {}; {}", "{} 3")
TEMPLATE = "{input} is\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> config.ProjectConfig:
    """A release with an embedding adapter `meaning`, and `answers`, which is for choices."""
    root = tmp_path_factory.mktemp("semantic")
    base = tiny_base(root / "base", initializer_range=0.15)
    write_rows(root / "train.jsonl", [(w.format(k, k), m) for k, m in MEANT.items() for w in WAYS])
    write_rows(root / "holdout.jsonl", [("fox", "red")])
    embeds = spec(root, {"steps": 40, "batch": 36, "lr": 0.01}, kind="embed")
    trained(base, embeds, root / "run/meaning")
    tiny_adapter(base, root / "answers", seed=1)
    (root / "answers/hybrid.json").write_text(json.dumps({"kind": "choice"}))
    registry = Registry(root / "registry")
    digest = registry.publish("base", "base", base).digest
    registry.publish_release("base", digest, {
        name: registry.publish("adapter", name, folder, base_digest=digest).digest
        for name, folder in (("meaning", root / "run/meaning"), ("answers", root / "answers"))
    })  # fmt: skip
    return config.parse(
        {
            "run": {"name": "t"},
            "model": {"name": "base"},
            "registry": {"root": str(root / "registry")},
        }
    )


def serving(project: config.ProjectConfig, test: Callable[[ModelServer], Awaitable[None]]) -> None:
    async def run() -> None:
        server = ModelServer(project)
        try:
            await test(server)
        finally:
            await server.close()

    asyncio.run(run())


def agent(name: str, *examples: str) -> AgentSpec:
    return AgentSpec.of(name, {"examples": examples}, "api")


def test_what_means_the_same_is_found_and_routed_without_a_word_in_common(
    project: config.ProjectConfig,
) -> None:
    async def test(server: ModelServer) -> None:
        embed = Embedder(server, "base:meaning", template=TEMPLATE)
        index = SemanticIndex(list(MEANT.values()))
        for word, meant in MEANT.items():
            hits = await index.search(f"brown {word} kleine", embed, k=2)
            assert meant in [hit.text for hit in hits], word
            assert [hits[0].score, hits[1].score] == sorted([h.score for h in hits], reverse=True)
            assert list(MEANT.values())[hits[0].place] == hits[0].text
        agents = [agent("colours", "red"), agent("noises", "bark"), agent("numbers", "count")]
        assert Router(agents).route("een dog").agent is None, "they share no word"
        router = SemanticRouter(agents)
        for text, right in (("een fox", "colours"), ("een dog", "noises"), ("een 123", "numbers")):
            assert (await router.route(text, embed)).agent == right
        assert (await router.route(" ", embed)).agent is None

    serving(project, test)


def test_an_adapter_that_is_missing_or_of_another_kind_is_refused(
    project: config.ProjectConfig,
) -> None:
    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidRequest, match="'answers' is of kind choice"):
            await Embedder(server, "base:answers")(["x"])
        with pytest.raises(ModelNotFound, match="base:meaning"):
            await Embedder(server, "base:nobody")(["x"])
        with pytest.raises(InvalidRequest, match="an empty text"):
            await Embedder(server, "base:meaning")(["x", " "])

    serving(project, test)


def test_agents_search_and_route_by_an_embedder(
    project: config.ProjectConfig, store_url: str
) -> None:
    server = ModelServer(project)
    embeds = {"embedder": "meaning", "embedder_template": TEMPLATE}
    routes = ["colours", "noises"]
    specs = {
        "colours": {"examples": ["red"], "choices": ["x", "y"]},
        "noises": {"examples": ["bark"], "choices": ["x", "y"]},
        "desk": {"behaviour": "route", "routes": routes, **embeds},
        "lost": {"behaviour": "route", "routes": routes, "embedder": "nobody"},
        "wrong": {"behaviour": "route", "routes": routes, "embedder": "answers"},
        "finder": {
            "behaviour": "search",
            "params": {"documents": list(MEANT.values()), "k": 3},
            **embeds,
        },
    }

    async def scene(agents: Agents) -> None:
        try:
            assert (await agents.ask("desk", "een dog"))["agent"] == "noises"
            found = await agents.ask("finder", "brown ABC kleine")
            assert len(found["hits"]) == 3
            assert found["answer"] == found["hits"][0]["text"]
            assert "letters" in [hit["text"] for hit in found["hits"]]
            for name, says in (("lost", "nobody"), ("wrong", "of kind choice")):
                with pytest.raises(HybridError, match=says):
                    await agents.ask(name, "een dog")
        finally:
            await server.close()

    made = {name: AgentConfig.model_validate(fields) for name, fields in specs.items()}
    play(store_url, made, scene, server)


class Replaced(ScriptedModelClient):
    """A model whose adapter is another one, turned by a quarter, from the third call on."""

    calls_made = 0

    async def embed(self, request: Any) -> Any:
        made = await super().embed(request)
        self.calls_made += 1
        new = self.calls_made > 2
        vector = (0.0, 1.0) if new else (1.0, 0.0)
        provenance = type(made.provenance)(
            release="r", base_digest="b", adapter="a", adapter_digest="new" if new else "old"
        )
        return type(made)(
            vectors=(vector,) * len(request.inputs), prompt_tokens=1, provenance=provenance
        )


def test_vectors_of_a_replaced_adapter_are_never_compared_with_the_new_ones() -> None:
    async def test() -> None:
        embed = Embedder(Replaced(), "base:a")
        index = SemanticIndex(["a", "b"])
        first = await index.search("x", embed, k=1)
        second = await index.search("x", embed, k=9)
        assert [h.score for h in (*first, *second)] == [1.0, 1.0, 1.0]
        assert [h.text for h in second] == ["a", "b"]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"params": {"documents": ["a"]}}, "embedder: behaviour search needs"),
        ({"embedder": "a"}, "params.documents: must be a list"),
        ({"embedder": "a", "params": {"documents": ["a", " "]}}, "none of them empty"),
        ({"embedder": "a", "params": {"documents": ["a"], "k": 0}}, "params.k: 0"),
        ({"embedder_template": "x"}, "embedder_template: 'x' must contain"),
    ],
)
def test_a_search_that_could_find_nothing_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AgentSpec.of("finder", {"behaviour": "search", **fields}, "api")


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"embedder": "choose"}, r"specs.desk.embedder: .* of kind choice; .*\(alike\)"),
        ({"embedder": "alike"}, r"desk.embedder_template: '{input}' is not .*'name {input}'"),
    ],
)
def test_the_file_is_checked_for_what_its_adapters_are(agent: dict[str, Any], says: str) -> None:
    files = {"train": "t", "holdout": "h"}
    raw = {
        "run": {"name": "t"},
        "model": {"name": "base"},
        "adapters": {
            "choose": files,
            "alike": {**files, "kind": "embed", "template": "name {input}"},
        },
        "agents": {"specs": {"desk": {"behaviour": "route", **agent}}},
    }
    with pytest.raises(ConfigError, match=says):
        config.parse(raw)
