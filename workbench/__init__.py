"""A notebook-first workbench for distributed training: one plan, three instruments, one table.

`import workbench as wb` is quick and loads no torch; names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.errors import PlanError
    from workbench.lab.panel.planner import Planner
    from workbench.plan.schema import Plan
    from workbench.profile import Profile
    from workbench.verbs import (
        attach,
        calibrate,
        compare,
        estimate,
        explain,
        export,
        import_config,
        operators,
        rehearse,
        run,
        search,
        translate,
        validate,
        verify,
        watch,
    )

__version__ = "0.1.0"

_HOMES = {
    "Plan": "plan.schema",
    "PlanError": "errors",
    "Planner": "lab.panel.planner",
    "Profile": "profile",
    "attach": "verbs",
    "calibrate": "verbs",
    "compare": "verbs",
    "estimate": "verbs",
    "explain": "verbs",
    "export": "verbs",
    "import_config": "verbs",
    "list_runs": "runs.run",
    "operators": "verbs",
    "rehearse": "verbs",
    "report": "lab.comparison.report",
    "run": "verbs",
    "search": "verbs",
    "translate": "verbs",
    "validate": "verbs",
    "verify": "verbs",
    "watch": "verbs",
}

__all__ = [
    "Plan",
    "PlanError",
    "Planner",
    "Profile",
    "attach",
    "calibrate",
    "compare",
    "estimate",
    "explain",
    "export",
    "import_config",
    "operators",
    "rehearse",
    "run",
    "search",
    "translate",
    "validate",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Load a name on first use."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'workbench' has no attribute {name!r}; it has {', '.join(_HOMES)}"
        )
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
