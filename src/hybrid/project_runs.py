"""What a project can say of its training runs: the checks before one, the reports after."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
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
        with self._project.ray(training_only=True):
            from hybrid.training.preflight_nodes import preflight

            return preflight(self._project.config)

    def try_strategies(
        self, on_progress: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Make the trials of `training.strategy: auto`, whatever the strategy is, and keep nothing.

        Returns:
            `picked` in words, `settings` (keys of `training` that choose it), and the table:
            `heads`, `rows`; `choice` is all of it as numbers.

        Raises:
            TrainingError: no combination works. PlacementError, ConfigError: see `train`.
        """
        with self._project.ray(training_only=True):
            from hybrid.config import TrainingConfig
            from hybrid.training.auto import try_strategies
            from hybrid.training.loop import Job
            from hybrid.training.preflight_nodes import guard
            from hybrid.training.slots import PLACE_S
            from hybrid.training.trainer import made_data
            from hybrid.training.trials import shown

            say, config = on_progress or (lambda record: None), self._project.config
            wanted = {**config.training.model_dump(), "strategy": "auto"}
            training = TrainingConfig.model_validate(wanted)
            config = config.model_copy(update={"training": training})
            guard(config, say, wait_s=PLACE_S)
            name = f"try-{uuid.uuid4().hex[:8]}"
            job = Job(config=config, data=made_data(config, say), run_id=name)
            try:
                choice = try_strategies(job, say)
            finally:
                shutil.rmtree(job.folder, ignore_errors=True)
            settings = choice.candidate.as_settings()
            return {**shown(choice), "settings": settings, "choice": choice.as_record()}

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
