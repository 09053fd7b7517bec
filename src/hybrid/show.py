"""How the command shows numbers and progress: short digests, ages, percentages, progress bars."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def short(digest: str | None) -> str:
    """The first twelve hex digits of a digest, or a dash."""
    return digest[:12] if digest else "-"


def percent(value: float | None) -> str:
    """A share of one as a percentage, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"


def age(created: float) -> str:
    """How long ago a UNIX time was."""
    seconds = max(0.0, time.time() - created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(value: float) -> str:
    """A large count as 1.2 K, 3.4 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}"


class Bars:
    """Progress bars for training runs; a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def _bar(self, name: str, step: int, total: int, figures: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, figures="")
        self._progress.update(self._tasks[name], completed=step, total=total, figures=figures)

    def training(self, record: dict[str, Any]) -> None:
        """Show one progress record of a base's training."""
        if record.get("event") == "eval":
            text = f"step {record['step']}: held-out loss {record['eval_loss']:.3f}"
            self._progress.console.print(text, style="dim")
        if "message" in record:
            self._progress.console.print(record["message"], style="dim", markup=False)
        if record.get("event") == "checkpoint_failed":
            retry_s = record["retry_s"]
            again = "given up" if retry_s is None else f"once more in {retry_s:g} s"
            text = f"step {record['step']}: checkpoint failed: {record['error']}; {again}"
            self._progress.console.print(text, style="yellow", markup=False)
        if record.get("event") == "checkpoint_late":
            text = f"step {record['step']}: checkpoint put off: that of step {record['writing']}"
            self._progress.console.print(f"{text} is still being written", style="dim")
        if record.get("event") not in ("start", "step"):
            return
        if record.get("rejected_checkpoints"):
            for why in record["rejected_checkpoints"]:
                self._progress.console.print(f"checkpoint not used: {why}", markup=False)
        parts = []
        if record.get("loss") is not None:
            parts.append(f"loss {record['loss']:.3f}")
        if record.get("tokens_per_s"):
            parts.append(f"{count(record['tokens_per_s'])} tok/s")
        if record.get("mfu"):
            parts.append(f"MFU {100 * record['mfu']:.0f} %")
        if record.get("memory_bytes"):
            parts.append(f"{record['memory_bytes'] / 2**30:.1f} GiB")
        if record.get("eta_s") is not None:
            parts.append(f"ETA {record['eta_s']:.0f} s")
        self._bar("training", record["step"], record["steps"], "  ".join(parts))

    def specialising(self, record: dict[str, Any]) -> None:
        """Show one progress record of an adapter's training."""
        if "message" in record:
            self._progress.console.print(record["message"], style="dim", markup=False)
        if "steps" not in record:
            return
        figures = f"loss {record['loss']:.3f}" if record.get("loss") is not None else ""
        self._bar(record["adapter"], record["step"], record["steps"], figures)
