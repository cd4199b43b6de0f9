"""Stages that are cut, replicated and placed each by itself, planned on a layer profile (DAPPLE,
2007.01045).
"""

from workbench.planner.unequal_stages.baselines import (
    data_parallel_seconds,
    gpipe_stages,
    pipedream_stages,
)
from workbench.planner.unequal_stages.plan import UnequalPlan, evaluate
from workbench.planner.unequal_stages.search import Effort, search_stages
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology

__all__ = [
    "Batch",
    "Effort",
    "Stage",
    "Topology",
    "UnequalPlan",
    "data_parallel_seconds",
    "evaluate",
    "gpipe_stages",
    "pipedream_stages",
    "search_stages",
]
