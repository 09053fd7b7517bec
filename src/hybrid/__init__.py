"""hybrid: one runtime for tightly coupled training and loosely coupled agents, on Ray.

`hybrid.open("hybrid.yaml")` returns the project; every verb of the command line is a method of it.
Importing this package loads neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid.errors import HybridError

if TYPE_CHECKING:
    from hybrid.project import Project, open

__all__ = ["HybridError", "Project", "open", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("open", "Project"):
        from hybrid import project

        return getattr(project, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
