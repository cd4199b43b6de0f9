"""Charts: pure functions of Profiles, which do not know the instrument that made them. One chart a
file.
"""

from workbench.lab.charts.collectives import collectives
from workbench.lab.charts.loss_chart import loss
from workbench.lab.charts.memory_by_rank import memory
from workbench.lab.charts.memory_map import memory_map
from workbench.lab.charts.memory_steps import memory_steps
from workbench.lab.charts.pareto_chart import front
from workbench.lab.charts.step_parts import parts
from workbench.lab.charts.throughput import throughput
from workbench.lab.charts.timeline import timeline

__all__ = [
    "collectives",
    "front",
    "loss",
    "memory",
    "memory_map",
    "memory_steps",
    "parts",
    "throughput",
    "timeline",
]
