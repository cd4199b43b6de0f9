"""Operator strategies of a plan: its model, batch, GPUs and network as the choice needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from workbench.costmodel.communication.collective_cost import AxisLink, group_link
from workbench.costmodel.compute.kernel_rates import device_rates
from workbench.costmodel.frameworks.framework_profile import framework_profile
from workbench.costmodel.inputs.config import fixed_config
from workbench.costmodel.memory.model_states import unsharded_state_bytes
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.constants import constants as catalog_constants
from workbench.fields.bounds import SEQUENCES, hold
from workbench.plan.operators.strategy_form import read_strategies
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.strategy_choice import choose_strategies
from workbench.planner.calibrated_plan import with_calibration


def choose_for_plan(
    plan: ResolvedPlan,
    ranks: int | Sequence[int] | None = None,
    memory: float | None = None,
    sequences: int | None = None,
) -> OperatorPlan:
    """The operator strategies that cost a resolved `plan` least.

    Pipeline and other axes are not priced: the choice stands for them. What the plan's
    `strategy.operators` names is kept.

    Args:
        plan: The plan; its calibration and framework profile are priced.
        ranks: Over which the operators are split, as a number or a grid; default all of the plan.
            Ranks of several nodes become a grid of (nodes, GPUs per node).
        memory: Bytes of a rank.
        sequences: Of one microbatch over all ranks; default the plan's micro-batch on each
            data-parallel rank.

    Raises:
        PlanError: No choice is legal.
    """
    node, length = int(plan.cluster.gpus_per_node or 1), plan.training.sequence_length
    wanted = plan.world_size if ranks is None else ranks
    grid = (
        (wanted // node, node)
        if isinstance(wanted, int) and wanted > node > 1 and wanted % node == 0
        else wanted
    )
    count = plan.training.micro_batch * plan.sizes["data"] if sequences is None else sequences
    hold("sequences", count, 1, SEQUENCES)
    return choose_strategies(
        plan.shape,
        count * length,
        grid,
        machine_model(plan, grid),
        sequence_length=length,
        fused=True,
        memory=memory,
        microbatches=max(1, plan.training.global_batch // count),
        sizes=tensor_bytes(plan),
        fixed=read_strategies(plan.strategy.operators),
    )


def tensor_bytes(plan: ResolvedPlan) -> TensorBytes:
    """Bytes of activations, gradients and parameters with their state, by the framework profile."""
    gradient = DTYPE_BYTES[plan.strategy.gradient_dtype]
    state = unsharded_state_bytes(fixed_config(plan), gradient)
    return TensorBytes(DTYPE_BYTES[plan.strategy.precision], gradient, state)


def machine_model(plan: ResolvedPlan, grid: int | Sequence[int]) -> MachineModel:
    """A GPU of the plan and its links: one over all plain ranks, or one along each axis of a grid.

    A plan with a calibration has the measured rates.

    Args:
        plan: The plan.
        grid: Ranks, or the sizes of a grid's axes, outermost first.
    """
    precision = plan.strategy.precision
    measured, found = with_calibration(plan)
    constants = _operator_constants(plan, found)
    sizes = [grid] if isinstance(grid, int) else list(grid)
    node = int(plan.cluster.gpus_per_node or 1)

    def link(axis: int) -> AxisLink:
        stride = math.prod(sizes[axis + 1 :])
        found = group_link(measured.gpu, measured.fabric, node, constants, sizes[axis], stride)
        return AxisLink(float(found.bandwidth), float(found.latency))

    return MachineModel(
        device_rates(measured.gpu, precision, constants),
        tuple(link(axis) for axis in range(len(sizes))),
        framework_profile(plan.strategy.stack),
        precision == "fp8",
    )


def _operator_constants(plan: ResolvedPlan, constants: Constants) -> Constants:
    """Constants that single operators are priced with.

    What a calibration measured decides between strategies that cost nearly the same. The catalog's
    losses of small or misaligned GEMMs and its traffic of eager kernels are averages over layers:
    without a calibration GEMMs run at the rate of a large one, and memory-bound operators move the
    textbook count times what the plan's kernels and framework move relative to eager ones.
    """
    if plan.cluster.calibration is not None:
        return constants
    eager = catalog_constants(plan.gpu, "eager").traffic
    return replace(
        constants, gemm_half_dim=0.0, gemm_misaligned=0.0, traffic=constants.traffic / eager
    )
