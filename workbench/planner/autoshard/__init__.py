"""Intra-operator parallelism chosen exactly: a sharding strategy for each operator, as in OptCNN,
FlexFlow, Alpa and MindSpore's automatic parallelism.
"""

from workbench.plan.operators.strategy_form import (
    parse_strategy,
    read_strategies,
    strategy_text,
    write_strategies,
)
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.for_plans.written_plan import plan_with, searched_plan
from workbench.planner.autoshard.machine_model import MachineModel, ideal_machine
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.plan_problem import choose_for_plan, microbatch_sequences
from workbench.planner.autoshard.strategy_choice import choose_strategies

__all__ = [
    "MachineModel",
    "OperatorPlan",
    "TensorBytes",
    "choose_for_plan",
    "choose_strategies",
    "ideal_machine",
    "microbatch_sequences",
    "parse_strategy",
    "plan_with",
    "read_strategies",
    "searched_plan",
    "strategy_text",
    "write_strategies",
]
