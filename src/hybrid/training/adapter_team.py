"""Teams of Ray actors that train adapters: one process, or several in one torch process group.

A team takes one adapter after another. One that loses a process, or whose ranks did not end alike,
is ended whole, and another is started for what is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from hybrid.config import ProjectConfig
from hybrid.errors import HybridError, PlacementError, TrainingError, Unavailable
from hybrid.pools import GPU
from hybrid.registry import Manifest, Registry
from hybrid.training import rows
from hybrid.training.adapter_state import FILE
from hybrid.training.parallel import backend
from hybrid.training.progress import Progress

_PLACE_S = 30.0


def run_team_jobs(
    config: ProjectConfig,
    base_digest: str,
    names: Sequence[str],
    runs: dict[str, str],
    force: bool,
    *,
    size: int,
    teams: int,
) -> Iterator[tuple[str, Manifest | HybridError]]:
    """Hand out adapters to `teams` teams of `size` processes as they become free.

    Yields:
        Each name with its manifest or what went wrong, as it ends.
    """
    queue = list(names)
    idle = [Team(config, base_digest, size) for _ in range(teams)]
    busy: dict[str, Team] = {}
    try:
        while queue or busy:
            while queue and idle:
                name, team = queue.pop(0), idle.pop()
                busy[name] = team
                team.begin(name, runs[name], force)
            refs = {ref: name for name, team in busy.items() for ref in team.waiting}
            ready, _ = ray.wait(list(refs), num_returns=1)
            name = refs[ready[0]]
            result = busy[name].took(ready[0], name)
            if result is not None:
                idle.append(busy.pop(name))
                yield name, result
    finally:
        for team in [*idle, *busy.values()]:
            team.end()


class Team:
    """`size` processes that train one adapter at a time; started when they are first needed.

    Attributes:
        waiting: what is still to end of the adapter it trains.
    """

    def __init__(self, config: ProjectConfig, base_digest: str, size: int) -> None:
        self._config, self._base_digest, self._size = config, base_digest, size
        self._actors: list[Any] = []
        self._group: Any = None
        self._manifest: Manifest | None = None
        self.waiting: list[Any] = []

    def begin(self, name: str, run: str, force: bool) -> None:
        """Have all ranks train an adapter.

        Raises:
            PlacementError: there is no room for all of them.
        """
        if not self._actors:
            self._start()
        self._manifest = None
        self.waiting = [actor.train.remote(name, run, force) for actor in self._actors]

    def took(self, ref: Any, name: str) -> Manifest | HybridError | None:
        """What became of the adapter, once a rank has ended; None while others still work."""
        from ray.exceptions import RayActorError, RayTaskError

        self.waiting.remove(ref)
        error: HybridError
        try:
            self._manifest = ray.get(ref) or self._manifest
            return None if self.waiting else self._manifest
        except RayTaskError as e:
            cause = e.cause
            error = (
                cause
                if isinstance(cause, HybridError)
                else TrainingError(f"training {name} failed: {cause!r}")
            )
            if self._size > 1:  # the others may wait for this rank for ever
                self.end()
        except RayActorError:
            self.end()
            error = Unavailable(
                f"a process that trained {name} is gone (out of memory?); run it again, and it"
                " goes on from its last checkpoint"
            )
        return error

    def end(self) -> None:
        """End its processes."""
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._actors, self._group, self.waiting = [], None, []

    def _start(self) -> None:
        gpu = any(n["Resources"].get("GPU") for n in ray.nodes() if n["Alive"])
        needs = {"CPU": self._config.training.cpus_per_worker, GPU.resource: 1}
        options: dict[str, Any] = {
            "num_cpus": needs["CPU"],
            "resources": {GPU.resource: 1},
            "max_restarts": 0,
            **({"num_gpus": 1} if gpu else {}),
        }
        if self._size == 1:
            options["label_selector"] = GPU.label_selector
        else:  # all or none: half a team would wait for ever for the other half
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            self._group = ray.util.placement_group(
                [{**needs, **({"GPU": 1} if gpu else {})}] * self._size,
                bundle_label_selector=[GPU.label_selector] * self._size,
            )
            if not self._group.wait(_PLACE_S):
                self.end()
                raise PlacementError(
                    f"lora.workers: no room for {self._size} processes of"
                    f" {needs['CPU']:g} CPUs in the gpu pool within {_PLACE_S:g} s"
                )
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group)
        made = ray.remote(LoraWorker).options(**options)
        self._actors = [
            made.remote(self._config, self._base_digest, rank, self._size)
            for rank in range(self._size)
        ]
        if self._size > 1:
            address = ray.get(self._actors[0].address.remote())
            ray.get([actor.join.remote(address, gpu) for actor in self._actors])


class LoraWorker:
    """A Ray actor: one rank of a team, which trains one adapter after another."""

    def __init__(
        self, config: ProjectConfig, base_digest: str, rank: int = 0, size: int = 1
    ) -> None:
        import torch

        if not torch.cuda.is_available():
            torch.set_num_threads(max(1, int(config.training.cpus_per_worker)))
        self._config, self._rank, self._size = config, rank, size
        self._registry = Registry(config.registry.root, cache=config.registry.cache)
        resolved = self._registry.by_digest(base_digest)
        self._base_path, self._base_digest = resolved.path, base_digest
        self._base_name = f"{resolved.manifest.name}@{base_digest}"
        self._base: Any = None

    def address(self) -> str:
        """Where rank 0 can be reached: a free port of its node."""
        import socket

        with socket.socket() as found:
            found.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def join(self, address: str, gpu: bool) -> None:
        """Enter the team's process group."""
        import torch.distributed as dist

        dist.init_process_group(
            backend(gpu),
            init_method=address,
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=self._config.training.faults.hang_s),
        )

    def train(self, name: str, run: str, force: bool) -> Manifest | None:
        """Train; on rank 0 also judge and publish. The other ranks return None.

        Raises:
            AdapterRefused: the engine would not serve it. TrainingError: it does not beat what it
            is to beat by the margin, or diverged.
        """
        from hybrid.training.evaluate import evaluate, shortfall
        from hybrid.training.lora import train_adapter
        from hybrid.training.servable import check_servable

        spec = self._config.adapters[name]
        check_servable(name, spec, self._base_path, self._config.serving.backend)
        data = rows.read(name, spec)
        folder: Path = self._config.run.dir / "adapters" / run
        progress = Progress(folder, enabled=self._rank == 0)
        started = time.monotonic()
        trained = train_adapter(
            self._base_for(spec.lora.base_precision),
            spec,
            data,
            folder / "adapter",
            seed=self._config.run.seed,
            report=lambda record: progress.write("step", **record),
        )
        if self._rank > 0:
            return None
        seconds = time.monotonic() - started
        progress.write("judging")
        # A base that needs several devices is judged in the host's memory.
        device = "cpu" if self._size > 1 else None
        judged = evaluate(self._base_path, folder / "adapter", spec, data, name=name, device=device)
        metrics = {**trained, **judged, "train_seconds": round(seconds, 1)}
        if (why := shortfall(spec, metrics)) and not force:
            raise TrainingError(
                f"{why}: not published; train longer, look at the data, or publish it with --force"
            )
        manifest = self._registry.publish(
            "adapter",
            name,
            folder / "adapter",
            base_digest=self._base_digest,
            run_id=run,
            data_digest=data.digest,
            metrics=metrics,
        )
        (folder / FILE).unlink()
        return manifest

    def _base_for(self, precision: str) -> Any:
        """The base in memory; read again for another precision, and where it is sharded."""
        from hybrid.training.lora import Base

        if self._base is None or self._size > 1 or self._base.precision != precision:
            self._base = None  # let go of the old one first
            self._base = Base(self._base_path, self._base_name, precision, sharded=self._size > 1)
        return self._base
