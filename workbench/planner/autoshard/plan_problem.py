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
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.plan.operators.strategy_form import factors, read_strategies
from workbench.plan.optimizer_state import DTYPE_BYTES, master_bytes, moment_bytes
from workbench.plan.rank_placement import axis_strides
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.operator_rules import sides
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.device_mesh import LogicalAxis, LogicalMesh
from workbench.planner.autoshard.for_plans.memory_changes import sharded_state
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.strategy_choice import choose_in_graph, pinned_model_graph
from workbench.planner.calibrated_plan import with_calibration

PLAIN_RANKS = 64
"""Ranks of several nodes up to which they are split by their prime factors; beyond, by nodes and
GPUs.
"""


def choose_for_plan(
    plan: ResolvedPlan,
    ranks: int | Sequence[int] | None = None,
    sequences: int | None = None,
    mode: str = "dynamic_programming",
    graph: OperatorGraph | None = None,
    memory: float | None = None,
) -> OperatorPlan:
    """The operator strategies that cost a resolved `plan` least.

    Pipeline and context axes are not priced: the choice stands beside them. What the plan's
    `strategy.operators` names is kept.

    Args:
        plan: The plan; its calibration and framework profile are priced.
        ranks: Over which the operators are split, as a number or a grid; default all of the plan
            that are not of the pipeline or context axis.
        sequences: Of one microbatch over the ranks of the operators; default the plan's micro-batch
            on each data-parallel rank that they take.
        mode: How strategies are searched.
        graph: The operators of a model that is code, traced at these sequences.
        memory: Bytes of a rank's parameters, states and saved activations; what is found within
            them is near the optimum, as its solver says.

    Raises:
        PlanError: No choice is legal, or fits.
    """
    own, data = microbatch_sequences(plan, ranks, sequences), data_ranks(plan, ranks)
    grid, machine = _grid(plan, _wanted(plan, ranks))
    pins = read_strategies(plan.strategy.operators)
    recomputed = 0
    if graph is None:
        graph = pinned_model_graph(plan.shape, own, plan.training.sequence_length, pins)
        recomputed = plan.shape.layers if plan.strategy.recompute == "full" else 0
    by_microbatch = plan.strategy.data.reduce == "microbatch"
    sizes = sharded_state(tensor_bytes(plan), plan.strategy.data.zero, data, by_microbatch)
    microbatches = max(1, plan.training.global_batch // (own * data))
    found = choose_in_graph(
        graph, grid, machine, memory, microbatches, sizes, pins, mode, recomputed, exact=False
    )
    return replace(found.joined() if plan.code else found, sequences=own)


def microbatch_sequences(
    plan: ResolvedPlan, ranks: int | Sequence[int] | None = None, sequences: int | None = None
) -> int:
    """Sequences of one microbatch over the ranks of the operators; default: the plan's.

    Raises:
        PlanError: There are none, or too many.
    """
    own = plan.training.micro_batch * plan.sizes["data"]
    count = max(1, own // data_ranks(plan, ranks))
    if sequences is not None:
        count = sequences
    hold("sequences", count, 1, SEQUENCES)
    return count


def _wanted(plan: ResolvedPlan, ranks: int | Sequence[int] | None) -> int | Sequence[int]:
    """The ranks of the operators; default: all that are not of the pipeline or context axis."""
    return plan.sizes["tensor"] * plan.sizes["data"] if ranks is None else ranks


def data_ranks(plan: ResolvedPlan, ranks: int | Sequence[int] | None = None) -> int:
    """Data-parallel ranks beside those of the operators."""
    wanted = _wanted(plan, ranks)
    count = wanted if isinstance(wanted, int) else math.prod(wanted)
    return max(1, plan.sizes["tensor"] * plan.sizes["data"] // count)


def _grid(
    plan: ResolvedPlan, wanted: int | Sequence[int]
) -> tuple[int | Sequence[int], MachineModel]:
    """The ranks as a number or a grid, and the machine with their links."""
    node = int(plan.cluster.gpus_per_node or 1)
    if not isinstance(wanted, int) or wanted <= node or node == 1:
        return wanted, machine_model(plan, wanted)
    if wanted <= PLAIN_RANKS or wanted % node:
        return wanted, machine_model(plan, factors(wanted))
    return (wanted // node, node), machine_model(plan, (wanted // node, node))


def tensor_bytes(plan: ResolvedPlan) -> TensorBytes:
    """Bytes of activations, gradients and parameters with their state, by the framework profile; of
    a model that is code, by this engine.
    """
    gradient = DTYPE_BYTES[plan.strategy.gradient_dtype]
    if plan.code:
        element, optimizer = DTYPE_BYTES[plan.strategy.precision], plan.training.optimizer
        states = moment_bytes(optimizer) + master_bytes(optimizer, plan.strategy.precision)
        return TensorBytes(element, gradient, float(element + gradient + states))
    state = unsharded_state_bytes(fixed_config(plan), gradient)
    return TensorBytes(DTYPE_BYTES[plan.strategy.precision], gradient, state)


def operator_mesh(plan: ResolvedPlan, grid: tuple[int, ...] = ()) -> LogicalMesh:
    """The grid of ranks that the plan's `strategy.operators` run on, with its links: who prices the
    plan and who runs it choose redistributions by it.

    Args:
        plan: The plan.
        grid: Its sides, where they are not those of the plan's own strategies.
    """
    stride = int(axis_strides(plan.strategy.placement, plan.sizes)["tensor"])
    grid, (measured, found) = grid or sides(plan), with_calibration(plan)
    constants = _operator_constants(plan, found)
    links = _axis_links(measured, constants, grid, stride)
    return LogicalMesh(tuple(map(LogicalAxis, grid, links)), True, constants)


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
    return MachineModel(
        device_rates(measured.gpu, precision, constants),
        _axis_links(measured, constants, sizes),
        framework_profile(plan.strategy.stack),
        precision == "fp8",
    )


def _axis_links(
    plan: ResolvedPlan, constants: Constants, sizes: Sequence[int], stride: int = 1
) -> tuple[AxisLink, ...]:
    """The link along each axis of a grid whose innermost neighbors are `stride` ranks apart."""
    node, cluster = int(plan.cluster.gpus_per_node or 1), (plan.gpu, plan.fabric)
    apart = [stride * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    found = [group_link(*cluster, node, constants, size, at) for size, at in zip(sizes, apart)]
    return tuple(AxisLink(float(link.bandwidth), float(link.latency)) for link in found)


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
