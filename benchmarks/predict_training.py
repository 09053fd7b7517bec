"""How well a short calibration run predicts how long the whole training of the legal demo takes.

    python benchmarks/predict_training.py [--quick] [--json -]

The real example (examples/legal, two workers under Ray Train) in a temporary folder: CALIBRATION
steps, then the prediction, then all of its steps, and both runs' folders read as
`hybrid advise --from-run LONG --calibrate SHORT` reads them. `training_time` is predicted seconds
(ours) over those that it then took (peer); 0.75 to 1.25 is claimed, on a machine that does nothing
else in between. `--quick` trains fewer steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import hybrid
from hybrid.planning.actual import run_seconds, whole_run
from hybrid.planning.runs import RunFigures, read_run

LEGAL = Path(__file__).parents[1] / "examples/legal"
CALIBRATION, QUICK_CALIBRATION, QUICK = 40, 12, 40


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def measure(folder: Path, steps: int | None) -> RunFigures:
    """Train the example so many steps (None: all of its own), in a run of its own."""
    before = set((folder / ".hybrid/runs").glob("*"))
    overrides = {} if steps is None else {"training.steps": steps}
    hybrid.open(folder / "hybrid.yaml", overrides).train()
    (made,) = (
        p for p in (folder / ".hybrid/runs").glob("*/progress.jsonl") if p.parent not in before
    )
    return read_run(made.parent)


def main() -> None:
    """Calibrate, predict, train, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", choices=["-"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hy-") as temporary:
        folder = Path(temporary) / "legal"
        shutil.copytree(LEGAL, folder, ignore=shutil.ignore_patterns(".hybrid", "__pycache__"))
        with hybrid.open(folder / "hybrid.yaml").ray():  # one cluster for both
            short = measure(folder, QUICK_CALIBRATION if args.quick else CALIBRATION)
            say(
                f"calibration: {short.steps_done} steps, {short.seconds:.1f} s; a step"
                f" {short.step_s:.3f} s, an evaluation {short.eval_s:.2f}, the rest"
                f" {short.other_s:.1f}"
            )
            run = measure(folder, QUICK if args.quick else None)
        predicted = run_seconds(short, run.steps_done, run.evals)
        row = whole_run(short, run)
    say(
        f"all {run.steps_done} steps: predicted {predicted.mid:.1f} s, took {run.seconds:.1f} s,"
        f" ratio {predicted.mid / run.seconds:.3f}: {row.verdict}"
    )
    if args.json:
        figures = {"ours": predicted.mid, "peer": run.seconds, "ratio": predicted.mid / run.seconds}
        sys.stdout.write(json.dumps({"training_time": figures}) + "\n")


if __name__ == "__main__":
    main()
