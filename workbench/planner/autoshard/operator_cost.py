"""What a strategy of one operator costs, and what lies between two: compute, collectives, memory,
redistribution.

Times are of one microbatch forward and backward. After OptCNN and FlexFlow (1802.04924,
1807.05358), ToFu (1807.08887), Alpa (2201.12023) and MindSpore's automatic parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_compute import compute_seconds
from workbench.planner.autoshard.operator_splits import (
    Operator,
    OperatorTensor,
    ShardingStrategy,
    TensorLayout,
)


@dataclass(frozen=True)
class TensorBytes:
    """Bytes an element takes."""

    element: int = 2
    """Of parameters, activations and their gradients."""
    gradient: int = 2
    """Of a parameter's gradient, as it is reduced."""
    state: float = 16
    """Of a parameter with its gradient and optimizer state (mixed-precision Adam, 1910.02054)."""


@dataclass(frozen=True)
class Communication:
    """One collective, or the slicing that needs none."""

    when: Literal["forward", "backward"]
    kind: Literal["all_reduce", "all_gather", "all_to_all", "slice"]
    tensor: str
    ranks: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class OperatorCost:
    """One operator under one strategy, on one rank, in one layer."""

    compute: float
    """Seconds forward and backward."""
    moves: tuple[Communication, ...]
    parameter_bytes: float
    """Parameters with gradients and optimizer state."""
    activation_bytes: float
    """The output, kept for backward."""

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
) -> OperatorCost:
    """The cost of `operator` under `strategy`; a weight's gradient is reduced once in
    `microbatches`.
    """
    local = {
        t.name: _local(operator, t, strategy, mesh) for t in (*operator.inputs, operator.output)
    }
    moves = [_sum("forward", operator.output, local, strategy, mesh, sizes)]
    for tensor in operator.inputs:
        if tensor.kind != "index":
            times = 1.0 if tensor.kind == "activation" else 1 / microbatches
            moves.append(_sum("backward", tensor, local, strategy, mesh, sizes, times))
    parameters = sum(local[t.name] for t in operator.inputs if t.kind == "parameter")
    return OperatorCost(
        compute_seconds(operator, strategy, mesh, machine, local, sizes.element),
        tuple(move for move in moves if move is not None),
        parameters * sizes.state,
        local[operator.output.name] * sizes.element,
    )


def _local(
    operator: Operator, tensor: OperatorTensor, strategy: ShardingStrategy, mesh: LogicalMesh
) -> float:
    """Elements of a rank's part."""
    return operator.size(tensor) / mesh.ranks_over(
        a for a, at in enumerate(strategy.layout(tensor)) if at is not None
    )


def _sum(
    when: Literal["forward", "backward"],
    tensor: OperatorTensor,
    local: dict[str, float],
    strategy: ShardingStrategy,
    mesh: LogicalMesh,
    sizes: TensorBytes,
    times: float = 1.0,
) -> Communication | None:
    """The all-reduce of an output forward, or of an input's gradient backward, where ranks hold
    parts of a sum.
    """
    axes = strategy.partial_axes(tensor)
    element = sizes.gradient if tensor.kind in ("parameter", "tied") else sizes.element
    ranks, size = mesh.ranks_over(axes), local[tensor.name] * element
    if ranks == 1:
        return None
    return Communication(
        when,
        "all_reduce",
        tensor.name,
        ranks,
        size * times,
        mesh.seconds("all_reduce", size, axes) * times,
    )


def redistribution(
    held: TensorLayout, wanted: TensorLayout, size: float, mesh: LogicalMesh, tensor: str
) -> tuple[Communication, ...]:
    """What carries a tensor of `size` bytes from the layout it is held in to the one wanted, and
    its gradient back.
    """
    there = _carried("forward", held, wanted, size, mesh, tensor)
    return there + _carried("backward", wanted, held, size, mesh, tensor)


def _carried(
    when: Literal["forward", "backward"],
    held: TensorLayout,
    wanted: TensorLayout,
    size: float,
    mesh: LogicalMesh,
    tensor: str,
) -> tuple[Communication, ...]:
    """Slices first, for they are free and leave less to move; then exchanges; then one
    all-gather.
    """
    pairs = list(enumerate(zip(held, wanted)))
    sliced = [a for a, (has, wants) in pairs if has is None and wants is not None]
    exchanged = [
        a for a, (has, wants) in pairs if has is not None and wants is not None and has != wants
    ]
    gathered = [a for a, (has, wants) in pairs if has is not None and wants is None]
    local = size / mesh.ranks_over([*sliced, *(a for a, (has, _) in pairs if has is not None)])
    moves = (
        [Communication(when, "slice", tensor, mesh.ranks_over(sliced), local, 0.0)]
        if mesh.ranks_over(sliced) > 1
        else []
    )
    for a in exchanged:
        seconds = mesh.seconds("all_to_all", local, [a])
        moves.append(Communication(when, "all_to_all", tensor, mesh.axes[a].size, local, seconds))
    if (ranks := mesh.ranks_over(gathered)) > 1:
        whole = local * ranks
        moves.append(
            Communication(
                when,
                "all_gather",
                tensor,
                ranks,
                whole,
                mesh.seconds("all_gather", whole, gathered),
            )
        )
    return tuple(moves)
