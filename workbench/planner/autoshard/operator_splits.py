"""The legal sharding strategies of each operator on a logical mesh.

A strategy is written in MindSpore's form: a tuple an input, a number a tensor dimension, such as
`((4,1),(1,1))` for a MatMul whose first input is split 4 ways by rows. Ranks that a strategy leaves
over repeat the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

from workbench.plan.operators.operator_graph import Operator, OperatorTensor
from workbench.plan.operators.strategy_form import (
    Form,
    Placement,
    are_neighbors,
    placed,
    strategy_text,
)
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard.device_mesh import LogicalMesh


@dataclass(frozen=True)
class ShardingStrategy:
    """One way to shard an operator: the dimension that each mesh axis splits, None where its ranks
    repeat the work.
    """

    placement: Placement
    form: Form

    def layout(self, tensor: OperatorTensor) -> TensorLayout:
        """How the tensor lies on the mesh as this strategy reads or leaves it; a partial output,
        once it is summed.
        """
        at = [tensor.dims.index(name) if name in tensor.dims else None for name in self.placement]
        return TensorLayout.placed(at, len(tensor.dims))

    def partial_layout(self, tensor: OperatorTensor) -> TensorLayout:
        """The same of a tensor before it is summed: this operator's output, or the gradient of its
        input.
        """
        return self.layout(tensor)._replace(partial=self.partial_axes(tensor))

    def partial_axes(self, tensor: OperatorTensor) -> tuple[int, ...]:
        """Mesh axes over which ranks hold parts of a sum for the tensor: they split a dimension
        that it lacks.
        """
        return tuple(
            a
            for a, name in enumerate(self.placement)
            if name is not None and name not in tensor.dims
        )

    @property
    def text(self) -> str:
        """In MindSpore's form."""
        return strategy_text(self.form)

    @property
    def num_axes(self) -> int:
        """Mesh axes that split something."""
        return sum(name is not None for name in self.placement)

    def num_shards(self, name: str, mesh: LogicalMesh) -> int:
        """Shards of the dimension `name`."""
        return _num_shards(name, self.placement, mesh)

    def num_ranks_used(self, mesh: LogicalMesh) -> int:
        """Ranks that share the work; the others repeat it."""
        return mesh.ranks_over(a for a, name in enumerate(self.placement) if name is not None)


def legal_strategies(operator: Operator, mesh: LogicalMesh) -> tuple[ShardingStrategy, ...]:
    """Every legal strategy: pieces divide what a dimension may be cut into, their product divides
    the ranks.

    One placement stands for each form, as a plan's written strategy has one: the first dimension
    takes the outermost axes and the others the innermost, the last first. On a grid each axis
    splits one dimension or none.
    """
    found = _on_grid(operator, mesh) if mesh.grid else _on_ranks(operator, mesh)
    return tuple(
        ShardingStrategy(placement, _form(operator, placement, mesh))
        for placement in found
        if operator.kind != "CrossEntropy" or _sums_over_neighbors(placement)
    )


def _sums_over_neighbors(placement: Placement) -> bool:
    """Whether a loss adds up over axes that have one group."""
    return are_neighbors([a for a, name in enumerate(placement) if name == "vocabulary"])


def _on_grid(operator: Operator, mesh: LogicalMesh) -> Iterator[Placement]:
    first = operator.dims[0].name
    inner = [dim.name for dim in operator.dims[1:] if dim.units > 1]
    num_axes = len(mesh.axes)
    for outside in range(num_axes + 1):
        for inside in range(num_axes - outside + 1):
            free: Placement = (None,) * (num_axes - outside - inside)
            for ordered in combinations_with_replacement(inner, inside):
                placement = (first,) * outside + free + ordered
                if all(
                    dim.units % _num_shards(dim.name, placement, mesh) == 0 for dim in operator.dims
                ):
                    yield placement


def _on_ranks(operator: Operator, mesh: LogicalMesh) -> Iterator[Placement]:
    dims, sizes = [dim for dim in operator.dims if dim.units > 1], [axis.size for axis in mesh.axes]
    legal = [
        [n for n in range(1, mesh.ranks + 1) if mesh.ranks % n == 0 and dim.units % n == 0]
        for dim in dims
    ]
    for pieces in product(*legal):
        if mesh.ranks % math.prod(pieces) == 0:
            yield placed(
                operator.dims[0].name, {dim.name: n for dim, n in zip(dims, pieces)}, sizes
            )


def _num_shards(name: str, placement: Placement, mesh: LogicalMesh) -> int:
    return mesh.ranks_over(a for a, placed in enumerate(placement) if placed == name)


def _form(operator: Operator, placement: Placement, mesh: LogicalMesh) -> Form:
    return tuple(
        tuple(_num_shards(name, placement, mesh) for name in tensor.dims)
        for tensor in operator.inputs
        if tensor.kind != "residual"
    )
