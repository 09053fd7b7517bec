"""Hosts on a real store: replay, waiting, retries, cancellation, drain, a store that goes away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import behaviours
import pytest
from tests_support import FAST, play, until

from hybrid import config
from hybrid.agents.aio import end
from hybrid.agents.host import AgentHost
from hybrid.agents.store import EmbeddedStore
from hybrid.agents.task import Budget
from hybrid.agents.upkeep import Upkeep
from hybrid.config import AgentConfig
from hybrid.errors import TaskFailed, Unavailable
from hybrid.testing import Agents, ScriptedModelClient
from hybrid.wire import GenerateRequest

PROJECT = {"run": {"name": "t"}, "model": {"name": "base"}}


@pytest.fixture(autouse=True)
def fresh() -> None:
    behaviours.ran.clear()
    behaviours.failures["left"] = 0
    behaviours.order["second"] = False


def spec(function: Any, **more: Any) -> AgentConfig:
    return AgentConfig(behaviour=f"behaviours.{function.__name__}", **more)


def test_an_answer_and_who_gave_it(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        plain = await agents.ask("echo", "what is said")
        assert plain["answer"] == "what is said"
        assert plain["agent"] == "echo"
        closed = await agents.ask("closed", {"text": "Which is it, north?"})
        assert closed["answer"] == "north"
        with pytest.raises(TaskFailed, match="takes a string"):
            await agents.ask("echo", 7)

    closed = AgentConfig(choices=("south", "north"), params={"extract": r"it, (\w+)"})
    play(store_url, {"echo": AgentConfig(), "closed": closed}, scene)


def test_an_answer_that_does_not_pass_fails_the_task(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("strict", "not json"))
        assert view.state == "failed"
        assert "not JSON" in str(view.error)

    play(store_url, {"strict": AgentConfig(verify="json")}, scene)


def test_a_finished_step_is_never_repeated(store_url: str) -> None:
    behaviours.failures["left"] = 2

    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("a", "x"))
        assert view.result == "12"
        assert view.attempts == 3
        assert [h.outcome for h in view.history] == ["retry", "retry", "done"]
        assert behaviours.ran == ["one", "two"]

    play(store_url, {"a": spec(behaviours.twice)}, scene)


def test_a_changed_order_of_steps_is_named(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("a", "x"))
        assert view.state == "failed"
        assert "was 'a' when" in str(view.error)
        assert "is 'b' now" in str(view.error)

    play(store_url, {"a": spec(behaviours.fickle)}, scene)


def test_waiting_frees_the_slot_and_calls_in_a_circle_do_not_lock(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        ids = [await agents.submit("ping", 6, conversation="c", deadline=None) for _ in range(4)]
        views = [await agents.finish(i) for i in ids]
        assert [v.result for v in views] == [6] * 4
        assert all(v.attempts == 1 for v in views), "a wait is no retry"

    specs = {
        "ping": spec(behaviours.ping, max_concurrency=1),
        "pong": spec(behaviours.pong, max_concurrency=1),
    }
    settings = {**FAST, "agents": {"swarm": {"concurrency": 1}}}
    play(store_url, specs, scene, settings=settings)


def test_a_bug_is_tried_again_and_then_dead_with_its_history(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("a", "x"))
        assert view.state == "dead"
        assert view.error == "ZeroDivisionError: a bug"
        assert len(view.history) == 3
        assert [v.task.id for v in await Upkeep(agents.mailbox).dead("a")] == [view.task.id]

    play(store_url, {"a": spec(behaviours.crash)}, scene)


def test_an_output_that_is_no_json_fails_by_name(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("a", "x"))
        assert view.state == "failed"
        assert "cannot be stored as JSON" in str(view.error)

    play(store_url, {"a": spec(behaviours.unstorable)}, scene)


def test_a_behaviour_says_what_an_answer_must_be(store_url: str) -> None:
    model = ScriptedModelClient()

    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("a", "civil"))
        assert view.result == ["civil", "regex"]
        kinds = [c.sampling.constraint for c in model.calls if isinstance(c, GenerateRequest)]
        assert [c and (c.kind, c.text) for c in kinds] == [
            ("choice", '["civil", "criminal"]'),
            ("json_schema", '{"type": "null"}'),
            ("regex", "a+"),
        ]

    play(store_url, {"a": spec(behaviours.classify)}, scene, model)


def test_a_model_that_is_away_is_waited_for(store_url: str) -> None:
    model = ScriptedModelClient(failures=[Unavailable("down", retry_after=0.05)])

    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("echo", "hello"))
        assert view.result["answer"] == "hello"
        assert view.attempts == 2

    play(store_url, {"echo": AgentConfig()}, scene, model)


def test_cancelling_a_root_stops_what_runs_beneath_it(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        root = await agents.submit("parent", "x")
        await until(lambda: "started" in behaviours.ran)
        began = time.monotonic()
        await agents.mailbox.cancel(root)
        await until(lambda: "cancelled" in behaviours.ran)
        assert time.monotonic() - began < 5  # far below the lease; announced, not polled
        assert (await agents.finish(root)).state == "cancelled"

    specs = {"parent": spec(behaviours.parent), "forever": spec(behaviours.forever)}
    play(store_url, specs, scene, settings={"store": {"lease_s": 60}})


def test_a_deadline_ends_a_running_task(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        task = await agents.submit("forever", "x", deadline=time.time() + 0.5)
        view = await agents.finish(task)
        assert view.state == "failed"
        assert "deadline" in str(view.error)
        assert behaviours.ran == ["started", "cancelled"]

    play(store_url, {"forever": spec(behaviours.forever)}, scene)


def test_a_budget_of_tokens_ends_the_task(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        task = await agents.submit("echo", "a b c d", budget=Budget(tokens=3))
        view = await agents.finish(task)
        assert view.state == "failed"
        assert "budget_exceeded" in str(view.error)

    play(store_url, {"echo": AgentConfig()}, scene)


def test_a_new_agent_is_known_within_a_second(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        await agents.specs.put("late", AgentConfig())
        began = time.monotonic()
        assert (await agents.ask("late", "hi"))["answer"] == "hi"
        assert time.monotonic() - began < 5

    play(store_url, {"echo": AgentConfig()}, scene)


HOST_PROCESS = """
import asyncio, sys
from hybrid import config
from hybrid.agents.aio import end
from hybrid.agents.host import AgentHost
from hybrid.testing import ScriptedModelClient

project = config.parse(
    {"run": {"name": "t"}, "model": {"name": "base"}, "store": {"lease_s": 0.9, "max_attempts": 3}}
)
asyncio.run(AgentHost("victim", sys.argv[1], project, ScriptedModelClient(delay_s=60)).run())
"""


def test_what_a_killed_host_held_is_done_by_another(store_url: str) -> None:
    """A host in a process of its own takes tasks, hangs on them, and is killed."""

    async def scene(agents: Agents) -> None:
        victim = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", HOST_PROCESS, store_url]
        )
        try:
            ids = [await agents.submit("echo", f"n{i}") for i in range(20)]
            held: list[str] = []
            deadline = time.monotonic() + 30
            while not held:
                assert time.monotonic() < deadline
                views = [await agents.mailbox.view(i) for i in ids]
                held = [v.task.id for v in views if v.state == "leased"]
        finally:
            victim.kill()
            victim.wait()
        host = AgentHost("second", store_url, config.parse(PROJECT), ScriptedModelClient())
        task = asyncio.create_task(host.run())
        views = [await agents.finish(i) for i in ids]
        assert [v.result["answer"] for v in views] == [f"n{i}" for i in range(20)]
        assert {v.task.id for v in views if v.attempts > 1} >= set(held)
        lost = next(v for v in views if v.task.id in held).history[0]
        assert (lost.host, lost.outcome) == ("victim", "lost")
        await end(task)

    play(store_url, {"echo": AgentConfig(max_concurrency=4)}, scene, hosts=0)


def test_drain_gives_back_what_does_not_end_in_time(store_url: str) -> None:
    async def scene(agents: Agents) -> None:
        ids = [await agents.submit("slow", "x") for _ in range(6)]
        await until(lambda: any(h.stats()["in_flight"] for h in agents.hosts))
        busy = max(agents.hosts, key=lambda h: h.stats()["in_flight"])
        result = await busy.drain(0.6)
        assert result["given_back"] > 0
        views = [await agents.finish(i) for i in ids]
        assert [v.result for v in views] == ["slow"] * 6
        assert all(v.attempts == 1 for v in views), "given back is no attempt"

    specs = {"slow": spec(behaviours.slow, max_concurrency=3)}
    play(store_url, specs, scene, hosts=2)


def test_a_store_that_is_killed_loses_nothing_and_its_work_goes_on(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "store") as store:
        url = store.url

        async def scene(agents: Agents) -> None:
            ids = [await agents.submit("slow", i) for i in range(5)]
            await until(lambda: agents.hosts[0].stats()["in_flight"] > 0)
            store.kill()
            await asyncio.sleep(0)
            await asyncio.to_thread(store.restart)
            for task in ids:
                deadline = time.monotonic() + 20
                while True:
                    assert time.monotonic() < deadline
                    try:
                        view = await agents.mailbox.wait(task, 1)
                    except Exception:  # noqa: BLE001 - connections of before the kill
                        continue
                    if view.finished:
                        break
                assert view.result == "slow"

        play(url, {"slow": spec(behaviours.slow)}, scene)


class _Sink(BaseHTTPRequestHandler):
    keys: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.keys.append(self.headers["Idempotency-Key"])
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"ok": true}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def sink() -> Iterator[str]:
    _Sink.keys.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_tools_effect_happens_once_though_the_task_is_retried(store_url: str, sink: str) -> None:
    behaviours.failures["left"] = 2

    async def scene(agents: Agents) -> None:
        view = await agents.finish(await agents.submit("post", sink))
        assert view.result == {"status": 200, "json": {"ok": True}}
        assert view.attempts == 3
        assert len(_Sink.keys) == 1
        assert _Sink.keys[0].startswith(view.task.id)

    play(store_url, {"post": spec(behaviours.post)}, scene)
