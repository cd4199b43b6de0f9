"""The legal sharding strategies of each operator on a logical mesh.

A strategy is written in MindSpore's form: a tuple an input, a number a tensor dimension, such as
`((4,1),(1,1))` for a MatMul whose first input is split 4 ways by rows. Ranks that a strategy leaves
over repeat the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

from workbench.plan.operators.operator_graph import Operator, OperatorTensor
from workbench.plan.operators.operator_sites import Site
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
    """As briefly as it can be written: without tokens where they are not split."""
    output: Placement | None = None
    """The same of its output once its sum is reduce-scattered by tokens; None: it is all-reduced.
    """

    def layout(self, tensor: OperatorTensor) -> TensorLayout:
        """How the tensor lies on the mesh as this strategy reads or leaves it; a partial output,
        once it is summed.
        """
        return _layout(self.placement, tensor)

    def output_layout(self, tensor: OperatorTensor) -> TensorLayout:
        """The same of its output, if that is scattered."""
        return _layout(self.output or self.placement, tensor)

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
    def of_rows(self) -> ShardingStrategy:
        """The same, as if it split nothing but rows."""
        return replace(self, placement=tuple(d if d == "rows" else None for d in self.placement))

    @property
    def splits(self) -> set[tuple[int, str]]:
        """Mesh axes and the dimensions that they split, of inputs or of the output."""
        pairs = {*enumerate(self.placement), *enumerate(self.output or ())}
        return {(axis, name) for axis, name in pairs if name is not None}

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
    """Every legal strategy: pieces divide what a dimension may be split into, their product divides
    the ranks.

    One placement stands for each form, as a plan's written strategy has one: the first dimension
    takes the outermost axes and the others the innermost, the last first. On a grid each axis
    splits one dimension or none.
    """
    found = _on_grid(operator, mesh) if mesh.grid else _on_ranks(operator, mesh)
    return tuple(
        ShardingStrategy(placement, _form(operator, placement, mesh, output), output)
        for placement in found
        if operator.kind != "CrossEntropy" or _sums_over_neighbors(placement)
        for output in _outputs(operator, placement, mesh)
    )


def _outputs(
    operator: Operator, placement: Placement, mesh: LogicalMesh
) -> Iterator[Placement | None]:
    """Where the output may lie: as the inputs do, or with its sum scattered by tokens."""
    yield None
    kept = operator.output.dims
    scattered = tuple("tokens" if d is not None and d not in kept else d for d in placement)
    if operator.scatters and scattered != placement:
        ways = _num_shards("tokens", scattered, mesh)
        if next(dim.units for dim in operator.dims if dim.name == "tokens") % ways == 0:
            yield scattered


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


def _layout(placement: Placement, tensor: OperatorTensor) -> TensorLayout:
    at = [tensor.dims.index(name) if name in tensor.dims else None for name in placement]
    return TensorLayout.placed(at, len(tensor.dims))


def _form(
    operator: Operator, placement: Placement, mesh: LogicalMesh, output: Placement | None
) -> Form:
    form = tuple(
        tuple(_num_shards(name, placement, mesh) for name in dims) for dims in _written(operator)
    )
    out = (
        () if output is None else tuple(_num_shards(n, output, mesh) for n in operator.output.dims)
    )
    return shortest_form(operator, (*form, out) if out else form)


def _written(operator: Operator) -> tuple[tuple[str, ...], ...]:
    """Dimensions of each tuple of a strategy: those of each input that it names."""
    if operator.named:
        return operator.named
    return tuple(tensor.dims for tensor in operator.inputs if tensor.kind != "residual")


def shortest_form(operator: Operator, form: Form) -> Form:
    """A strategy without what need not be written: an output that is split as the inputs are, and
    tokens that are not split. A form of another operator is returned as it is.
    """
    inputs = _written(operator)
    if operator.traced:
        return Site(operator.kind, {dim.name: dim.units for dim in operator.dims}, inputs).whole(
            form
        )
    dims = (*inputs, operator.output.dims)[: len(form)]
    if tuple(map(len, dims)) != tuple(map(len, form)):
        return form
    tokens = [n for names, part in zip(dims, form) for d, n in zip(names, part) if d == "tokens"]
    kept = form[: len(inputs)] if len({*tokens}) <= 1 else form
    if {*tokens} != {1}:
        return kept
    return tuple(
        tuple(n for d, n in zip(names, part) if d != "tokens") for names, part in zip(dims, kept)
    )
