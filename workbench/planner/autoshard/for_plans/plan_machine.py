"""The GPU of a plan and its links, as strategies of operators are priced with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from workbench.costmodel.communication.collective_cost import AxisLink, group_link
from workbench.costmodel.compute.kernel_rates import DeviceRates, device_rates, peak_flops
from workbench.costmodel.frameworks.framework_profile import FrameworkProfile, framework_profile
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.constants import constants as catalog_constants
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.rank_placement import axis_strides
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.operator_rules import sides
from workbench.planner.autoshard.device_mesh import LogicalAxis, LogicalMesh
from workbench.planner.autoshard.machine_model import ExpertRates, MachineModel
from workbench.planner.calibrated_plan import with_calibration


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
    device, framework = (
        device_rates(measured.gpu, precision, constants),
        framework_profile(plan.strategy.stack),
    )
    return MachineModel(
        device,
        _axis_links(measured, constants, sizes),
        framework,
        precision == "fp8",
        _expert_rates(measured, device, framework, math.prod(sizes)),
    )


def _expert_rates(
    plan: ResolvedPlan, device: DeviceRates, framework: FrameworkProfile, stride: int
) -> ExpertRates:
    """Experts are spread over ranks that are `stride` apart."""
    precision = plan.strategy.precision
    is_upcast = framework.experts.fp32_router and DTYPE_BYTES[precision] < DTYPE_BYTES["fp32"]
    wide = replace(device, flops_16bit=peak_flops(plan.gpu, "fp32"))
    counts = framework.kernels.counts_operators and plan.gpu.device == "cuda"
    exchange = None
    if (ranks := plan.strategy.expert.size) > 1:
        (exchange,) = _axis_links(plan, device.constants, [ranks], stride)
    return ExpertRates(wide if is_upcast else None, counts, precision == "bf16", exchange)


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
