"""Our reader of profiler traces against HolisticTraceAnalysis (HTA), on the same traces.

    python benchmarks/profile_vs_hta.py [--quick] [--json -] [--hta PYTHON]

Traces of two ranks each (`hybrid.testing_traces`), with the events that PyTorch's profiler writes
of a GPU and of the host that launches its work, are read by both; HTA by an interpreter that has
it. What each step goes to was worked out by hand. What is compared, in percent of the time from a
rank's first kernel to its last, as HTA counts it:

- compute: kernels that neither talk nor copy
- rest: exposed communication and copies, which HTA has as one (`non_compute_time`)
- idle: ours is the steps' host wait and idle, less what is before the first kernel and after the
  last
- overlap: of communication, beside compute
- gaps: idle of the only stream by HTA's `get_idle_time_breakdown`, where a trace has one stream

Not compared: HTA blames a stream's gap on the host when the next kernel was launched after the last
one ended; we look at what the host did in it. HTA is asked for the last step too, which it drops by
default, and not to round to whole µs (HTA_DISABLE_NS_ROUNDING=1).

- `by_hand`: our figures that are within 0.01 points of the hand's, over all figures
- `agreement`: our figure and HTA's where they differ most (HTA gives overlap to two digits)
- `hard_error`: points that figures are off by at most, on traces that HTA errs on: kernels of a few
  µs with times in nanoseconds, as PyTorch has written them since 2.4, under HTA's default, which
  rounds every kernel inwards; and collectives that are not NCCL's, which HTA takes for compute
- `seconds`: to read and account for two large traces, without imports; HTA reads them in two
  processes, we in one
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.planning.trace import RankTrace, load, read_trace
from hybrid.planning.verdict import judge
from hybrid.testing_traces import HARD_SHAPES, SHAPES, SHORT_KERNELS, Shape, big

PEER = """
import json, math, sys, time, warnings
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
found = []
for folder, gaps in json.loads(sys.argv[1]):
    start = time.perf_counter()
    analysis = TraceAnalysis(trace_dir=folder, include_last_profiler_step=True)
    whole = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    seconds = time.perf_counter() - start
    ranks = {}
    for rank in whole.index:
        us = {c: float(whole.loc[rank, c + "_time(us)"])
              for c in ("compute", "non_compute", "idle", "kernel")}
        share = float(overlap.loc[rank, "comp_comm_overlap_pctg"])
        us["overlap"] = None if math.isnan(share) else share
        if gaps:
            table, _ = analysis.get_idle_time_breakdown(ranks=[int(rank)], visualize=False)
            us["gaps"] = float(table.idle_time.sum())
        ranks[int(rank)] = us
    found.append({"seconds": seconds, "ranks": ranks})
print(json.dumps(found))
"""
FIGURES = ("compute", "rest", "idle", "overlap", "gaps")
Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A figure of a rank, in percent; None where the reader has none."""

    trace: str
    rank: int
    figure: str
    hand: float
    ours: float
    peer: float | None


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def one_stream(shape: Shape) -> bool:
    """Whether a device of it works on one stream only."""
    return all(len({s for *_, s in pieces if s}) == 1 for pieces in shape.ranks)


def by_hand(shape: Shape, rank: int) -> Figures:
    """The answers of a step, in percent of the device's time."""
    answer = shape.answers[rank]
    edges = shape.step_us * shape.steps - device_us(shape, rank)
    idle = (answer.host_wait + answer.idle) * shape.steps - edges
    return _percent(
        {
            "compute": answer.compute * shape.steps,
            "rest": (answer.exposed + answer.copies) * shape.steps,
            "idle": idle,
            "gaps": idle if one_stream(shape) else None,
        },
        device_us(shape, rank),
        answer.overlapped,
        answer.overlapped + answer.exposed,
    )


def device_us(shape: Shape, rank: int) -> float:
    """From the first kernel of all steps to the end of the last."""
    device = [(start, end) for _, start, end, stream in shape.ranks[rank] if stream]
    first, last = min(start for start, _ in device), max(end for _, end in device)
    return (shape.steps - 1) * shape.step_us + last - first


def ours(found: RankTrace, gaps: bool) -> Figures:
    """What our reader says, in the same terms."""
    device = [
        (e["ts"], e["ts"] + e["dur"])
        for e in load(found.path)["traceEvents"]
        if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    window = max(end for _, end in device) - min(start for start, _ in device)

    def total(*parts: str) -> float:
        return 1e6 * sum(float(getattr(step, part)) for step in found.steps for part in parts)

    idle = total("host_wait", "idle") - (total("seconds") - window)
    return _percent(
        {
            "compute": total("compute"),
            "rest": total("exposed", "copies"),
            "idle": idle,
            "gaps": idle if gaps else None,
        },
        window,
        total("overlapped"),
        total("communication"),
    )


def _percent(
    us: dict[str, float | None], window: float, overlapped: float, communication: float
) -> Figures:
    found = {name: 100 * value / window for name, value in us.items() if value is not None}
    if communication:
        found["overlap"] = 100 * overlapped / communication
    return found


class Hta:
    """HTA, by an interpreter that has it."""

    def __init__(self, python: str) -> None:
        self.python = python

    def read(
        self, folders: Sequence[tuple[Path, bool]], *, rounding: bool = False
    ) -> list[dict[str, Any]]:
        """For each folder its seconds and its ranks' figures; the idle of streams where asked."""
        asked = json.dumps([(str(folder), gaps) for folder, gaps in folders])
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["HTA_DISABLE_NS_ROUNDING"] = "0" if rounding else "1"
        done = subprocess.run(
            [self.python, "-c", PEER, asked],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{self.python}: HTA failed:\n{done.stderr[-3000:]}")
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        for folder in found:
            folder["ranks"] = {int(r): self._figures(us) for r, us in folder["ranks"].items()}
        return found

    @staticmethod
    def _figures(us: dict[str, Any]) -> Figures:
        window = us["kernel"]
        found = {"compute": us["compute"], "rest": us["non_compute"], "idle": us["idle"]}
        if "gaps" in us:
            found["gaps"] = us["gaps"]
        found = {name: 100 * value / window for name, value in found.items()}
        if us["overlap"] is not None:
            found["overlap"] = us["overlap"]
        return found


def compare(shapes: Sequence[Shape], root: Path, hta: Hta | None, *, rounding: bool) -> list[Row]:
    """Write the shapes' traces below `root`, and read them by both."""
    folders = [root / shape.name for shape in shapes]
    paths = [shape.write(folder) for shape, folder in zip(shapes, folders, strict=True)]
    gaps = [one_stream(shape) for shape in shapes]
    peers: list[dict[str, Any]] = [{"ranks": {}} for _ in shapes]
    if hta:
        peers = hta.read(list(zip(folders, gaps, strict=True)), rounding=rounding)
    rows: list[Row] = []
    for shape, files, gap, peer in zip(shapes, paths, gaps, peers, strict=True):
        for rank, path in enumerate(files):
            hand, mine = by_hand(shape, rank), ours(read_trace(path), gap)
            theirs = peer["ranks"].get(rank, {})
            rows.extend(
                Row(shape.name, rank, figure, hand[figure], mine[figure], theirs.get(figure))
                for figure in FIGURES
                if figure in hand
            )
    return rows


def show(rows: Sequence[Row]) -> None:
    """A table, a line a figure."""
    width = max(len(row.trace) for row in rows)
    say(
        f"  {'trace':{width}} rank {'figure':8} {'by hand':>8} {'ours':>8} {'HTA':>8} {'differ':>8}"
    )
    for row in rows:
        peer, differ = ("–", "–") if row.peer is None else (
            f"{row.peer:.2f}", f"{row.ours - row.peer:+.2f}")  # fmt: skip
        say(
            f"  {row.trace:{width}} {row.rank:4} {row.figure:8} {row.hand:8.2f} {row.ours:8.2f}"
            f" {peer:>8} {differ:>8}"
        )


def race(root: Path, hta: Hta, kernels: int, rounds: int) -> tuple[float, float]:
    """Median seconds of ours and of HTA's for the same two large traces, in turn."""
    shape = big(kernels)
    paths = shape.write(root / shape.name)
    events = len(shape.events(0))
    times: dict[str, list[float]] = {"ours": [], "hta": []}
    for turn in range(rounds):
        start = time.perf_counter()
        judge([read_trace(path) for path in paths])
        times["ours"].append(time.perf_counter() - start)
        [found] = hta.read([(root / shape.name, False)])
        times["hta"].append(found["seconds"])
        say(
            f"  round {turn + 1} of {rounds}, {events:,} events a rank: ours"
            f" {times['ours'][-1]:.2f} s, HTA {times['hta'][-1]:.2f} s"
        )
    return statistics.median(times["ours"]), statistics.median(times["hta"])


def claim(mine: float, peer: float, digits: int = 3) -> dict[str, float]:
    """Both figures and their ratio."""
    ratio = mine / peer if peer else 1.0
    return {"ours": round(mine, digits), "peer": round(peer, digits), "ratio": round(ratio, 3)}


def main() -> None:
    """Parse, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="smaller traces, under a minute")
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    parser.add_argument("--hta", metavar="PYTHON", help="an interpreter with HolisticTraceAnalysis")
    arguments = parser.parse_args()
    hta = Hta(arguments.hta) if arguments.hta else None
    if hta is None:
        say("HTA is skipped: give --hta PYTHON, an interpreter that has it")
    with tempfile.TemporaryDirectory(prefix="hybrid-bench-") as folder:
        root = Path(folder)
        say("what both should agree on, in percent:")
        rows = compare([*SHAPES, SHORT_KERNELS], root, hta, rounding=False)
        show(rows)
        say("what HTA errs on, rounding as it does by default:")
        hard = compare(HARD_SHAPES, root, hta, rounding=True)
        show(hard)
        every = {(row.trace, row.rank, row.figure): row for row in [*rows, *hard]}
        right = sum(abs(row.ours - row.hand) < 0.01 for row in every.values())
        found = {"by_hand": claim(right, len(every))}
        if hta:
            both = [(row.ours, row.peer) for row in rows if row.peer is not None]
            found["agreement"] = claim(*max(both, key=lambda pair: abs(pair[0] - pair[1])))
            mine = max(abs(row.ours - row.hand) for row in hard)
            peer = max(abs(row.peer - row.hand) for row in hard if row.peer is not None)
            found["hard_error"] = claim(mine, peer)
            kernels, rounds = (4_000, 3) if arguments.quick else (40_000, 5)
            found["seconds"] = claim(*race(root, hta, kernels, rounds))
    for name, figures in found.items():
        say(f"{name}: {figures['ratio']} (ours {figures['ours']}, peer {figures['peer']})")
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
