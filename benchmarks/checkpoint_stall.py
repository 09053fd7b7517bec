"""What checkpoints cost a run: written beside training, and with training held up meanwhile.

    python benchmarks/checkpoint_stall.py [--quick] [--json -]

The real loop on two processes (FSDP2 over gloo, a thread each), 105 M numbers of state: a Llama
of 35 M parameters and AdamW's two moments of each, 420 MB in float32. The storage is a folder
behind an fsspec file system that takes 200 MB/s from both ranks together. The same run without
checkpoints, with asynchronous and with synchronous ones takes turns in one pair of processes.

A run's time is from its first step's end to its last step's, or until the last checkpoint in
between is committed where that is later. (Every run also saves at its very end, when there is
nothing left to train beside; that is left out for all three.)

`async_vs_sync` is (asynchronous - none) / (synchronous - none), each difference the median over
the rounds of what it is within one round (a machine drifts over minutes by as much as a
checkpoint costs); 0.15 or less is claimed. A run takes about 40 s, the whole about 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsspec.implementations.local import LocalFileSystem

from hybrid import config
from hybrid.training.data import prepare_data
from hybrid.training.loop import Job, train
from hybrid.training.progress import read_progress

RANKS = 2
BYTES_PER_S = 200e6
MODEL = {
    "name": "stall", "hidden_size": 640, "intermediate_size": 1728, "layers": 7, "heads": 10,
    "kv_heads": 10, "context": 128,
}  # fmt: skip
VARIANTS = ("none", "asynchronous", "synchronous")


class SlowFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files that take `BYTES_PER_S` from all ranks together."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("slow://")))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """A file; one that is written is slowed down."""
        Path(self._strip_protocol(path)).parent.mkdir(parents=True, exist_ok=True)
        stream = super().open(path, mode, **options)
        return _Slow(stream) if mode == "wb" else stream


class _Slow:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._free_at = time.monotonic()

    def write(self, data: memoryview) -> int:
        self._free_at = max(self._free_at, time.monotonic()) + len(data) * RANKS / BYTES_PER_S
        written = int(self._stream.write(data))
        time.sleep(max(0.0, self._free_at - time.monotonic()))
        return written

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> _Slow:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def job(root: Path, name: str, variant: str, every: int, steps: int) -> Job:
    """One run of `steps` steps, with a checkpoint every `every` of them or none."""
    made = config.parse(
        {
            "run": {"name": "stall", "dir": str(root)},
            "model": MODEL,
            "data": {"train": [str(root / "corpus.txt")], "tokenizer": {"vocab_size": 512}},
            "training": {
                "steps": steps,
                "sequence_length": 128,
                "micro_batch": 2,
                "micro_batches": RANKS,
                "strategy": "fsdp",
                "workers": RANKS,
                "checkpoint": {
                    "every": 10**6 if variant == "none" else every,
                    "asynchronous": variant != "synchronous",
                    "keep": 1,
                    "storage": f"slow://{root}/checkpoints",
                },
            },
        }
    )
    return Job(config=made, data=prepare_data(made), run_id=name)


def seconds(folder: Path, steps: int) -> float:
    """A run's time, from its own record."""
    records = read_progress(folder)
    ends = [r["time"] for r in records if r["event"] == "step"]
    between = [r["time"] for r in records if r["event"] == "checkpoint" and r["step"] < steps]
    return float(max([ends[-1], *between]) - ends[0])


def _rank(rank: int, root: str, jobs: list[tuple[str, Job]]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=RANKS
    )
    for name, made in jobs:
        train(made)
        if rank == 0:
            took = seconds(made.folder, made.config.training.steps)
            saves = [r for r in read_progress(made.folder) if r["event"] == "checkpoint"]
            stalls = [r["stall_s"] for r in saves]
            sys.stderr.write(f"{name}: {took:.2f} s; held up {stalls[:-1]} s\n")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group


def rounds(root: Path, count: int, every: int, saves: int) -> Iterator[tuple[str, float]]:
    """Each variant's time in each round; the order changes from round to round."""
    steps = every * (saves + 1)
    jobs = []
    for number in range(count):
        turn = VARIANTS[number % 3 :] + VARIANTS[: number % 3]
        jobs += [(v, job(root, f"{v}-{number}", v, every, steps)) for v in turn]
    mp.spawn(_rank, args=(str(root), jobs), nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]
    for variant, made in jobs:
        yield variant, seconds(made.folder, steps)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, under a minute")
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    arguments = parser.parse_args()
    count, every, saves = (1, 4, 2) if arguments.quick else (6, 4, 3)
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="hybrid-bench-") as folder:
        root = Path(folder)
        lines = (f"{n} bottles of salt, {n * n % 97} of wine\n" for n in range(20_000))
        (root / "corpus.txt").write_text("".join(lines))
        for variant, took in rounds(root, count, every, saves):
            times[variant].append(took)
    for variant in VARIANTS:
        sys.stderr.write(f"{variant}: median {statistics.median(times[variant]):.2f} s\n")
    ours, peer = (
        statistics.median(
            took - none for took, none in zip(times[variant], times["none"], strict=True)
        )
        for variant in VARIANTS[1:]
    )
    ratio = ours / peer
    sys.stderr.write(f"async_vs_sync: {ratio:.3f} of {peer / saves:.2f} s a checkpoint\n")
    result = {
        "async_vs_sync": {
            "ours": round(ours, 3), "peer": round(peer, 3), "ratio": round(ratio, 3)
        }
    }  # fmt: skip
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
