"""The debug project from corpus to answers over HTTP, on a real cluster, server and store.

One cluster for the module; the tests are steps of one story and run in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
HYBRID = [sys.executable, "-m", "hybrid.cli"]

pytestmark = pytest.mark.ray


class Story:
    """The project of the module, driven through its command line as a user would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "hybrid.yaml"
        # Nothing of the session's own cluster may reach this one.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}

    def run(self, *words: str, code: int = 0, timeout: float = 200) -> Any:
        """One `hybrid … --json` command; returns its JSON."""
        command = [*HYBRID, *words, "-c", str(self.file), "--json"]
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout) if code == 0 else done.stderr

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / ".hybrid/local/state.json").read_text())
        return state

    @property
    def url(self) -> str:
        found = json.loads((self.folder / ".hybrid/local/endpoint.json").read_text())
        return str(found["url"])


@pytest.fixture(scope="module")
def another_runtime() -> Iterator[None]:
    """HAProxy's fixed ports (metrics, statistics) are taken, as beside a second runtime."""
    with contextlib.ExitStack() as held:
        for port in (9101, 8404):
            taken = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # by a real one, then
                taken.bind(("0.0.0.0", port))
                taken.listen()
        yield


@pytest.fixture(scope="module")
def story(another_runtime: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("debug")
    for name in ("hybrid.yaml", "prepare.py"):
        shutil.copy(ROOT / "examples/debug" / name, folder)
    made = Story(folder)
    starter = (
        "import sys, hybrid; hybrid.open(sys.argv[1]).local.start()"  # not bound: it outlives this
    )
    subprocess.run([sys.executable, "-c", starter, str(made.file)], env=made.env, check=True)
    pid = made.state["pid"]
    try:
        yield made
    finally:
        made.run("down")
        entry = Path(f"/proc/{pid}/cmdline")  # empty for one that ended and is not reaped yet
        assert not (entry.exists() and entry.read_bytes()), "the supervisor is still there"


def test_training_is_a_ray_job(story: Story) -> None:
    env = {**story.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": story.state["token_path"]}
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "job", "submit", "--address", story.state["dashboard"]]
    job = [sys.executable, str(ROOT / "jobs/train.py"), "-c", str(story.file)]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            [*command, "--", *job],
            env=env,
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )
        # The nodes are up before the agent that takes jobs is.
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert done.returncode == 0, done.stdout + done.stderr
    [base] = story.run("models", "list")
    assert base["name"] == "debug-base"
    assert base["served"]
    assert base["metrics"]["world_size"] == 2
    assert base["metrics"]["eval_loss"] < 6


def test_specialising_publishes_what_beats_the_majority(story: Story) -> None:
    [(name, adapter)] = story.run("specialise", "cargo").items()
    assert name == "cargo"
    metrics = adapter["metrics"]
    assert metrics["exact"] > metrics["majority"] + 0.02
    assert metrics["rows"] == 60
    assert adapter["base_digest"] == story.run("models", "list")[0]["digest"]
    assert "no bogus" in story.run("specialise", "bogus", code=5)


def test_up_serves_models_in_openai_schemas(story: Story) -> None:
    url = story.run("up")["url"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        names = [m.id for m in client.models.list()]
        assert names == ["debug-base", "debug-base:cargo", "agent/cargo", "agent/clerk"]
        text = client.completions.create(
            model="debug-base:cargo", prompt="the Corvina, 50 tons | cargo:", temperature=0
        )
        assert text.choices[0].finish_reason in ("stop", "length")
        asked = {"model": "debug-base", "prompt": "The", "temperature": 0, "max_tokens": 48}
        whole = client.completions.create(**asked).choices[0].text
        parts = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
        assert len(parts) > 1
        assert "".join(parts) == whole != ""
        assert len(client.embeddings.create(model="debug-base", input="x").data[0].embedding) == 64
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="debug-base:nobody", prompt="x")
        with pytest.raises(openai.BadRequestError) as e:
            client.completions.create(model="debug-base", prompt="x" * 5000)
        assert e.value.code == "context_length_exceeded"
        answer = client.chat.completions.create(
            model="agent/cargo", messages=[{"role": "user", "content": "the Fulmar, 20 tons"}]
        )
        assert answer.choices[0].message.content


def test_a_question_is_routed_answered_and_verified(story: Story) -> None:
    view = story.run("ask", "the Dunlin, 130 tons")
    assert view["state"] == "done"
    assert view["result"]["agent"] == "cargo"
    assert view["result"]["verified"]
    assert [s["step"] for s in view["result"]["steps"]] == ["route", "answer", "verify"]
    lost = story.run("ask", "zzz qqq 999", code=11)
    assert "no agent is sure enough" in lost


def _pids(story: Story) -> dict[str, int]:
    hosts = {h["name"]: h["pid"] for h in story.run("status")["swarm"]["hosts"]}
    model = httpx.get(f"{story.url}/v1/status").json()["model"]["pid"]
    return {"gateway": httpx.get(f"{story.url}/healthz").json()["pid"], "model": model, **hosts}


def test_adding_a_specialist_restarts_and_changes_nothing(story: Story) -> None:
    request = {
        "model": "debug-base:cargo",
        "prompt": "the Egret, 99 tons | cargo:",
        "choices": ["barley", "wool", "salt"],
    }

    def answer() -> bytes:
        return httpx.post(f"{story.url}/v1/score", json=request).content

    def digests() -> dict[str, str]:
        data = httpx.get(f"{story.url}/v1/models").json()["data"]
        return {m["id"]: m["hybrid"]["digest"] for m in data if "digest" in m["hybrid"]}

    def values(raw: bytes) -> Any:
        return {k: v for k, v in json.loads(raw).items() if k in ("choices", "best")}

    before, pids, old = values(answer()), _pids(story), digests()
    story.run("specialise", "port")
    deadline = time.monotonic() + 10
    while "debug-base:port" not in digests():
        assert time.monotonic() < deadline, "the new adapter is not served"
        time.sleep(0.05)
    spec = {"adapter": "port", "template": "{input} | port:", "max_tokens": 8}
    added = httpx.put(f"{story.url}/v1/agents/port", json=spec)
    assert added.status_code == 200, added.text
    task = {"input": "the Alcyone, 70 tons", "wait_s": 20}
    done = httpx.post(f"{story.url}/v1/agents/port/tasks", json=task, timeout=30).json()
    assert done["state"] == "done"
    assert values(answer()) == before
    assert _pids(story) == pids
    assert old.items() <= digests().items()


def test_tasks_over_http(story: Story) -> None:
    url = f"{story.url}/v1/agents/cargo/tasks"
    accepted = httpx.post(url, json={"input": "the Egret, 9 tons", "delay_s": 60})
    assert accepted.status_code == 202
    task = f"{story.url}/v1/tasks/{accepted.json()['id']}"
    assert httpx.get(task).json()["state"] == "scheduled"
    assert httpx.delete(task).json()["state"] == "cancelled"
    key = {"Idempotency-Key": "once"}
    first = httpx.post(url, json={"input": "the Egret, 8 tons"}, headers=key).json()["id"]
    assert httpx.post(url, json={"input": "the Egret, 8 tons"}, headers=key).json()["id"] == first
    assert httpx.get(f"{story.url}/v1/tasks/nobody").status_code == 404
    assert httpx.post(f"{story.url}/v1/agents/nobody/tasks", json={"input": 1}).status_code == 404
    assert httpx.post(url, json={"inptu": 1}).json()["error"]["param"] == "input"
    assert httpx.put(f"{story.url}/v1/agents/x", json={"behaviour": "nope"}).status_code == 400
    assert httpx.put(f"{story.url}/v1/agents/cargo", json={}).status_code == 409


def test_a_killed_host_loses_no_task(story: Story) -> None:
    victim = story.run("status")["swarm"]["hosts"][0]
    with httpx.Client(base_url=story.url, timeout=60) as client:
        body = {"input": "the Bittern, 40 tons", "timeout_s": 55}
        ids = [client.post("/v1/agents/cargo/tasks", json=body).json()["id"] for _ in range(50)]
        os.kill(victim["pid"], signal.SIGKILL)
        views = [client.get(f"/v1/tasks/{i}", params={"wait_s": 50}).json() for i in ids]
    assert [v["state"] for v in views] == ["done"] * 50
    deadline = time.monotonic() + 60
    while True:
        hosts = story.run("status")["swarm"]["hosts"]
        running = [h["pid"] for h in hosts if h["state"] == "running"]
        if len(running) == 2 and victim["pid"] not in running:
            return
        assert time.monotonic() < deadline, f"the host is not replaced: {hosts}"
        time.sleep(0.2)
