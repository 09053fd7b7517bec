"""What our training loop costs beside a loop written by hand, and beside transformers' Trainer.

    python benchmarks/train_parity.py [--quick] [--json -]

The same Llama (10 M parameters, float32), 4,096 tokens a step (2,048 with --quick), two processes
of one thread each:

- ours: `jobs/train.py`, under Ray Train, with everything that it does by default
- torchrun: FSDP2 as its tutorial has it (a shard a layer, reshard after forward, AdamW, clipping)
- Trainer: transformers', under torchrun, which on processors is DDP; so is ours beside it
- `ours, compiled` and `Trainer, compiled`: the same two with torch.compile

Those that are compared are all started, then stopped (SIGSTOP) but for the one whose turn it is,
some whole steps each, round after round: a shared machine drifts by more than what is to be told
apart. The median of the rounds counts, and a ratio is the median of the rounds' ratios; the
quartiles of those say how much it can tell.

- `vs_torchrun`: tokens/s with FSDP2
- `vs_trainer`: tokens/s of ours, compiled, over those of the Trainer, compiled or not, whichever is
  the faster over all; `eager_vs_trainer`: neither compiled
- `peak_fraction`: FLOP/s that training needs, recomputation not counted, over what both processes
  reach at once in three seconds of matrix products before the round; of ours, compiled.
  `peak_fraction_fsdp`: with FSDP2, whose gathered parameters go through sockets on the same cores
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_parity_peers import PEAK, TORCHRUN, TRAINER

Rates = dict[str, list[float]]
ROOT = Path(__file__).parents[1]
MODEL = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
SEQUENCE, MICRO_BATCHES, WORKERS = 128, 4, 2


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
    turn: int = 2
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
    """A training under way, whose processes are let run only in its turns."""

    name: str
    folder: Path
    size: Size
    rounds: int
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    rates: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

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
        self.ranks = [pid for pid, command in marked(self.mark) if self.is_rank(command)]
        if len(self.ranks) != WORKERS:
            raise SystemExit(f"{self.name}: {WORKERS} ranks expected, found {self.ranks}")
        self.send(signal.SIGSTOP)
        say(f"{self.name} trains")
        return True

    def send(self, number: signal.Signals) -> None:
        """To both ranks."""
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def turn(self) -> None:
        """Let it run for some whole steps, and keep their rate."""
        before = len(self.times())
        wanted = before + 1 + self.size.turn  # the first one was under way when it was stopped
        deadline = time.monotonic() + 120
        self.send(signal.SIGCONT)
        while len(self.times()) < wanted:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} has ended, or its steps take too long")
            time.sleep(0.05)
        self.send(signal.SIGSTOP)
        times = self.times()[before:wanted]
        self.rates.append(self.size.tokens * self.size.turn / (times[-1] - times[0]))

    def end(self) -> None:
        """Let the ranks run, and end what is left through the launcher."""
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


class Peak:
    """What both processes reach at once in matrix products: FLOP/s."""

    def __init__(self, seconds: float) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PEAK, str(seconds)],
                env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(WORKERS)
        ]  # fmt: skip

    def measure(self) -> float:
        """Of all processes together, over the same seconds."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(float(p.stdout.readline()) for p in self.processes if p.stdout is not None)

    def end(self) -> None:
        """They end with their input."""
        for process in self.processes:
            process.communicate()


def flops_per_token() -> float:
    """6 a parameter in a matrix product, and attention (Chowdhery et al. 2022, appendix B)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**MODEL)).parameters())
    attention = 12 * MODEL["num_hidden_layers"] * MODEL["hidden_size"] * SEQUENCE
    return float(6 * parameters + attention)


def rounds(kinds: dict[str, type[Contender]], count: int, size: Size) -> tuple[Rates, list[float]]:
    """Start them, give each its turns.

    Returns:
        Tokens/s of each in each round, and the FLOP/s that were reached before each round.
    """
    peaks = []
    with contextlib.ExitStack() as stack:
        peak = Peak(size.peak_s)
        stack.callback(peak.end)
        contenders = []
        for name, kind in kinds.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hy-")))
            contender = kind(name, folder, size, count)
            contender.start()
            stack.callback(contender.end)
            contenders.append(contender)
        waiting = contenders
        while waiting := [c for c in waiting if not c.settled()]:
            time.sleep(0.1)
        for number in range(count):
            peaks.append(peak.measure())
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                contender.turn()
            say("  " + ", ".join(f"{c.name} {c.rates[-1]:.0f}" for c in contenders) + " tok/s")
    return {contender.name: contender.rates for contender in contenders}, peaks


def claims(quick: bool) -> dict[str, dict[str, float]]:
    """Measure those of FSDP2, then those of DDP; compare."""
    flops = flops_per_token()
    pair: dict[str, type[Contender]] = {"ours, fsdp": Ours, "torchrun": Torchrun}
    rates, peaks = rounds(pair, 3, QUICK) if quick else rounds(pair, 15, FULL)
    found = {
        "vs_torchrun": claim(rates["ours, fsdp"], rates["torchrun"]),
        "peak_fraction_fsdp": claim([r * flops for r in rates["ours, fsdp"]], peaks),
    }
    if not quick:
        rates, peaks = rounds(
            {
                "ours, ddp": OursDdp, "Trainer": Trainer,
                "ours, compiled": OursCompiled, "Trainer, compiled": TrainerCompiled,
            },
            12,
            FULL,
        )  # fmt: skip
        best = max(rates["Trainer"], rates["Trainer, compiled"], key=statistics.median)
        found["vs_trainer"] = claim(rates["ours, compiled"], best)
        found["eager_vs_trainer"] = claim(rates["ours, ddp"], rates["Trainer"])
        found["peak_fraction"] = claim([r * flops for r in rates["ours, compiled"]], peaks)
    return found


def claim(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Medians over the rounds; the median and the quartiles of the rounds' ratios."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ours": round(statistics.median(ours), 1),
        "peer": round(statistics.median(peer), 1),
        "ratio": round(middle, 3),
        "ratio_q1": round(low, 3),
        "ratio_q3": round(high, 3),
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three rounds of half a step's rows, without the Trainer",
    )
    parser.add_argument("--json", metavar="FILE", help="write the claims; - is stdout")
    arguments = parser.parse_args()
    found: dict[str, Any] = claims(arguments.quick)
    for name, figures in found.items():
        say(
            f"{name}: {figures['ours']:,} against {figures['peer']:,}: {figures['ratio']}"
            f" (quartiles {figures['ratio_q1']}, {figures['ratio_q3']})"
        )
    if arguments.json == "-":
        sys.stdout.write(json.dumps(found) + "\n")
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
