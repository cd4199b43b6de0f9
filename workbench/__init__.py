"""A notebook-first workbench for distributed training: one plan, three instruments, one table.

`import workbench as wb` loads no library: verbs and classes are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench import verbs as verbs
from workbench.verbs import *  # noqa: F403

if TYPE_CHECKING:
    from workbench.errors import PlanError
    from workbench.lab.panel.planner import Planner
    from workbench.plan.schema import Plan
    from workbench.profile import Profile

__version__ = "0.1.0"

_CLASSES = {
    "Plan": "workbench.plan.schema",
    "PlanError": "workbench.errors",
    "Planner": "workbench.lab.panel.planner",
    "Profile": "workbench.profile",
}

__all__ = ["Plan", "PlanError", "Planner", "Profile"]
__all__ += verbs.__all__


def __getattr__(name: str) -> Any:
    """Import a class when it is first used."""
    if name not in _CLASSES:
        raise AttributeError(
            f"module 'workbench' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLASSES})
