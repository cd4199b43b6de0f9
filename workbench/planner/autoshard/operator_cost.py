"""Cost of one operator under a sharding strategy, and of resharding between two operators.

Times are of one microbatch, forward and backward. After OptCNN and FlexFlow (arXiv:1802.04924,
1807.05358), Tofu (arXiv:1807.08887), Alpa (arXiv:2201.12023) and MindSpore's automatic parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.plan.operators.operator_graph import Operator, OperatorTensor
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_compute import compute_seconds
from workbench.planner.autoshard.operator_splits import ShardingStrategy, TensorLayout


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
    """Seconds, forward and backward."""
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
    """The cost of one operator on one rank, in one layer.

    Args:
        operator: The operator.
        strategy: How it is sharded.
        mesh: The ranks.
        machine: What a rank computes and communicates with.
        sizes: Bytes per element.
        microbatches: Over which a weight's gradient adds up before it is reduced.
    """
    local = {
        t.name: _local_elements(operator, t, strategy, mesh)
        for t in (*operator.inputs, operator.output)
    }
    moves = [_all_reduce_partial("forward", operator.output, local, strategy, mesh, sizes)]
    for tensor in operator.inputs:
        if tensor.kind != "index":
            times = 1.0 if tensor.kind == "activation" else 1 / microbatches
            moves.append(
                _all_reduce_partial("backward", tensor, local, strategy, mesh, sizes, times)
            )
    parameters = sum(local[t.name] for t in operator.inputs if t.kind == "parameter")
    return OperatorCost(
        compute_seconds(operator, strategy, mesh, machine, local, sizes.element),
        tuple(move for move in moves if move is not None),
        parameters * sizes.state,
        local[operator.output.name] * sizes.element,
    )


def _local_elements(
    operator: Operator, tensor: OperatorTensor, strategy: ShardingStrategy, mesh: LogicalMesh
) -> float:
    """Elements of a rank's part."""
    return operator.size(tensor) / mesh.ranks_over(
        a for a, at in enumerate(strategy.layout(tensor)) if at is not None
    )


def _all_reduce_partial(
    when: Literal["forward", "backward"],
    tensor: OperatorTensor,
    local: dict[str, float],
    strategy: ShardingStrategy,
    mesh: LogicalMesh,
    sizes: TensorBytes,
    times: float = 1.0,
) -> Communication | None:
    """The all-reduce of a tensor that ranks hold partial sums of, or None.

    That is the output forward, where the strategy splits a contracted dimension, and an input's
    gradient backward, where it splits a dimension that the input lacks.
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
    """Resharding of a tensor from the layout that it has to the one that is wanted, and its
    gradient back (tensor redistribution in MindSpore).

    Args:
        held: The layout that the tensor has.
        wanted: The layout that its reader wants.
        size: Bytes of the unsharded tensor.
        mesh: The ranks.
        tensor: Its name.
    """
    there = _reshard("forward", held, wanted, size, mesh, tensor)
    return there + _reshard("backward", wanted, held, size, mesh, tensor)


def _reshard(
    when: Literal["forward", "backward"],
    held: TensorLayout,
    wanted: TensorLayout,
    size: float,
    mesh: LogicalMesh,
    tensor: str,
) -> tuple[Communication, ...]:
    """Slices, then all-to-alls, then one all-gather."""
    # Slices are free and leave less to move, so they come first.
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
