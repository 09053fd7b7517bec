"""The trainings that train_parity.py compares: started, let run for a turn, stopped, ended."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from train_parity_peers import TORCHRUN, TRAINER

ROOT = Path(__file__).parents[1]
MODEL = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
SEQUENCE, MICRO_BATCHES, WORKERS = 128, 4, 2
THAW_S = 5.0
"""Ray's processes are let go this long before the ranks: they first do all at once what they would
have done meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        micro_batch: sequences in one.
        warm: steps before the first turn; the first ten or so are slower, ours by more, while Ray
            still starts processes beside them.
        turn: steps in one.
        peak_s: seconds of matrix products before a round.
    """

    micro_batch: int = 8
    warm: int = 10
    turn: int = 4
    peak_s: float = 3.0

    @property
    def tokens(self) -> int:
        """In a step."""
        return SEQUENCE * self.micro_batch * MICRO_BATCHES


FULL, QUICK = Size(), Size(micro_batch=4, warm=3, turn=1, peak_s=1.0)


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass
class Contender(abc.ABC):
    """A training under way, whose ranks are let run only in its turns."""

    name: str
    folder: Path
    size: Size
    rounds: int
    stops_all: ClassVar[bool] = False
    """Whether what stands beside the ranks is stopped with them; torchrun's launcher, which does
    nothing meanwhile, would take its ranks for lost."""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    rates: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """More than it will be let do."""
        return self.size.warm + (self.size.turn + 4) * (self.rounds + 1)

    def environment(self) -> dict[str, str]:
        """With a mark by which its processes are found."""
        return {**environment(), "HYBRID_BENCH": self.mark}

    @abc.abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    @abc.abstractmethod
    def times(self) -> list[float]:
        """When steps ended (seconds since the epoch)."""

    @abc.abstractmethod
    def is_rank(self, command: str) -> bool:
        """Whether a process of that command line is one that computes."""

    def start(self) -> None:
        """Its launcher."""
        self.deadline = time.monotonic() + 600
        self.process = subprocess.Popen(
            self.command(), env=self.environment(), cwd=self.folder,
            stdout=subprocess.DEVNULL, stderr=(self.folder / "stderr").open("w"),
        )  # fmt: skip

    def settled(self) -> bool:
        """Stop it if it is warm by now."""
        if len(self.times()) < self.size.warm:
            if self.process.poll() is not None or time.monotonic() > self.deadline:
                said = (self.folder / "stderr").read_text()[-3000:]
                raise SystemExit(f"{self.name} did not begin to train:\n{said}")
            return False
        ranks = sum(self.is_rank(command) for _, command in marked(self.mark))
        if ranks != WORKERS:
            raise SystemExit(f"{self.name}: {WORKERS} ranks expected, found {ranks}")
        self.send(signal.SIGSTOP)
        self.send(signal.SIGSTOP, ranks=False)
        say(f"{self.name} trains")
        return True

    def send(self, number: signal.Signals, *, ranks: bool = True) -> None:
        """To the ranks, or to what is stopped with them."""
        for pid, command in marked(self.mark):
            if self.is_rank(command) != ranks or not (ranks or self.stops_all):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def turn(self) -> None:
        """Let it run for some whole steps, and keep their rate."""
        before = len(self.times())
        wanted = before + 1 + self.size.turn  # the first one was under way when it was stopped
        deadline = time.monotonic() + 120
        if self.stops_all:
            self.send(signal.SIGCONT, ranks=False)
            time.sleep(THAW_S)
        self.send(signal.SIGCONT)
        while len(self.times()) < wanted:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} has ended, or its steps take too long")
            time.sleep(0.05)
        self.send(signal.SIGSTOP)
        self.send(signal.SIGSTOP, ranks=False)
        times = self.times()[before:wanted]
        self.rates.append(self.size.tokens * self.size.turn / (times[-1] - times[0]))

    def end(self) -> None:
        """Let it run, and end what is left through the launcher."""
        self.send(signal.SIGCONT, ranks=False)
        self.send(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid, _ in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


class Ours(Contender):
    """`jobs/train.py`."""

    strategy = "fsdp"
    stops_all = True
    compiled = False

    def command(self) -> list[str]:
        """The job, and the project that it trains."""
        (self.folder / "corpus.txt").write_text(
            "".join(f"{i * i} and {i * 7919}. " for i in range(6000))
        )
        shape = {
            "name": "base", "hidden_size": MODEL["hidden_size"],
            "intermediate_size": MODEL["intermediate_size"], "layers": MODEL["num_hidden_layers"],
            "heads": MODEL["num_attention_heads"], "kv_heads": MODEL["num_key_value_heads"],
            "context": SEQUENCE,
        }  # fmt: skip
        project = {
            "run": {"name": "parity", "dir": str(self.folder / "run")},
            "model": shape,
            "data": {
                "train": [str(self.folder / "corpus.txt")],
                "tokenizer": {"vocab_size": MODEL["vocab_size"]},
            },
            "training": {
                "steps": self.steps, "sequence_length": SEQUENCE,
                "micro_batch": self.size.micro_batch, "micro_batches": MICRO_BATCHES,
                "strategy": self.strategy, "workers": WORKERS,
                "eval_every": 10**6, "checkpoint": {"every": 10**6},
                "parallel": {"compile": self.compiled},
            },
            "registry": {"root": str(self.folder / "registry"), "cache": str(self.folder / "c")},
        }  # fmt: skip
        file = self.folder / "hybrid.yaml"
        file.write_text(json.dumps(project))  # JSON is YAML
        return [sys.executable, str(ROOT / "jobs/train.py"), "-c", str(file), "--json"]

    def times(self) -> list[float]:
        """From the run's record."""
        found: list[float] = []
        for progress in self.folder.glob("run/runs/*/progress.jsonl"):
            lines = progress.read_text().split("\n")[:-1]  # the last one may be half written
            records = [json.loads(line) for line in lines]
            found += [r["time"] for r in records if r["event"] == "step"]
        return found

    def is_rank(self, command: str) -> bool:
        """Ray names a worker after its class."""
        return "RayTrainWorker" in command


class OursDdp(Ours):
    """The same with DDP."""

    strategy = "ddp"


class OursCompiled(OursDdp):
    """And torch.compile."""

    compiled = True


class Torchrun(Contender):
    """A script under torchrun."""

    code = TORCHRUN
    compiled = False

    def command(self) -> list[str]:
        """The launcher, the script, and what it is to do."""
        script, out = self.folder / "peer.py", self.folder / "times"
        script.write_text(self.code)
        batch = self.size.micro_batch
        what = [MODEL, SEQUENCE, batch, MICRO_BATCHES, self.steps, str(out), self.compiled]
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={WORKERS}", str(script), json.dumps(what),
        ]  # fmt: skip

    def times(self) -> list[float]:
        """From the lines that rank 0 writes."""
        out = self.folder / "times"
        lines = out.read_text().split("\n")[:-1] if out.exists() else []
        return [float(line) for line in lines]

    def is_rank(self, command: str) -> bool:
        """All but the launcher."""
        return "peer.py" in command and "torch.distributed.run" not in command


class Trainer(Torchrun):
    """transformers' Trainer."""

    code = TRAINER


class TrainerCompiled(Trainer):
    """And torch.compile."""

    compiled = True


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Processes that have the mark in their environment, with their command lines."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"HYBRID_BENCH={mark}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    yield int(entry.name), command


def environment() -> dict[str, str]:
    """Of every process that is measured."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**ours, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
