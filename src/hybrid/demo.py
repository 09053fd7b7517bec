"""`hybrid demo`: the whole way on one machine, ending in answers over HTTP and a killed host."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid.client import request
from hybrid.config import read_mapping
from hybrid.errors import Conflict, TaskFailed
from hybrid.project import Project
from hybrid.show import Bars, percent, short

TASKS = 50


def run(project: Project, console: Console) -> dict[str, Any]:
    """Run the demo. Everything it starts ends with it, however it ends.

    Returns:
        Figures: seconds of each part, answers, the held-out table, the killed host's tasks.

    Raises:
        TaskFailed: a question or one of the tasks in flight was not answered.
    """
    demo = _Demo(project, console)
    if project.local.state() is not None:
        raise Conflict("this project is up already; `hybrid down` first")
    try:
        demo.train()
        demo.serve()
        demo.ask()
        demo.table()
        demo.add_specialist()
        demo.kill_host()
    finally:
        with console.status("stopping everything"):
            project.down()
    demo.closing()
    return demo.figures


class _Demo:
    def __init__(self, project: Project, console: Console) -> None:
        self.project = project
        self.console = console
        self.started = time.monotonic()
        self.figures: dict[str, Any] = {"seconds": {}}
        folder = project.config.run.dir.parent
        # An agent file beside the project file is a specialist that comes later.
        self.later = {p.name.removesuffix(".agent.yaml"): p for p in folder.glob("*.agent.yaml")}

    def _part(self, title: str) -> None:
        elapsed = time.monotonic() - self.started
        self.figures["seconds"][title] = round(elapsed, 1)
        self.console.rule(f"[bold]{title}[/]  [dim]{elapsed:.0f} s[/]", align="left")

    def train(self) -> None:
        """The base with FSDP on two workers, then the first specialists side by side."""
        self._part("starting the cluster")
        state = self.project.local.start(bound=True)
        config = self.project.config
        self.console.print(
            f"head, one gpu-pool node, {config.agents.swarm.hosts} agents-pool nodes and the store"
            f" run on this machine (pid {state.pid})"
        )
        with self.project.ray():
            self._part("training the base")
            with Bars(self.console) as bars:
                base = self.project.train(on_progress=bars.training)
            self.console.print(f"published {base.name}@v{base.version} {short(base.digest)}")
            self._part("specialising")
            first = [name for name in config.adapters if name not in self.later]
            with Bars(self.console) as bars:
                self.project.specialise(first, on_progress=bars.specialising)

    def serve(self) -> None:
        """Gateway, model and agent hosts."""
        self._part("serving")
        with self.console.status("starting") as status:
            url = self.project.up(bound=True, on_step=lambda text: status.update(text))
        self.console.print(f"up at [bold]{url}[/]: try it from another terminal while this runs")
        self.figures["url"] = url

    def ask(self) -> None:
        """One routed question of each kind, over HTTP."""
        self._part("asking")
        self.figures["answers"] = []
        front = self.project.config.agents.specs[self.project.front_agent]
        names = front.routes or [n for n in self.project.config.adapters if n not in self.later]
        for name in names:
            spec = self.project.config.agents.specs[name]
            if spec.examples:
                self._ask(spec.examples[0], name)

    def _ask(self, question: str, expected: str) -> None:
        start = time.monotonic()
        view = self.project.ask(question)
        ms = 1000 * (time.monotonic() - start)
        if view["state"] != "done":
            raise TaskFailed(f"{question!r}: {view['state']}: {view['error']}")
        result = view["result"]
        self.figures["answers"].append(
            {"question": question, "expected_agent": expected, "ms": round(ms), **result}
        )
        self.console.print(
            f"  {escape(question)}\n    → [bold]{escape(str(result['answer']))}[/]"
            f"  [dim]by {result['agent']}, {ms:.0f} ms[/]"
        )

    def table(self) -> None:
        """Held-out exact match of everything that could answer, side by side."""
        self._part("held-out results")
        baselines = self._baselines()
        table = Table("specialist", "rows", "majority", "n-gram logistic", "base", "specialist")
        registry = self.project.registry
        release = registry.release(self.project.alias)
        rows = self.figures["heldout"] = {}
        for name, digest in sorted(release.adapters.items()):
            metrics = registry.by_digest(digest).manifest.metrics
            linear = baselines.get(name, {}).get("linear")
            rows[name] = {
                "majority": metrics.get("majority"),
                "linear": linear,
                "base": metrics.get("base_exact"),
                "specialist": metrics.get("exact"),
            }
            table.add_row(
                name,
                str(metrics.get("rows", "-")),
                percent(metrics.get("majority")),
                percent(linear),
                percent(metrics.get("base_exact")),
                percent(metrics.get("exact")),
            )
        self.console.print(table)

    def _baselines(self) -> dict[str, dict[str, float]]:
        """The example's own `baselines.py`, if it has one: a linear model on the same split."""
        from importlib.util import module_from_spec, spec_from_file_location

        path = self.project.config.run.dir.parent / "baselines.py"
        spec = spec_from_file_location("baselines", path) if path.exists() else None
        if spec is None or spec.loader is None:
            return {}
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        found: dict[str, dict[str, float]] = module.evaluate(self.project.config.run.dir / "data")
        return found

    def add_specialist(self) -> None:
        """One more adapter and agent while everything serves; nothing else is touched."""
        for name, path in self.later.items():
            self._part(f"adding {name} while serving")
            with Bars(self.console) as bars:
                self.project.specialise([name], on_progress=bars.specialising)
            spec = read_mapping(path)
            self.project.add_agent(name, spec)
            self._wait_for_model(f"{self.project.config.model.name}:{name}")
            start = time.monotonic()
            question = spec["examples"][0]
            view = self.project.ask(question, agent=name)
            if view["state"] != "done":
                raise TaskFailed(f"{name}: {view['state']}: {view['error']}")
            ms = 1000 * (time.monotonic() - start)
            self.console.print(
                f"  {escape(question)}\n    → [bold]{escape(str(view['result']['answer']))}[/]"
                f"  [dim]by {name}, {ms:.0f} ms[/]"
            )

    def _wait_for_model(self, model: str, timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        with self.project.http() as client:
            while time.monotonic() < deadline:
                listing = request(client, "GET", "/v1/models")["data"]
                if any(entry["id"] == model for entry in listing):
                    return
                time.sleep(0.1)
        raise TaskFailed(f"{model} is published but not served after {timeout_s:g} s")

    def kill_host(self) -> None:
        """SIGKILL one agent host with tasks in flight; every task is answered all the same."""
        from hybrid.agents.swarm import swarm_status

        self._part(f"killing an agent host with {TASKS} tasks in flight")
        with self.project.ray():
            hosts = swarm_status()["hosts"]
            victim = max(hosts, key=lambda h: h["name"])
            views = asyncio.run(self._flood(victim["pid"]))
        done = [v for v in views if v["state"] == "done"]
        retried = [v for v in done if v["retried"]]
        self.figures["killed"] = {
            "pid": victim["pid"],
            "tasks": len(views),
            "answered": len(done),
            "retried": len(retried),
        }
        self.console.print(
            f"killed {victim['name']} (pid {victim['pid']}): [bold]{len(done)} of {len(views)}[/]"
            f" answered, {len(retried)} of them after a retry"
        )
        if len(done) != len(views):
            raise TaskFailed(f"{len(views) - len(done)} tasks were not answered: {views}")

    async def _flood(self, victim: int) -> list[dict[str, Any]]:
        import httpx

        config = self.project.config
        names = [n for n, s in config.agents.specs.items() if s.adapter and s.examples]
        async with httpx.AsyncClient(base_url=self.project.url, timeout=120) as client:

            async def submit(i: int) -> str:
                name = names[i % len(names)]
                examples = config.agents.specs[name].examples
                body = {"input": examples[i % len(examples)], "timeout_s": 110}
                answer = await client.post(f"/v1/agents/{name}/tasks", json=body)
                answer.raise_for_status()
                return str(answer.json()["id"])

            submits = [asyncio.create_task(submit(i)) for i in range(TASKS)]
            # Killed while tasks are still coming in: some are leased by it, some not yet.
            await asyncio.wait(submits[: TASKS // 2])
            os.kill(victim, signal.SIGKILL)
            ids = await asyncio.gather(*submits)
            answers = await asyncio.gather(
                *(client.get(f"/v1/tasks/{i}", params={"wait_s": 110}) for i in ids)
            )
            return [a.json() for a in answers]

    def closing(self) -> None:
        """Where to go from here."""
        total = time.monotonic() - self.started
        self.figures["seconds"]["total"] = round(total, 1)
        where = Path(os.path.relpath(self.project.config.run.dir))
        self.console.print(
            f"done in {total:.0f} s; all processes are gone. What was trained is in {where};"
            " run it again and it starts from there, or keep it running with `hybrid up`."
        )
