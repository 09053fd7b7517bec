"""What a project can say of its training runs: the checks before one, the reports after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.project import Project
    from hybrid.training.preflight import Check


class Runs:
    """The training runs of one project; `Project.runs`."""

    def __init__(self, project: Project) -> None:
        self._project = project

    @property
    def folder(self) -> Path:
        """Where each run has its folder."""
        return self._project.config.run.dir / "runs"

    def preflight(self) -> list[Check]:
        """The checks that `train` makes first, all of them, and nothing else."""
        with self._project.ray():
            from hybrid.training.preflight_nodes import preflight

            return preflight(self._project.config)

    def list(self) -> list[dict[str, Any]]:
        """The figures of every run, the newest last."""
        from hybrid.training.report import reports

        return reports(self.folder)

    def report(self, run_id: str | None = None) -> dict[str, Any]:
        """The figures of a run (`report.summarise`); makes its page anew. None: the newest run.

        Raises:
            NotFound: there is no such run.
        """
        from hybrid.training.report import report_of

        return report_of(self.folder, run_id)

    def text(self, report: dict[str, Any]) -> str:
        """A report in a few lines."""
        from hybrid.training.report import lines

        return "\n".join(lines(report, self.folder / report["run"]))
