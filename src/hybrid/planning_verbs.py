"""The verbs of a project that plan rather than do: `scale`, `profile`, `profile_nsight`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.planning.sweep import Mode, Sweep
    from hybrid.profiles import Profiled
    from hybrid.profiles_nsight import Nsight

Progress = Callable[[dict[str, Any]], None]


class PlanningVerbs:
    """What `Project` has besides; see `scaling_runs`, `profiles`, `profiles_nsight`."""

    def scale(
        self,
        *,
        workers: Sequence[int] | None = None,
        modes: Sequence[Mode] = ("strong", "weak"),
        on_progress: Progress | None = None,
        **options: Any,
    ) -> list[Sweep]:
        """How the project's training scales, and how many workers to use; see `scaling_runs.scale`.

        Raises:
            ConfigError, DataError, PlacementError, TrainingError.
        """
        from hybrid.scaling_runs import scale

        return scale(self, workers=workers, modes=modes, on_progress=on_progress, **options)  # type: ignore[arg-type]

    def profile(
        self,
        *,
        workers: int | None = None,
        on_progress: Progress | None = None,
        **options: Any,
    ) -> Profiled:
        """What a step of training is bound by, from traces of all ranks; see `profiles.profile`.

        Raises:
            ConfigError, DataError, PlacementError, TrainingError.
        """
        from hybrid.profiles import profile

        return profile(self, workers=workers, on_progress=on_progress, **options)  # type: ignore[arg-type]

    def profile_nsight(
        self,
        *,
        workers: int | None = None,
        on_progress: Progress | None = None,
        **options: Any,
    ) -> Nsight:
        """Steps of training recorded by Nsight Systems; see `profiles_nsight.profile_nsight`.

        Raises:
            ConfigError, DataError, PlacementError, TrainingError.
        """
        from hybrid.profiles_nsight import profile_nsight

        return profile_nsight(self, workers=workers, on_progress=on_progress, **options)  # type: ignore[arg-type]
