"""`hybrid.open()` and the verbs: every command of the CLI is a method of `Project`.

    p = hybrid.open("hybrid.yaml")
    p.train(); p.specialise(); p.up(); p.ask("Delaware County Juvenile Court")

Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid import config as configs
from hybrid.client import request
from hybrid.cluster.local import LocalCluster, State
from hybrid.config import AgentConfig, ProjectConfig
from hybrid.errors import Conflict, NotFound, Unavailable
from hybrid.planning_verbs import PlanningVerbs
from hybrid.project_runs import Runs

if TYPE_CHECKING:
    import httpx

    from hybrid.registry import Manifest, Registry, Release

Progress = Callable[[dict[str, Any]], None]


def open(path: str | Path = "hybrid.yaml", overrides: dict[str, Any] | None = None) -> Project:
    """Read a project file.

    Args:
        path: a hybrid.yaml.
        overrides: dotted key paths to values, e.g. `{"training.steps": 10}`.

    Raises:
        ConfigError: see `hybrid.config.load`.
    """
    return Project(configs.load(path, overrides))


class Project(PlanningVerbs):
    """One project: its configuration and the verbs on it.

    Verbs that need Ray use, in this order: the cluster at RAY_ADDRESS, the project's running local
    cluster, or a local cluster of their own that ends with the call.
    """

    def __init__(self, config: ProjectConfig) -> None:
        self.config = config
        self.local, self.runs = LocalCluster(config), Runs(self)

    @property
    def registry(self) -> Registry:
        """The registry that `registry.root` names."""
        from hybrid.registry import Registry

        return Registry(self.config.registry.root, cache=self.config.registry.cache)

    @property
    def alias(self) -> str:
        """The served release, e.g. `legal-base@stable`."""
        return f"{self.config.model.name}@{self.config.serving.alias}"

    # --- training -----------------------------------------------------------------------

    def train(self, *, fresh: bool = False, on_progress: Progress | None = None) -> Manifest:
        """Train and publish the base. The first base also becomes the served release.

        A later base changes nothing that is served: `specialise(base=…)` builds its release.
        Running it again resumes a killed run, and returns at once what is already published.

        Raises:
            DataError, ConfigError, TrainingError, PlacementError, RegistryError.
        """
        with self.ray(training_only=True):
            from hybrid.audits import gate
            from hybrid.training.trainer import train_base

            manifest = train_base(
                self.config, self.registry, fresh=fresh, on_progress=on_progress,
                gate=lambda: gate(self, on_progress))  # fmt: skip
        try:
            self.registry.release(self.alias)
        except NotFound:
            self.registry.publish_release(
                self.config.model.name, manifest.digest, {}, alias=self.config.serving.alias
            )
        return manifest

    def specialise(
        self,
        only: Sequence[str] | None = None,
        *,
        base: str | None = None,
        force: bool = False,
        fresh: bool = False,
        on_progress: Progress | None = None,
    ) -> dict[str, Manifest]:
        """Train adapters, publish them, and add them to the served release.

        Args:
            only: names in `adapters`; None is all of them.
            base: reference of the base to train on, e.g. `legal-base@v2`; None is the served one.
                With another base than the served one, the release moves to it in one step with
                all its new adapters.
            force: publish even what does not beat the majority class.
            fresh: forget what is partly trained; else a killed run goes on.

        Raises:
            NotFound: no base is published, or `only` names no adapter of the project.
            TrainingError, DataError, PlacementError, RegistryError.
        """
        registry, name = self.registry, self.config.model.name
        unknown = sorted(set(only or ()) - set(self.config.adapters))
        if unknown:
            raise NotFound(
                f"adapters: no {', '.join(unknown)}; there are: {', '.join(self.config.adapters)}"
            )
        release = self._release()
        digest = registry.resolve(base).manifest.digest if base else release.base_digest
        with self.ray(training_only=True):
            from hybrid.training.specialise import specialise

            done = specialise(
                self.config,
                registry,
                base=f"{name}@{digest}",
                only=only,
                force=force,
                fresh=fresh,
                on_progress=on_progress,
            )
        adapters = {adapter: manifest.digest for adapter, manifest in done.items()}
        if digest == release.base_digest:
            registry.update_release(name, alias=self.config.serving.alias, add=adapters)
        elif only is None:
            registry.publish_release(name, digest, adapters, alias=self.config.serving.alias)
        return done

    def _release(self) -> Release:
        try:
            return self.registry.release(self.alias)
        except NotFound:
            raise NotFound(f"{self.alias} is not published yet; run `hybrid train` first") from None

    # --- running ------------------------------------------------------------------------

    def ray(self, *, training_only: bool = False) -> contextlib.AbstractContextManager[None]:
        """A connection to Ray for the length of a verb; nested uses share the outer one.

        Args:
            training_only: a local cluster started for it is one for training only.
        """
        from hybrid.cluster.connection import connection

        return connection(self.local, training_only=training_only)

    def up(self, *, bound: bool = False, on_step: Callable[[str], None] | None = None) -> str:
        """Serve the release and start the agents. Returns the endpoint's base URL.

        Args:
            bound: a local cluster started here ends with this process.
            on_step: called with what is being done.

        Raises:
            Conflict: a training runs in a cluster of its own. NotFound: nothing is published.
            Another HybridError: what could not start.
        """
        step = on_step or (lambda text: None)
        state = self.local.state()
        if state is not None and state.training_only:
            raise Conflict("a training runs in a cluster of its own: wait for it, or end it first")
        release = self._release()
        started = False
        if state is None and "RAY_ADDRESS" not in os.environ:
            from hybrid.deploy import check_port

            check_port(self.config)
            step("starting the cluster")
            state = self.local.start(bound=bound)
            started = True
        try:
            step(f"serving {self.config.model.name} with {len(release.adapters)} adapters")
            with self.ray():
                from hybrid.deploy import deploy, warm_up

                specs = self.agent_specs()
                url = deploy(self.config, specs, self._store_url(state), self._endpoint_file, step)
                step("warming up")
                with self.http() as client:
                    warm_up(client, specs)
                return url
        except BaseException:
            if started:
                self.local.stop()
            raise

    def agent_specs(self) -> dict[str, AgentConfig]:
        """The agents of hybrid.yaml, ready to run.

        An agent whose adapter is defined here takes its template and closed set from there, unless
        it has its own: they are what the adapter was trained on.
        """
        from hybrid.training.rows import read

        ready = {}
        for name, spec in self.config.agents.specs.items():
            adapter = self.config.adapters.get(spec.adapter or "")
            if adapter is not None:
                fields: dict[str, Any] = {}
                if "template" not in spec.model_fields_set:
                    fields["template"] = adapter.template
                if spec.choices is None and adapter.kind == "choice" and not adapter.candidates:
                    fields["choices"] = read(spec.adapter or "", adapter).choices
                spec = spec.model_copy(update=fields)
            ready[name] = spec
        return ready

    def _store_url(self, state: State | None) -> str:
        url = self.config.store.url or (state.store_url if state else None)
        if url is None:
            raise Unavailable(
                "store.url is missing: an embedded store is for one machine; on a cluster name a"
                " Valkey or Redis that every node reaches"
            )
        return url

    def down(self) -> bool:
        """Stop serving, the agents and the local cluster. False when nothing ran.

        Queued tasks stay in the store, and are done after the next `up`.
        """
        state = self.local.state()
        self._endpoint_file.unlink(missing_ok=True)
        if state is None and "RAY_ADDRESS" not in os.environ:
            return False
        if state is None:
            from ray import serve

            from hybrid.agents.swarm import stop_swarm

            with self.ray():
                stop_swarm()
                serve.shutdown()
            return True
        return self.local.stop()

    # --- asking -------------------------------------------------------------------------

    @property
    def _endpoint_file(self) -> Path:
        return self.config.run.dir / "local" / "endpoint.json"

    @property
    def url(self) -> str:
        """The endpoint's base URL.

        Raises:
            Unavailable: it is not up.
        """
        if self.local.state() is None and "RAY_ADDRESS" not in os.environ:
            self._endpoint_file.unlink(missing_ok=True)
        try:
            return str(json.loads(self._endpoint_file.read_text())["url"])
        except FileNotFoundError:
            raise Unavailable("the endpoint is not up; run `hybrid up` first") from None

    def http(self, timeout_s: float = 60) -> httpx.Client:
        """A client of the endpoint, with the first configured key."""
        import httpx

        keys = self.config.serving.api_keys
        headers = {"Authorization": f"Bearer {keys[0].partition(':')[2]}"} if keys else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    def ask(
        self, question: str, *, agent: str | None = None, timeout_s: float = 60
    ) -> dict[str, Any]:
        """Ask an agent over HTTP; by default the project's front agent (a chain, or a router).

        Returns:
            The finished task as `GET /v1/tasks/{id}` shows it.

        Raises:
            Unavailable: the endpoint is not up. NotFound: no such agent.
        """
        name = agent or self.front_agent
        with self.http(timeout_s + 5) as client:
            body = {"input": question, "wait_s": timeout_s, "timeout_s": timeout_s}
            view: dict[str, Any] = request(client, "POST", f"/v1/agents/{name}/tasks", json=body)
            return view

    @property
    def front_agent(self) -> str:
        """The agent asked when none is named."""
        for behaviour in ("chain", "route"):
            for name, spec in self.config.agents.specs.items():
                if spec.behaviour == behaviour:
                    return name
        raise NotFound("agents.specs: no chain or route agent to ask; name one with --agent")

    # --- looking after it ---------------------------------------------------------------

    def agents(self) -> list[dict[str, Any]]:
        """The agents that are applied now."""
        with self.http() as client:
            found: list[dict[str, Any]] = request(client, "GET", "/v1/agents")["data"]
            return found

    def agent(self, name: str) -> dict[str, Any]:
        """One agent and its mailbox."""
        with self.http() as client:
            found: dict[str, Any] = request(client, "GET", f"/v1/agents/{name}")
            return found

    def add_agent(self, name: str, spec: AgentConfig | dict[str, Any]) -> dict[str, Any]:
        """Add or replace an agent while everything runs."""
        body = spec.model_dump(mode="json") if isinstance(spec, AgentConfig) else spec
        with self.http() as client:
            made: dict[str, Any] = request(client, "PUT", f"/v1/agents/{name}", json=body)
            return made

    def remove_agent(self, name: str) -> None:
        """Remove an agent."""
        with self.http() as client:
            request(client, "DELETE", f"/v1/agents/{name}")

    def dead_letter(self, name: str) -> list[dict[str, Any]]:
        """An agent's tasks that were given up, newest first, with their history."""
        with self.http() as client:
            found: list[dict[str, Any]] = request(client, "GET", f"/v1/agents/{name}/dead")["data"]
            return found

    def replay(self, task_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Try a dead task again, from its last finished step."""
        with self.http() as client:
            body = {"timeout_s": timeout_s}
            path = f"/v1/tasks/{task_id}/replay"
            found: dict[str, Any] = request(client, "POST", path, json=body)
            return found

    def models(self) -> list[dict[str, Any]]:
        """Everything published, newest version first, and what is served."""
        registry = self.registry
        try:
            release = registry.release(self.alias)
            served = {release.base_digest, *release.adapters.values()}
        except NotFound:
            served = set()
        rows = [
            {**m.model_dump(mode="json", exclude={"files"}), "served": m.digest in served}
            for kind in ("base", "adapter")
            for m in registry.list(kind)
        ]
        return sorted(rows, key=lambda r: (r["kind"] != "base", r["name"], -r["version"]))

    def status(self) -> dict[str, Any]:
        """What runs: cluster, endpoint, release, hosts."""
        state = self.local.state()
        result: dict[str, Any] = {"project": self.config.run.name, "cluster": None, "url": None}
        with contextlib.suppress(NotFound):
            release = self.registry.release(self.alias)
            result["release"] = {
                "name": self.alias,
                "version": release.version,
                "base": release.base_digest,
                "adapters": release.adapters,
            }
        if state is None and "RAY_ADDRESS" not in os.environ:
            return result
        if state is not None:
            result["cluster"] = {"pid": state.pid, "address": state.ray_address}
            result["cluster"]["dashboard"] = state.dashboard
        with contextlib.suppress(Unavailable):
            result["url"] = self.url
            from hybrid.agents.swarm import swarm_status

            with self.ray():
                result["swarm"] = swarm_status()
        return result
