"""Cost of one operator under a sharding strategy, and of resharding between two operators.

Times are of one microbatch, forward and backward. After OptCNN and FlexFlow (arXiv:1802.04924,
1807.05358), Tofu (arXiv:1807.08887), Alpa (arXiv:2201.12023) and MindSpore's automatic parallelism.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from workbench.plan.operators.operator_graph import Operator, OperatorTensor
from workbench.plan.operators.redistribution_moves import Kind
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.moe_cost import LocalMoe
from workbench.planner.autoshard.operator_compute import compute_seconds
from workbench.planner.autoshard.operator_splits import ShardingStrategy


@dataclass(frozen=True)
class TensorBytes:
    """Bytes per element."""

    element: int = 2
    """Of parameters, activations and their gradients."""
    gradient: int = 2
    """Of a parameter's gradient, as it is reduced."""
    state: float = 16
    """Of a parameter with its gradient and optimizer state (mixed-precision Adam, 1910.02054)."""


@dataclass(frozen=True)
class Communication:
    """One collective, or a slice, which moves nothing."""

    when: Literal["forward", "backward", "recompute"]
    kind: Kind
    tensor: str
    ranks: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class OperatorCost:
    """One operator under one strategy, on one rank, in one layer."""

    compute: float
    """Seconds, forward and backward."""
    moves: tuple[Communication, ...]
    parameter_bytes: float
    """Parameters with gradients and optimizer state."""
    activation_bytes: float
    """The output, kept for backward, and the residual stream that it was normalized from; of an MoE
    layer what is kept within it, too.
    """

    @property
    def seconds(self) -> float:
        """Compute and communication, not overlapped."""
        return self.compute + sum(move.seconds for move in self.moves)

    @property
    def bytes(self) -> float:
        """Parameters with their states, and what is kept for backward."""
        return self.parameter_bytes + self.activation_bytes


def operator_cost(
    operator: Operator,
    strategy: ShardingStrategy,
    mesh: LogicalMesh,
    machine: MachineModel,
    sizes: TensorBytes,
    microbatches: int = 1,
    produced: Container[str] = (),
) -> OperatorCost:
    """The cost of one operator on one rank, in one layer.

    Args:
        operator: The operator.
        strategy: How it is sharded.
        mesh: The ranks.
        machine: What a rank computes and communicates with.
        sizes: Bytes per element.
        microbatches: Over which a weight's gradient adds up before it is reduced.
        produced: Inputs that another operator produces: their partial gradients are reduced on the
            way back to it (`redistribution`), not here.
    """
    local = {
        t.name: _local_elements(operator, t, strategy.layout(t), mesh)
        for t in (*operator.inputs, operator.output)
    }
    moves = _reduction("forward", operator, operator.output, strategy, mesh, sizes)
    for tensor in operator.sums:
        moves += _reduction("forward", operator, tensor, strategy.of_rows, mesh, sizes)
    for tensor in operator.inputs:
        if tensor.kind != "index" and tensor.name not in produced:
            times = 1 / microbatches if tensor.kind in ("parameter", "tied") else 1.0
            moves += _reduction("backward", operator, tensor, strategy, mesh, sizes, times)
    parameters = sum(local[t.name] for t in operator.inputs if t.kind == "parameter")
    outputs = 1 + sum(t.kind == "residual" for t in operator.inputs)
    layout = strategy.output_layout(operator.output)
    kept = outputs * _local_elements(operator, operator.output, layout, mesh)
    if operator.kind == "MoE":
        layer = LocalMoe(operator, strategy, mesh)
        kept += layer.kept
        moves += _exchanges(layer, machine, sizes.element)
    return OperatorCost(
        compute_seconds(operator, strategy, mesh, machine, local, sizes.element),
        moves,
        parameters * sizes.state,
        kept * sizes.element,
    )


def _exchanges(layer: LocalMoe, machine: MachineModel, element: int) -> tuple[Communication, ...]:
    """Of rows with the ranks that experts are spread over: there and back, in both passes."""
    ranks = layer.expert_ranks
    if ranks == 1:
        return ()
    size, seconds = layer.exchange(machine, element)
    passes: tuple[Literal["forward", "backward"], ...] = (
        "forward",
        "forward",
        "backward",
        "backward",
    )
    return tuple(
        Communication(when, "all_to_all", "experts' rows", ranks, size, seconds) for when in passes
    )


def recomputed(cost: OperatorCost, kept: float, num_layers: int) -> OperatorCost:
    """The cost where the layers' forward runs again in backward (full recompute).

    Args:
        cost: Without it.
        kept: Bytes that are kept for backward all the same.
        num_layers: Layers that are recomputed, one at a time.
    """
    return replace(
        cost,
        compute=cost.compute * 4 / 3,  # backward takes twice a forward
        moves=cost.moves + forward_again(cost.moves),
        activation_bytes=kept + cost.activation_bytes / num_layers,
    )


def forward_again(moves: tuple[Communication, ...]) -> tuple[Communication, ...]:
    """What the recomputed forward communicates."""
    return tuple(replace(move, when="recompute") for move in moves if move.when == "forward")


def gathered_again(moves: tuple[Communication, ...]) -> tuple[Communication, ...]:
    """What a redistributed input communicates once more in backward, lest it be kept."""
    return tuple(replace(move, when="backward") for move in moves if move.when == "forward")


def _local_elements(
    operator: Operator, tensor: OperatorTensor, layout: TensorLayout, mesh: LogicalMesh
) -> float:
    """Elements of a rank's part."""
    return operator.size(tensor) / mesh.ranks_over(layout.sharding)


def _reduction(
    when: Literal["forward", "backward"],
    operator: Operator,
    tensor: OperatorTensor,
    strategy: ShardingStrategy,
    mesh: LogicalMesh,
    sizes: TensorBytes,
    times: float = 1.0,
) -> tuple[Communication, ...]:
    """The reduction of a tensor that ranks hold partial sums of; nothing where they hold none.

    That is the output forward, where the strategy splits a contracted dimension, and an input's
    gradient backward, where it splits a dimension that the input lacks.
    """
    element = sizes.gradient if tensor.kind in ("parameter", "tied") else sizes.element
    held, size = strategy.partial_layout(tensor), operator.size(tensor) * element
    if not held.partial:
        return ()
    wanted = strategy.output_layout(tensor) if when == "forward" else held.summed
    found = _moves(when, held, wanted, size, mesh, tensor.name, times)
    if when == "forward" and wanted != held.summed:  # a scattered sum's gradient is gathered
        found += _moves("backward", wanted, held.summed, size, mesh, tensor.name, times)
    return found


def redistribution(
    held: TensorLayout,
    wanted: TensorLayout,
    size: float,
    mesh: LogicalMesh,
    tensor: str,
    gradient: TensorLayout | None = None,
) -> tuple[Communication, ...]:
    """Resharding of a tensor from the layout that it has to the one that is wanted, and its
    gradient back (tensor redistribution in MindSpore).

    Args:
        held: The layout that the tensor has.
        wanted: The layout that its reader wants.
        size: Bytes of the unsharded tensor.
        mesh: The ranks.
        tensor: Its name.
        gradient: The layout in which the reader leaves the tensor's gradient, if that is partial;
            it is summed on the way.
    """
    there = _moves("forward", held, wanted, size, mesh, tensor)
    return there + _moves("backward", gradient or wanted, held, size, mesh, tensor)


def _moves(
    when: Literal["forward", "backward"],
    held: TensorLayout,
    wanted: TensorLayout,
    size: float,
    mesh: LogicalMesh,
    tensor: str,
    times: float = 1.0,
) -> tuple[Communication, ...]:
    """The steps of least time, `times` a microbatch."""
    return tuple(
        Communication(
            when,
            step.kind,
            tensor,
            mesh.ranks_over(step.axes),
            (step.after if step.kind == "slice" else step.bytes) * times,
            0.0 if step.kind == "slice" else mesh.seconds(step.kind, step.bytes, step.axes) * times,
        )
        for step in mesh.redistribution.steps(held, wanted, size)
    )
