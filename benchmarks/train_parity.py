"""What our training loop costs beside a loop written by hand, and beside transformers' Trainer.

    python benchmarks/train_parity.py [--quick] [--json -]

The same Llama (10 M parameters, float32), 4,096 tokens a step (2,048 with --quick), two processes
of one thread each:

- ours: `jobs/train.py`, under Ray Train, with everything that it does by default
- torchrun: FSDP2 as its tutorial has it (a shard a layer, reshard after forward, AdamW, clipping)
- Trainer: transformers', under torchrun, which on processors is DDP; so is ours beside it
- `ours, compiled` and `Trainer, compiled`: the same two with torch.compile

Those that are compared are all started, then stopped (SIGSTOP; Ray's processes with ours) but for
the one whose turn it is, some whole steps each, round after round: a shared machine drifts by more
than what is to be told apart. The median of the rounds counts, and a ratio is the median of the
rounds' ratios; the quartiles of those say how much it can tell.

- `vs_torchrun`: tokens/s with FSDP2
- `vs_trainer`: tokens/s of ours, compiled, over those of the Trainer, compiled or not, whichever is
  the faster over all; `eager_vs_trainer`: neither compiled
- `peak_fraction`: FLOP/s that training needs, recomputation not counted, over what both processes
  reach at once in three seconds of matrix products before the round; of ours, compiled.
  `peak_fraction_fsdp`: with FSDP2, whose gathered parameters go through sockets on the same cores
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_parity_contenders import (
    FULL,
    MODEL,
    QUICK,
    SEQUENCE,
    WORKERS,
    Contender,
    Ours,
    OursCompiled,
    OursDdp,
    Size,
    Torchrun,
    Trainer,
    TrainerCompiled,
    environment,
    say,
)
from train_parity_peers import PEAK

Rates = dict[str, list[float]]


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
