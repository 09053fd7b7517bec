"""What a lost worker, a lost node and a spot notice cost a training run: ours against Ray Train's
defaults.

    python benchmarks/recovery.py [--quick] [--json -]

A real cluster on this machine: a head and three nodes with one slot each; two workers, checkpoints
every 20 steps, each fault half way between two of them. The peer is the loop of Ray Train's guide
(DDP, a checkpoint through `report`, resume from `get_checkpoint`) with default settings; where its
`fit()` ends with an error it is called again at once, as somebody who watches would do.

- `steps_lost_kill`, `steps_lost_node`, `steps_lost_notice`: steps that had to be done again, after
  a worker's SIGKILL, a node's, and a notice of 15 s for the node of rank 0, which is then taken
  away
- `seconds_to_next_step` (of the worker's kill), `seconds_node`, `seconds_notice`: from the fault
  (or the end of the notice) until the run is further than it was
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULTS = ("kill", "node", "notice")
EVERY, FAULT_AT, BEYOND = 20, 30, 40
NOTICE_S = 15
DEADLINE_S = 240.0


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


# --- the cluster ----------------------------------------------------------------------------------


class Machines:
    """A head and nodes with one slot of the gpu pool each."""

    def __init__(self) -> None:
        # Unix socket paths are short, so not below a long temporary folder.
        self.folder = Path(tempfile.mkdtemp(prefix="hy-"))
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": str(self.folder),
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            ).strip(os.pathsep),
        }
        os.environ.pop("RAY_ADDRESS", None)
        import ray
        from ray.cluster_utils import Cluster

        from hybrid.pools import HEAD

        self.cluster: Any = Cluster(shutdown_at_exit=True)
        self.cluster.add_node(
            num_cpus=2, resources=HEAD.resources(1), labels=HEAD.labels(),
            object_store_memory=128 << 20, include_dashboard=False,
            temp_dir=str(self.folder / "ray"),
        )  # fmt: skip
        for _ in range(3):
            self.add()
        ray.init(address=self.cluster.address, log_to_driver=False, namespace="hybrid")

    def add(self) -> None:
        """One node more."""
        from hybrid.pools import GPU

        self.cluster.add_node(
            num_cpus=1, resources=GPU.resources(1), labels=GPU.labels(),
            object_store_memory=128 << 20,
        )  # fmt: skip

    def lose(self, node_id: str) -> None:
        """Take a node away at once."""
        node = next(n for n in self.cluster.worker_nodes if n.node_id == node_id)
        self.cluster.remove_node(node, allow_graceful=False)

    def notice(self, node_id: str, seconds: int) -> None:
        """What a spot watcher calls."""
        subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "drain-node",
                "--address", self.cluster.address, "--node-id", node_id,
                "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
                "--deadline-remaining-seconds", str(seconds),
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip

    def close(self) -> None:
        """Everything that was started."""
        import ray

        ray.shutdown()
        for node in list(self.cluster.worker_nodes):
            self.cluster.remove_node(node)
        self.cluster.remove_node(self.cluster.head_node)
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)


# --- the two runs ---------------------------------------------------------------------------------


def ours(folder: Path, steps: int) -> Callable[[], None]:
    """`train_base` of a small project; its progress lies in `folder`/run/runs/r."""
    from hybrid import config
    from hybrid.registry import Registry
    from hybrid.training.trainer import train_base

    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    made = config.parse(
        {
            "run": {"name": "t", "dir": str(folder / "run")},
            "model": {
                "name": "b", "hidden_size": 192, "intermediate_size": 512, "layers": 4,
                "heads": 4, "kv_heads": 2, "context": 128,
            },
            "data": {"train": [str(folder / "corpus.txt")], "tokenizer": {"vocab_size": 512}},
            "training": {
                "steps": steps, "sequence_length": 128, "micro_batch": 4, "micro_batches": 4,
                "strategy": "ddp", "workers": 2, "eval_every": 10**6,
                "checkpoint": {"every": EVERY},
            },
        }
    )  # fmt: skip
    registry = Registry(str(folder / "registry"), cache=folder / "cache")
    return lambda: (train_base(made, registry, run_id="r"), None)[1]


def peer(folder: Path, steps: int) -> Callable[[], None]:
    """Ray Train as its guide has it, with defaults; its progress lies in the same place."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from hybrid.pools import GPU

    def fit() -> None:
        TorchTrainer(
            _peer_worker,
            train_loop_config={"progress": str(folder / "run/runs/r"), "steps": steps},
            scaling_config=ScalingConfig(
                num_workers=2, resources_per_worker={"CPU": 1, GPU.resource: 1}
            ),
            run_config=RunConfig(name="peer", storage_path=str(folder / "storage")),
        ).fit()

    def run() -> None:
        from ray.train.v2.api.exceptions import TrainingFailedError

        while True:
            try:
                return fit()
            except TrainingFailedError:
                say("    fit() ended with an error, as max_failures=0 has it; called again")

    return run


def _peer_worker(arguments: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hybrid.training.progress import Progress

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = ray.train.torch.prepare_model(LlamaForCausalLM(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as at:
            state = torch.load(Path(at) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    context = ray.train.get_context()
    first = context.get_world_rank() == 0
    progress = Progress(Path(arguments["progress"]), enabled=first)
    mine = {
        "rank": context.get_world_rank(),
        "node": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
    }
    everyone: list[Any] = [None] * context.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    progress.write("start", step=start, workers=everyone)
    for step in range(start, arguments["steps"]):
        for _ in range(2):
            ids = torch.randint(0, 512, (4, 128))
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        progress.write("step", step=done)
        if done % EVERY == 0:
            with tempfile.TemporaryDirectory() as at:
                saved = None
                if first:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "step": done}, Path(at) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(at)
                ray.train.report({"step": done}, checkpoint=saved)


# --- the faults -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What a fault cost."""

    steps: int
    seconds: float


def suffer(fault: str, machines: Machines, folder: Path, run: Callable[[], None]) -> Lost:
    """Run until `FAULT_AT`, do it, and run on until it is further than before."""
    errors: list[BaseException] = []

    def whole() -> None:
        try:
            run()
        except BaseException as e:  # noqa: BLE001 - raised in the caller's thread
            errors.append(e)

    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    records = Records(folder / "run/runs/r", errors)
    records.until(lambda r: r.last_step >= FAULT_AT)
    worker = records.workers[1]
    if fault == "kill":
        os.kill(worker["pid"], signal.SIGKILL)
    elif fault == "node":
        machines.lose(worker["node"])
    else:
        worker = records.workers[0]
        machines.notice(worker["node"], NOTICE_S)
        time.sleep(NOTICE_S)  # the notice is this long, whoever does what with it
        machines.lose(worker["node"])
    at = time.time()
    before = records.read().last_step
    attempts = records.attempts
    records.until(lambda r: r.attempts > attempts or r.started_after(at - NOTICE_S))
    before = max(before, records.read().last_step_before_last_start)
    records.until(lambda r: r.last_step > before)
    lost = Lost(steps=before - records.last_start, seconds=records.time_of(before + 1) - at)
    thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    if fault != "kill":
        machines.add()
    return lost


class Records:
    """A run's progress file, read again and again."""

    def __init__(self, folder: Path, errors: list[BaseException]) -> None:
        self._folder, self._errors = folder, errors
        self.all: list[dict[str, Any]] = []

    def read(self) -> Records:
        """All records so far."""
        from hybrid.training.progress import read_progress

        self.all = read_progress(self._folder)
        return self

    def until(self, condition: Callable[[Records], bool]) -> None:
        """Read until it is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.read()):
            if self._errors:
                raise self._errors[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run stands at {self.all[-1:]}")
            time.sleep(0.05)

    @property
    def starts(self) -> list[int]:
        """Places of the attempts' beginnings."""
        return [i for i, r in enumerate(self.all) if r["event"] == "start"]

    @property
    def attempts(self) -> int:
        """How often workers began."""
        return len(self.starts)

    @property
    def workers(self) -> list[dict[str, Any]]:
        """Of the newest attempt, in order of rank."""
        found: list[dict[str, Any]] = self.all[self.starts[-1]]["workers"]
        return found

    @property
    def last_start(self) -> int:
        """The step that the newest attempt went on from."""
        return int(self.all[self.starts[-1]]["step"])

    def started_after(self, at: float) -> bool:
        """Whether the newest attempt began then."""
        return bool(self.starts) and self.all[self.starts[-1]]["time"] > at

    @property
    def last_step(self) -> int:
        """Steps done."""
        return max((r["step"] for r in self.all if r["event"] == "step"), default=0)

    @property
    def last_step_before_last_start(self) -> int:
        """Steps done when the newest attempt began."""
        before = self.all[: self.starts[-1]]
        return max((r["step"] for r in before if r["event"] == "step"), default=0)

    def time_of(self, step: int) -> float:
        """When a step was first done."""
        return min(float(r["time"]) for r in self.all if r["event"] == "step" and r["step"] >= step)


def claims(faults: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """(claim, ours, peer)."""
    machines = Machines()
    try:
        for fault in faults:
            found: dict[str, Lost] = {}
            for name, make in (("ours", ours), ("Ray Train", peer)):
                folder = Path(tempfile.mkdtemp(prefix="hybrid-recovery-"))
                steps = FAULT_AT + BEYOND + (120 if fault == "notice" else 0)
                try:
                    found[name] = suffer(fault, machines, folder, make(folder, steps))
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                say(f"  {fault}, {name}: {found[name].steps} steps, {found[name].seconds:.1f} s")
            mine, theirs = found["ours"], found["Ray Train"]
            yield f"steps_lost_{fault}", mine.steps, theirs.steps
            label = "seconds_to_next_step" if fault == "kill" else f"seconds_{fault}"
            yield label, mine.seconds, theirs.seconds
    finally:
        machines.close()


def main() -> None:
    """Parse, break things, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the killed worker only")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="these only")
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    result = {}
    for name, mine, theirs in claims(FAULTS[:1] if arguments.quick else arguments.faults or FAULTS):
        ratio = round(mine / theirs, 3) if theirs else None
        result[name] = {"ours": round(mine, 2), "peer": round(theirs, 2), "ratio": ratio}
        say(f"{name}: {result[name]}")
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
