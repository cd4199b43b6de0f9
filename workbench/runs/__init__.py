"""A run on disk: preflight, launch, supervisor, attach, stop, telemetry and its reader. Imports no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.runs.launch.checked_launch import start
    from workbench.runs.launch.preflight import preflight
    from workbench.runs.run import Run, attach, list_runs, profile_of
    from workbench.runs.store.run_state import Cause, State
    from workbench.runs.store.telemetry_reader import Reader

_MODULES = {
    "Cause": "store.run_state",
    "Reader": "store.telemetry_reader",
    "Run": "run",
    "State": "store.run_state",
    "attach": "run",
    "list_runs": "run",
    "preflight": "launch.preflight",
    "profile_of": "run",
    "start": "launch.checked_launch",
}

__all__ = [
    "Cause",
    "Reader",
    "Run",
    "State",
    "attach",
    "list_runs",
    "preflight",
    "profile_of",
    "start",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a worker that ties itself to its parent must not wait for the rest."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
