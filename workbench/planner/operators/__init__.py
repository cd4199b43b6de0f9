"""A strategy for each operator of a layer, chosen exactly: what MindSpore, Alpa and the OptCNN line do."""

from workbench.plan.operators import parse, read, write, written
from workbench.planner.operators.choose import choose
from workbench.planner.operators.cost import Bytes
from workbench.planner.operators.mesh import Machine
from workbench.planner.operators.of_plan import choose_for
from workbench.planner.operators.result import OperatorPlan

__all__ = ["Bytes", "Machine", "OperatorPlan", "choose", "choose_for", "parse", "read", "write", "written"]
