"""Charts: pure functions of Profiles, which do not know the instrument that made them.

One chart a file. Each takes Profiles and returns a `Figure` that shows itself in a notebook.
"""

import warnings
from typing import Any

from workbench.lab.charts.collectives import collectives
from workbench.lab.charts.loss_chart import loss
from workbench.lab.charts.memory_by_rank import memory
from workbench.lab.charts.memory_map import memory_map
from workbench.lab.charts.memory_over_time import memory_over_time
from workbench.lab.charts.memory_steps import memory_steps
from workbench.lab.charts.pareto_chart import pareto_front
from workbench.lab.charts.roofline_chart import roofline
from workbench.lab.charts.step_parts import step_time_parts
from workbench.lab.charts.throughput import throughput
from workbench.lab.charts.timeline import timeline

__all__ = [
    "collectives",
    "loss",
    "memory",
    "memory_map",
    "memory_over_time",
    "memory_steps",
    "pareto_front",
    "roofline",
    "step_time_parts",
    "throughput",
    "timeline",
]
_RENAMED = {"front": "pareto_front", "parts": "step_time_parts"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"workbench.lab.charts has no {name!r}; it has {', '.join(__all__)}")
    new = _RENAMED[name]
    warnings.warn(f"charts.{name} is now charts.{new}", DeprecationWarning, stacklevel=2)
    return globals()[new]
