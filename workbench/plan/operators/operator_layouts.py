"""Layouts of an operator's tensors under its strategy, for a run and for its estimate."""

from __future__ import annotations

from workbench.plan.operators.strategy_form import Placement
from workbench.plan.operators.tensor_layout import TensorLayout


class OperatorLayouts:
    """What follows of `placement`, the dimension that each axis shards (None to replicate), and of
    `output`, that of the output where it is another.

    Methods take the dim of each named dimension in the tensor at hand, e.g. `{"rows": 0}`.
    """

    placement: Placement
    output: Placement | None

    def layout(self, num_dims: int, dims: dict[str, int]) -> TensorLayout:
        """Layout of a tensor that has `dims`: sharded along those that the strategy shards."""
        return _placed(self.placement, num_dims, dims)

    def partial_layout(self, num_dims: int, dims: dict[str, int]) -> TensorLayout:
        """As `layout`, but partial over axes that shard a dimension the tensor lacks."""
        partial = (a for a, name in enumerate(self.placement) if name and name not in dims)
        return self.layout(num_dims, dims)._replace(partial=tuple(partial))

    def output_layout(self, num_dims: int, dims: dict[str, int]) -> TensorLayout:
        """As `layout`, of the output once partial sums are reduced."""
        return _placed(self.output or self.placement, num_dims, dims)


def gathers_tokens(held: TensorLayout, wanted: TensorLayout) -> bool:
    """Whether a redistribution gathers tokens of an activation [B, T, ..]."""
    return len(held.dims) > 2 and not {*held.dims[1]} <= {*wanted.dims[1]}


def _placed(placement: Placement, num_dims: int, dims: dict[str, int]) -> TensorLayout:
    at = [
        dims[name] % num_dims if name is not None and name in dims else None for name in placement
    ]
    return TensorLayout.placed(at, num_dims)
