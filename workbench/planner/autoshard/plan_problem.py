"""Operator strategies of a plan: its model, batch, GPUs and network as the choice needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.costmodel.inputs.config import fixed_config
from workbench.costmodel.memory.model_states import unsharded_state_bytes
from workbench.errors import refuse
from workbench.fields.bounds import SEQUENCES, hold
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.plan.operators.strategy_form import factors, read_strategies
from workbench.plan.optimizer_state import DTYPE_BYTES, master_bytes, moment_bytes
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.planner.autoshard.choice_result import OperatorPlan
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.for_plans.memory_changes import sharded_state
from workbench.planner.autoshard.for_plans.plan_machine import machine_model
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.autoshard.layers.feed_forward_operators import with_spread_experts
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import TensorBytes
from workbench.planner.autoshard.strategy_choice import GraphChoice, pinned_model_graph, search_mode

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
    return plan_choice(plan, ranks, sequences, mode, graph).within(memory)


@dataclass(frozen=True)
class PlanChoice:
    """The operator strategies of a plan, asked for under several limits."""

    choice: GraphChoice
    plan: ResolvedPlan
    sequences: int
    """Of one microbatch over the ranks of the operators."""

    def within(self, memory: float | None) -> OperatorPlan:
        """The strategies of least cost within `memory` bytes of a rank. Raises `PlanError`."""
        found = self.choice.within(memory)
        return replace(found.joined() if self.plan.code else found, sequences=self.sequences)

    def least_state_bytes(self) -> float:
        """Bytes of a rank that no strategies are below; 0 where stages of a pipeline, context ranks
        or hosts have a share of the parameters' states.
        """
        sizes, offload = self.plan.sizes, self.plan.strategy.data.offload
        if sizes["pipeline"] * sizes["context"] > 1 or offload != "none":
            return 0.0
        return self.choice.least_state_bytes()

    def all_state_bytes(self) -> float:
        """Bytes of all ranks that no plan on GPUs is below; 0 where hosts have a share of them."""
        if self.plan.strategy.data.offload != "none":
            return 0.0
        return self.choice.num_parameters() * tensor_bytes(self.plan).state


def plan_choice(
    plan: ResolvedPlan,
    ranks: int | Sequence[int] | None = None,
    sequences: int | None = None,
    mode: str = "dynamic_programming",
    graph: OperatorGraph | None = None,
) -> PlanChoice:
    """What `choose_for_plan` chooses in, priced once for all limits; arguments as there.

    Raises:
        PlanError: Sequences, ranks or pinned strategies are illegal.
    """
    own, data = microbatch_sequences(plan, ranks, sequences), data_ranks(plan, ranks)
    grid, machine = _grid(plan, _wanted(plan, ranks))
    pins = read_strategies(plan.strategy.operators)
    recomputed = 0
    if graph is None:
        graph = pinned_model_graph(plan.shape, own, plan.training.sequence_length, pins)
        graph = with_spread_experts(graph, _expert_ranks(plan, data))
        recomputed = plan.shape.layers if plan.strategy.recompute == "full" else 0
    by_microbatch = plan.strategy.data.reduce == "microbatch"
    sizes = sharded_state(tensor_bytes(plan), plan.strategy.data.zero, data, by_microbatch)
    microbatches = max(1, plan.training.global_batch // (own * data))
    pricing = GraphPricing(logical_mesh(grid, machine), machine, sizes, microbatches, recomputed)
    choice = GraphChoice(graph, pricing, pins, search_mode(mode), exact=False)
    return PlanChoice(choice, plan, own)


def _expert_ranks(plan: ResolvedPlan, data: int) -> int:
    """Ranks over which experts are spread, of those that the operators leave."""
    ranks, left = plan.strategy.expert.size, data * plan.sizes["context"]
    if left % ranks:
        legal = legal_sizes.near(ranks, [n for n in legal_sizes.divisors(left) if n <= ranks])
        what = f"is {ranks}, but operators leave {left} ranks of the data and context axes; legal: "
        raise refuse("strategy.expert.size", f"{what}{legal}, or operators on fewer ranks")
    return ranks


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
    hold("--sequences", count, 1, SEQUENCES)
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
