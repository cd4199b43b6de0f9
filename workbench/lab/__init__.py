"""What a person sees: charts, the planner, the dashboard, comparison and report.

Names are loaded when first used: altair alone takes a second to import, and a command that draws
nothing must not wait. `comparison.compare.compare` puts plans and runs side by side.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Board": "workbench.lab.live.board",
    "Comparison": "workbench.lab.comparison.compare",
    "Dashboard": "workbench.lab.live.dashboard",
    "Figure": "workbench.lab.live.figure",
    "Planner": "workbench.lab.panel.planner",
    "watch": "workbench.lab.live.dashboard",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"workbench.lab has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
