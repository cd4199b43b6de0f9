"""Make the GEMMs of a model's blocks fp8."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from workbench.models import Transformer
from workbench.parallel.float8 import torchao_float8  # noqa: F401 (refuses where torchao is missing)
from workbench.parallel.float8.float8_linear import Float8Layer, Role, UnshardedFloat8Linear
from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.operators.operator_forward import LinearOperator
from workbench.parallel.operators.operator_grid import OperatorGrid
from workbench.parallel.tensor.column_parallel import ColumnParallelLinear
from workbench.parallel.tensor.row_parallel import RowParallelLinear

FLOAT8_LAYERS = (
    "blocks.*.attention.[qkvo]",
    "blocks.*.mlp.gate",
    "blocks.*.mlp.up",
    "blocks.*.mlp.down",
)
"""Patterns of the modules whose GEMMs are fp8; head, router and attention itself are not."""


def apply_float8(model: Transformer, mesh: Mesh) -> None:
    """Make the GEMMs of a stage's blocks fp8, in place, after tensor parallelism or operator
    strategies have sharded it.
    """
    tensor, context = (mesh["tensor"],), (mesh["context"],)
    column: dict[Role, tuple[MeshAxis, ...]] = {
        "input": context,
        "weight": tensor,
        "gradient": tensor + context,
    }
    row: dict[Role, tuple[MeshAxis, ...]] = {
        "input": tensor + context,
        "weight": tensor,
        "gradient": context,
    }
    unsharded: dict[Role, tuple[MeshAxis, ...]] = {
        "input": context,
        "weight": (),
        "gradient": context,
    }
    for path, module in list(model.named_modules()):
        if not any(fnmatchcase(path, pattern) for pattern in FLOAT8_LAYERS):
            continue
        if isinstance(module.forward, LinearOperator):
            module.forward = _float8_operator(path, module.forward, mesh)
        elif isinstance(module, ColumnParallelLinear):
            module.float8 = Float8Layer(path, column)
        elif isinstance(module, RowParallelLinear):
            module.float8 = Float8Layer(path, row)
        elif isinstance(module, nn.Linear):
            model.set_submodule(path, UnshardedFloat8Linear(module, Float8Layer(path, unsharded)))


def _float8_operator(path: str, forward: LinearOperator, mesh: Mesh) -> LinearOperator:
    """An operator in fp8: a tensor's scale is over the axes that shard one of its dimensions."""
    grid, placement = OperatorGrid(mesh), forward.sharding.placement

    def over(*dims: str) -> tuple[MeshAxis, ...]:
        return tuple(axis for dim in dims for axis in grid.over(placement, dim))

    context = (mesh["context"],)
    axes: dict[Role, tuple[MeshAxis, ...]] = {
        "input": over("rows", "tokens", "inner") + context,
        "weight": over("inner", "columns"),
        "gradient": over("rows", "tokens", "columns") + context,
    }
    return replace(forward, float8=Float8Layer(path, axes))
