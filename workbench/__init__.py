"""A notebook-first workbench for distributed training: one plan, three instruments, one table.

`import workbench as wb` loads no library: verbs and classes are imported when they are used.
"""

from __future__ import annotations

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from workbench import verbs as verbs
from workbench.verbs import *  # noqa: F403

if _TYPE_CHECKING:
    from workbench.errors import PlanError
    from workbench.lab.panel.planner import Planner
    from workbench.plan.schema import Plan
    from workbench.profile import Profile

__version__ = "0.1.0"

_NAMES = {
    "Plan": "workbench.plan.schema",
    "PlanError": "workbench.errors",
    "Planner": "workbench.lab.panel.planner",
    "Profile": "workbench.profile",
}

__all__ = ["Plan", "PlanError", "Planner", "Profile"]
__all__ += verbs.__all__


def __getattr__(name: str) -> _Any:
    """Import a class when it is first used."""
    if name == "list_runs":  # of before `runs`
        return verbs.runs
    if name not in _NAMES:
        raise AttributeError(
            f"module 'workbench' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(_import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _NamedAsVerb(_ModuleType):
    """A package that has the name of a verb, and is called as that: `runs`, `models`."""

    def __call__(self, *given: _Any, **more: _Any) -> _Any:
        return getattr(verbs, self.__name__.rpartition(".")[2])(*given, **more)


class _Workbench(_ModuleType):
    """This module, whose verbs stay callable when packages of their names are imported."""

    def __setattr__(self, name: str, value: _Any) -> None:
        if name in verbs.__all__ and isinstance(value, _ModuleType):
            value.__class__ = _NamedAsVerb
        super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Workbench
