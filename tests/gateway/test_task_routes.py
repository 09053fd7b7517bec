"""Tasks over real HTTP: events, signals, the dead letter, schedules, a store that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from hybrid import config
from hybrid.agents.events import Events
from hybrid.agents.store import EmbeddedStore, connect
from hybrid.config import AgentConfig
from hybrid.gateway.app import create_app
from hybrid.gateway.services import Services
from hybrid.testing import ScriptedModelClient, run_agents
from hybrid.wire import Chunk, GenerateRequest

SPECS = {
    "echo": AgentConfig(),
    "pipeline": AgentConfig(behaviour="behaviours.pipeline"),
    "approval": AgentConfig(behaviour="behaviours.approval"),
    "flaky": AgentConfig(behaviour="behaviours.twice", timeout_s=30),
    "linger": AgentConfig(behaviour="behaviours.linger"),
    "asker": AgentConfig(behaviour="behaviours.asker"),
}
STORE = {"lease_s": 5.0, "max_attempts": 2, "retain_s": 60}


@contextlib.asynccontextmanager
async def gateway(
    store_url: str, model: ScriptedModelClient | None = None, **store: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Agents and the HTTP application, in this process, over real HTTP."""
    settings = {"store": {**STORE, **store}}
    project = config.parse({"run": {"name": "t"}, "model": {"name": "base"}, **settings})
    listening = connect(store_url, connections=64)
    async with run_agents(
        SPECS, model or ScriptedModelClient(), store_url, settings=settings
    ) as agents:
        services = Services(
            config=project,
            models=None,  # type: ignore[arg-type]
            mailbox=agents.mailbox,
            specs=agents.specs,
            events=Events(listening, agents.mailbox),
        )
        server = uvicorn.Server(
            uvicorn.Config(create_app(services), host="127.0.0.1", port=0, log_level="warning")
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                yield http
        finally:
            server.should_exit = True
            await serving
            await listening.aclose()


def play(scene: Callable[[httpx.AsyncClient, EmbeddedStore], Awaitable[None]], tmp: Path) -> None:
    async def run(store: EmbeddedStore) -> None:
        async with asyncio.timeout(90), gateway(store.url) as http:
            await scene(http, store)

    with EmbeddedStore(tmp / "store") as store:
        asyncio.run(run(store))


async def events(
    http: httpx.AsyncClient, task: str, after: str | None = None, stop_at: int | None = None
) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, kind and data of a task's events, to its end or until there are `stop_at`."""
    headers = {"Last-Event-ID": after} if after else {}
    found: list[tuple[str, str, dict[str, Any]]] = []
    async with http.stream("GET", f"/v1/tasks/{task}/events", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        async for line in response.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                found.append((fields["id"], fields["event"], json.loads(fields["data"])))
                fields = {}
                if len(found) == stop_at:
                    break
    return found


async def post(http: httpx.AsyncClient, agent: str, **body: Any) -> dict[str, Any]:
    response = await http.post(f"/v1/agents/{agent}/tasks", json=body)
    assert response.status_code in (200, 202), response.text
    found: dict[str, Any] = response.json()
    return found


def test_events_are_the_same_to_everyone_and_resume(tmp_path: Path) -> None:
    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        task = (await post(http, "pipeline", input="x", stream=True))["id"]
        live, second = await asyncio.gather(events(http, task), events(http, task))
        assert live == second
        late = await events(http, task)
        assert late == live, "who comes after the end hears all of it"
        told = [(kind, data.get("state") or data.get("step")) for _, kind, data in live]
        assert told[0] == ("state", "queued")
        assert ("state", "leased") in told
        assert ("step", "1:generate") in told
        assert told[-1] == ("state", "done")
        assert live[-1][2]["task"] == task
        text = "".join(d["text"] for _, kind, d in live if kind == "tokens" and d["task"] == task)
        assert text == "one two three"
        assert {d["agent"] for _, _, d in live} == {"pipeline", "echo"}

        half = await events(http, task, stop_at=3)
        rest = await events(http, task, after=half[-1][0])
        assert half + rest == live
        refused = await http.get(f"/v1/tasks/{task}/events", headers={"Last-Event-ID": "soon"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "Last-Event-ID"
        assert (await http.get("/v1/tasks/none/events")).status_code == 404

    play(scene, tmp_path)


def test_a_task_waits_for_a_persons_word(tmp_path: Path) -> None:
    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        task = (await post(http, "approval", input="x"))["id"]
        seen = await events(http, task, stop_at=4)
        assert seen[-1][2]["state"] == "waiting"
        told = await http.post(f"/v1/tasks/{task}/signals/approval", json={"by": "Ada", "ok": True})
        assert told.status_code == 204
        view = (await http.get(f"/v1/tasks/{task}", params={"wait_s": 20})).json()
        assert view["result"] == {"said": {"by": "Ada", "ok": True}}
        late = await http.post(f"/v1/tasks/{task}/signals/approval", json=1)
        assert late.status_code == 409

        early = await post(http, "linger", input=0.1)  # one that nobody waits for harms nothing
        assert (await http.post(f"/v1/tasks/{early['id']}/signals/x")).status_code in (204, 409)

    play(scene, tmp_path)


def test_the_dead_letter_is_inspected_and_replayed(tmp_path: Path) -> None:
    import behaviours

    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        behaviours.failures["left"] = 2
        view = await post(http, "flaky", input="x", wait_s=30)
        assert view["state"] == "dead"
        dead = (await http.get("/v1/agents/flaky/dead")).json()["data"]
        assert [d["id"] for d in dead] == [view["id"]]
        assert [h["outcome"] for h in dead[0]["history"]] == ["retry", "retry"]
        again = await http.post(f"/v1/tasks/{view['id']}/replay", json={"timeout_s": 20})
        assert again.json()["state"] in ("queued", "leased", "done")
        done = (await http.get(f"/v1/tasks/{view['id']}", params={"wait_s": 20})).json()
        assert done["state"] == "done"
        assert (await http.get("/v1/agents/flaky/dead")).json()["data"] == []
        assert (await http.post(f"/v1/tasks/{view['id']}/replay")).status_code == 409

    play(scene, tmp_path)


def test_schedules_submit_again_and_again(tmp_path: Path) -> None:
    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        body = {"agent": "echo", "input": ["tick", [], {}], "every_s": 0.2, "timeout_s": 5}
        assert (await http.put("/v1/schedules/beat", json=body)).status_code == 204
        [entry] = (await http.get("/v1/schedules")).json()["data"]
        assert (entry["name"], entry["input"]) == ("beat", ["tick", [], {}])
        client = connect(store.url)
        deadline = time.monotonic() + 20
        while len(keys := await client.keys("hybrid:*:t:*")) < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await client.aclose()
        task = (await http.get(f"/v1/tasks/{keys[0].rpartition(':')[2]}")).json()
        assert task["input"] == ["tick", [], {}], "empty lists stay lists"
        assert (await http.delete("/v1/schedules/beat")).status_code == 204
        assert (await http.delete("/v1/schedules/beat")).status_code == 404
        bad = await http.put("/v1/schedules/x", json={**body, "every_s": 0})
        assert bad.status_code == 400

    play(scene, tmp_path)


def test_a_store_that_is_away_refuses_at_once_and_what_ran_finishes(tmp_path: Path) -> None:
    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        running = (await post(http, "linger", input=1.0))["id"]
        await events(http, running, stop_at=2)
        store.kill()
        began = time.monotonic()
        refused = await http.post("/v1/agents/echo/tasks", json={"input": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert time.monotonic() - began < 3
        await asyncio.sleep(1.2)  # the behaviour ends while there is no store
        store.restart()
        view = (await http.get(f"/v1/tasks/{running}", params={"wait_s": 20})).json()
        assert (view["state"], view["attempts"]) == ("done", 1), "its work was kept, not repeated"
        assert (await post(http, "echo", input="x", wait_s=20))["state"] == "done"

    play(scene, tmp_path)


def test_a_key_is_for_one_request(tmp_path: Path) -> None:
    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        async def send(text: str) -> httpx.Response:
            return await http.post(
                "/v1/agents/echo/tasks",
                json={"input": text, "wait_s": 20},
                headers={"Idempotency-Key": "k"},
            )

        first, again, other = await send("a"), await send("a"), await send("b")
        assert first.json()["id"] == again.json()["id"]
        assert first.json()["result"] == again.json()["result"]
        assert other.status_code == 409

    play(scene, tmp_path)


def test_odd_names_and_bodies_are_refused_not_failed_on(tmp_path: Path) -> None:
    async def scene(http: httpx.AsyncClient, store: EmbeddedStore) -> None:
        for name in ("a%2Fb", "a%00b", "..", "%20", "x" * 300, "nai%CC%88ve"):
            for method, path in (
                ("PUT", f"/v1/agents/{name}"),
                ("POST", f"/v1/agents/{name}/tasks"),
                ("DELETE", f"/v1/agents/{name}"),
            ):
                answer = await http.request(method, path, json={"input": 1})
                assert 400 <= answer.status_code < 500, (method, path, answer.text)
                assert answer.json()["error"]["message"]
        for body in (b"", b"{", b"[]", b'{"input": 1, "wait_s": -1}', b'{"input": NaN, "x": 1}'):
            answer = await http.post("/v1/agents/echo/tasks", content=body)
            assert answer.status_code == 400, body
        odd = {"input": "x", "conversation": "c\u0000\n/../🦜", "wait_s": 20}
        key = {"Idempotency-Key": "k" * 500}
        answer = await http.post("/v1/agents/echo/tasks", json=odd, headers=key)
        assert answer.json()["state"] == "done"
        large = await http.post("/v1/agents/echo/tasks", json={"input": "x" * 1_000_000})
        assert large.status_code == 202

    play(scene, tmp_path)


def test_cancelling_stops_a_generation_within_a_second(tmp_path: Path) -> None:
    stopped: list[float] = []

    class Endless(ScriptedModelClient):
        async def generate(self, request: GenerateRequest) -> Chunk:
            try:
                await asyncio.sleep(60)
            finally:
                stopped.append(time.monotonic())
            raise AssertionError

    async def run(store: EmbeddedStore) -> None:
        async with asyncio.timeout(60), gateway(store.url, Endless()) as http:
            task = (await post(http, "asker", input="x"))["id"]
            seen = await events(http, task, stop_at=6)
            assert seen[-1][2]["agent"] == "echo"
            began = time.monotonic()
            assert (await http.delete(f"/v1/tasks/{task}")).json()["state"] == "cancelled"
            while not stopped:
                assert time.monotonic() - began < 1
                await asyncio.sleep(0.01)

    with EmbeddedStore(tmp_path / "store") as store:
        asyncio.run(run(store))
