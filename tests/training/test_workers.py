"""Workers under real Ray Train: taken away with notice, killed, more of them, another's driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid import config
from hybrid.config import ProjectConfig
from hybrid.errors import HybridError, PlacementError, TrainingError
from hybrid.pools import GPU
from hybrid.registry import Registry
from hybrid.training.fence import Fence
from hybrid.training.notice import HOLD_S, NOTHING, Notice
from hybrid.training.progress import read_progress

STEPS, EVERY = 130, 10
DEADLINE_S = 120.0


def project(folder: Path, **training: Any) -> ProjectConfig:
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    return config.parse(
        {
            "run": {"name": "t", "dir": str(folder / "run")},
            "model": {
                "name": "b", "hidden_size": 64, "intermediate_size": 128, "layers": 2,
                "heads": 4, "kv_heads": 2, "context": 128,
            },
            "data": {"train": [str(folder / "corpus.txt")], "tokenizer": {"vocab_size": 300}},
            "training": {
                "steps": STEPS, "sequence_length": 128, "micro_batch": 8, "micro_batches": 4,
                "eval_every": 10**6, "checkpoint": {"every": EVERY}, **training,
            },
        }
    )  # fmt: skip


class Run:
    """`train_base` in a thread, and its progress file."""

    def __init__(self, made: ProjectConfig, folder: Path) -> None:
        from hybrid.training.trainer import train_base

        self._folder = folder / "run/runs/r"
        self.error: HybridError | None = None
        self.manifest: Any = None
        registry = Registry(str(folder / "registry"), cache=folder / "cache")

        def run() -> None:
            try:
                self.manifest = train_base(made, registry, run_id="r")
            except HybridError as e:
                self.error = e

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [r for r in read_progress(self._folder) if r["event"] == event]

    @property
    def done(self) -> int:
        return max((r["step"] for r in self.of("step")), default=0)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.error is None, self.error
            assert time.monotonic() < deadline, read_progress(self._folder)[-3:]
            time.sleep(0.05)

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def occupy(slots: int) -> Any:
    """An actor that holds slots of the gpu pool."""
    import ray

    class Holder:
        def here(self) -> bool:
            return True

    options: dict[str, Any] = {"resources": {GPU.resource: slots}, "num_cpus": 0}
    holder = ray.remote(Holder).options(**options).remote()
    assert ray.get(holder.here.remote(), timeout=60)
    return holder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_outlives_its_nodes_and_workers_and_grows(
    ray_cluster: Any, tmp_path: Path, most: int
) -> None:
    """Two workers on a node that is reclaimed, rank 0's; then `most` elsewhere; one is killed."""
    import ray

    holder = occupy(4)  # so that the workers begin on the node that will go
    node = ray_cluster.cluster.add_node(
        num_cpus=4, resources=GPU.resources(2), labels=GPU.labels(), object_store_memory=128 << 20
    )
    try:
        run = Run(
            project(
                tmp_path, workers=[1, most], strategy="ddp", resize_s=3, usd_per_hour=3,
                preflight="off",  # test_preflight.py has its own cluster test
            ),
            tmp_path,
        )  # fmt: skip
        run.until(lambda: run.done >= EVERY + 3)
        [first] = run.of("start")
        assert [w["node"] for w in first["workers"]] == [node.node_id] * 2
        give_notice(ray_cluster, node.node_id, 60)
        run.until(lambda: bool(run.of("notice")))
        assert run.of("notice")[0]["kind"] == "reclaim", "there is no room elsewhere"
        ray.kill(holder)
        run.until(lambda: len(run.of("start")) == 2)
        second = run.of("start")[1]
        ray_cluster.cluster.remove_node(node)
        node = None
        assert run.of("notice")[-1]["kind"] == "move"
        moved = run.of("notice")[-1]["step"]
        assert second["step"] == moved, "no step was lost"
        assert second["world_size"] == most, "as many as there was room for"
        run.until(lambda: run.done >= moved + EVERY + 3)
        os.kill(run.of("start")[-1]["workers"][1]["pid"], signal.SIGKILL)
        run.until(lambda: len(run.of("start")) == 3)
        third = run.of("start")[2]
        run.join()
    finally:
        if node is not None:
            ray_cluster.cluster.remove_node(node)
    steps = run.of("step")
    assert {r["step"] for r in steps} == set(range(1, STEPS + 1))
    again = len(steps) - STEPS
    before = max(r["step"] for r in steps if r["time"] < third["time"])
    assert again == before - third["step"] <= EVERY, "a kill costs one interval at most"
    losses: dict[int, list[float]] = {}
    for r in steps:
        losses.setdefault(r["step"], []).append(r["loss"])
    for twice in losses.values():
        assert twice == pytest.approx([twice[0]] * len(twice), abs=1e-5), "the same step, again"
    assert run.manifest.metrics["steps"] == STEPS
    figures = json.loads((tmp_path / "run/runs/r/report.json").read_text())
    assert (figures["state"], figures["recomputed_steps"]) == ("finished", again)
    assert [a["outcome"] for a in figures["attempts"]] == ["moved", "killed", "finished"]
    assert sum(figures["seconds"].values()) == pytest.approx(figures["wall_s"])
    for spent in ("startup", "productive", "recomputed", "idle", "checkpoint", "data"):
        assert figures["seconds"][spent] > 0, spent
    assert figures["cost_usd"] == pytest.approx(3 * figures["worker_hours"])
    assert (tmp_path / "run/runs/r/report.html").stat().st_size > 10_000


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_driver_and_a_lost_node_cost_an_interval_at_most(
    ray_cluster: Any, tmp_path: Path
) -> None:
    made = project(tmp_path, workers=2, strategy="fsdp")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made.model_dump(mode="json")))
    code = (
        "import json, sys, ray\nfrom pathlib import Path\nfrom hybrid import config\n"
        "from hybrid.registry import Registry\nfrom hybrid.training.trainer import train_base\n"
        "ray.init(address='auto', namespace='hybrid')\n"
        "made = config.parse(json.loads(Path(sys.argv[1]).read_text()))\n"
        "root = Path(sys.argv[1]).parent\n"
        "train_base(made, Registry(str(root / 'registry'), cache=root / 'cache'), run_id='r')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], env=ray_cluster.env) as driver:
        folder = tmp_path / "run/runs/r"
        deadline = time.monotonic() + DEADLINE_S
        while max((r.get("step", 0) for r in read_progress(folder)), default=0) < EVERY + 3:
            assert time.monotonic() < deadline
            assert driver.poll() is None
            time.sleep(0.05)
        driver.kill()
    holder = occupy(3)  # the second worker has to go to the node that will be lost
    node = ray_cluster.cluster.add_node(
        num_cpus=4, resources=GPU.resources(1), labels=GPU.labels(), object_store_memory=128 << 20
    )
    run = Run(made, tmp_path)
    run.until(lambda: len(run.of("start")) == 2)
    first, second = run.of("start")
    steps = [r for r in run.of("step") if r["time"] < second["time"]]
    assert max(r["step"] for r in steps) - second["step"] <= EVERY
    assert second["step"] >= EVERY
    assert first["workers"] != second["workers"]
    run.until(lambda: run.done >= second["step"] + EVERY + 3)
    assert node.node_id in {w["node"] for w in second["workers"]}
    ray_cluster.cluster.remove_node(node, allow_graceful=False)
    import ray

    ray.kill(holder)
    run.join()
    third = run.of("start")[2]
    steps = [r for r in run.of("step") if r["time"] < third["time"]]
    assert 0 <= max(r["step"] for r in steps) - third["step"] <= EVERY


def give_notice(ray_cluster: Any, node: str, seconds: int) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--address", ray_cluster.address, "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command += ["--deadline-remaining-seconds", str(seconds)]
    subprocess.run(command, env=ray_cluster.env, check=True, capture_output=True, timeout=60)


def test_slots_that_are_not_there_are_said_to_lack(ray_cluster: Any) -> None:
    from hybrid.training.slots import wait_for_slots

    with pytest.raises(PlacementError, match=r"needs 99 slots .* in the gpu pool; 4 are free of"):
        wait_for_slots(99, 99, 1.0, timeout_s=0.1)
    assert wait_for_slots(1, 3, 1.0) == 3
    assert wait_for_slots(2, 99, 2.0) == 2, "of two CPUs each only two fit"
    holder = occupy(3)
    with pytest.raises(PlacementError, match=r"1 are free of the 4"):
        wait_for_slots(2, 2, 1.0, timeout_s=0.1)
    import ray

    threading.Timer(1.0, ray.kill, [holder]).start()
    assert wait_for_slots(2, 4, 1.0, timeout_s=30) >= 2, "what came while it waited"


def test_the_newest_attempt_owns_a_run(tmp_path: Path) -> None:
    one, two = Fence(tmp_path), Fence(tmp_path)
    one.take()
    assert not one.lost()
    two.take()
    assert one.lost() and not two.lost()
    assert isinstance(one.taken(), TrainingError)
    assert str(tmp_path) in one.taken().message
    (tmp_path / "attempt").unlink()
    assert two.lost(), "started afresh"


def test_workers_stand_still_only_shortly_before_a_deadline() -> None:
    now = time.time()
    assert not NOTHING.hold(1)
    assert not Notice(kind="move", deadline=now).hold(1)
    assert not Notice(kind="reclaim").hold(1), "no deadline: commit each step until taken"
    assert not Notice(kind="reclaim", deadline=now + HOLD_S + 5).hold(0.1)
    assert Notice(kind="reclaim", deadline=now + HOLD_S - 1).hold(0.1)
    assert Notice(kind="reclaim", deadline=now + 60).hold(40), "a step takes longer than is left"
    assert Notice(kind="reclaim", deadline=now - 1).hold(0)
