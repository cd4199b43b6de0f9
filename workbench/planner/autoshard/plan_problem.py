"""Operator strategies of a plan: its shape, batch, cards and network as the choice needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.costmodel.compute.roofline import peak_flops
from workbench.costmodel.rates.constants import Constants, constants
from workbench.fields.bounds import SEQUENCES, hold
from workbench.plan.operator_strategy import read
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.device_mesh import Machine
from workbench.planner.autoshard.operator_cost import Bytes
from workbench.planner.autoshard.strategy_choice import choose

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}


def choose_for(
    plan: ResolvedPlan,
    ranks: int | Sequence[int] | None = None,
    memory: float | None = None,
    sequences: int | None = None,
) -> OperatorPlan:
    """The operator strategies that cost a complete `plan` least, over all its ranks or over
    `ranks`.

    Ranks of several nodes become a grid of (nodes, ranks a node). `sequences` of one microbatch
    over all ranks: by default the plan's micro-batch on each data-parallel rank. `memory`: bytes of
    a rank. What `strategy.operators` holds is kept. Pipeline and other axes are not priced: the
    choice stands for them. Raises `PlanError`.
    """
    node, length = int(plan.cluster.gpus_per_node or 1), plan.training.sequence_length
    wanted = plan.world_size if ranks is None else ranks
    grid = (
        (wanted // node, node)
        if isinstance(wanted, int) and wanted > node > 1 and wanted % node == 0
        else wanted
    )
    held = plan.training.micro_batch * plan.sizes["data"] if sequences is None else sequences
    hold("sequences", held, 1, SEQUENCES)
    times = max(1, plan.training.global_batch // held)
    return choose(
        plan.shape,
        held * length,
        grid,
        machine(plan, grid),
        sequence_length=length,
        fused=True,
        memory=memory,
        microbatches=times,
        sizes=_sizes(plan),
        fixed=read(plan.strategy.operators),
    )


def _sizes(plan: Plan) -> Bytes:
    """Parameter, gradient, moments and 32-bit master weight, in the dtypes that the plan names
    (1910.02054).
    """
    optimizer, gradient = plan.training.optimizer, BYTES.get(plan.strategy.gradient_dtype)
    element = 4 if plan.strategy.precision in ("fp32", "tf32") else 2
    moments = BYTES[optimizer.moments] * (2 if optimizer.name == "adamw" else 1)
    master = 4 if element == 2 and optimizer.master == "auto" else 0
    return Bytes(element, gradient or element, element + (gradient or element) + moments + master)


def machine(plan: ResolvedPlan, grid: int | Sequence[int]) -> Machine:
    """A card of the plan as operators see it, and its links: of all ranks, or along each axis of a
    grid.
    """
    known, card, precision = (
        constants(plan.gpu, plan.strategy.kernels),
        plan.gpu,
        plan.strategy.precision,
    )
    rates = (
        peak_flops(card, precision) * known.gemm_share,
        card.bandwidth_gbs * 1e9 * known.memory_share,
    )
    if isinstance(grid, int):
        return Machine(rates[0], *_link(plan, known, 1, grid), rates[1])
    links = [_link(plan, known, math.prod(grid[a + 1 :]), size) for a, size in enumerate(grid)]
    bandwidth, latency = (tuple(link[i] for link in links) for i in (0, 1))
    return Machine(rates[0], bandwidth, latency, rates[1])


def _link(plan: ResolvedPlan, known: Constants, stride: int, size: int) -> tuple[float, float]:
    """(bytes a second of one rank, seconds a hop) of an axis whose neighbours are `stride` ranks
    apart.
    """
    node, fabric = int(plan.cluster.gpus_per_node or 1), plan.fabric
    link = plan.gpu.link_gbs * 1e9 * known.link_share
    if stride * size <= node:
        return link, fabric.link_latency_us * 1e-6
    inside = max(1, min(size, node // stride)) if stride < node else 1
    return min(
        link, fabric.nic_gbs * 1e9 * known.nic_share * inside / node
    ), fabric.nic_latency_us * 1e-6
