"""3-D tensor parallelism on an l x l x l cube (2105.14450).

Every matrix is in l^3 blocks. A GEMM all-gathers its two operands along one axis each, and
reduce-scatters the result along the third.

A linear layer sees the cube's axes as `input`, `weight` and `output`. Rank (a, b, c) on them holds
of its input tokens (b, a) and columns c, of the weight [out, in] outputs (a, b) and inputs c, of
the output tokens (b, c) and columns a: the next layer's input, with `input` and `output` swapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.tensor.grid.grid_collectives import all_gather, reduce_scatter
from workbench.parallel.tensor.tensor_collectives import share_weight
from workbench.parallel.tensor.vocab_parallel import embedding_gradient, embedding_lookup


@dataclass(frozen=True)
class CubeGrid:
    """The axes of the cube, in their roles for one layer."""

    input: MeshAxis
    weight: MeshAxis
    output: MeshAxis

    @classmethod
    def of(cls, mesh: Mesh) -> CubeGrid:
        """Roles for a layer that reads the residual stream."""
        return cls(mesh["tensor.0"], mesh["tensor.1"], mesh["tensor.2"])

    def swapped(self) -> CubeGrid:
        """Roles for the layer that reads the output of one with these."""
        return CubeGrid(self.output, self.weight, self.input)

    def own(self, x: Tensor, minor: MeshAxis) -> Tensor:
        """This rank's sequences [B / l^2, ...] of a microbatch, sharded over `weight`, then
        `minor`.
        """
        index, parts = self.part(minor)
        return x.chunk(parts)[index]

    def part(self, minor: MeshAxis) -> tuple[int, int]:
        """(which part of a microbatch's sequences that is, of how many): l^2 parts."""
        return self.weight.index * minor.size + minor.index, self.weight.size * minor.size


class Linear3d(nn.Module):
    """y = x W^T + b in blocks.

    Args:
        weight: [out / l^2, in / l].
        bias: [out / l], equal along `weight` and `output`.
        grid: The axes in this layer's roles.
        num_outputs: Outputs of the all-gathered weight without the padding that makes it divide.
        shard: Which of `num_shards` different ranges of outputs this rank has; several ranks along
            `input` have the same where they need the same key-value head (GQA).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        grid: CubeGrid,
        num_outputs: int,
        shard: int = 0,
        num_shards: int = 0,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.grid, self.num_outputs = weight, bias, grid, num_outputs
        self.shard, self.num_shards = shard, num_shards or grid.input.size

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Block [B / l^2, T, in / l] to block [B / l^2, T, out / l]."""
        y = matmul_3d(x_BTD, self._shared(self.weight), self.grid, self.num_outputs)
        return y if self.bias is None else y + self._shared(self.bias)

    def _shared(self, parameter: Tensor) -> Tensor:
        axis = self.grid.input
        return (
            parameter
            if self.num_shards == axis.size
            else share_weight(parameter, axis, self.shard, self.num_shards)
        )


def matmul_3d(x: Tensor, weight: Tensor, grid: CubeGrid, num_outputs: int) -> Tensor:
    """Block of x W^T, [..., out / l], of blocks x [..., in / l] and W [out / l^2, in / l]."""
    y: Tensor = _Matmul3d.apply(x, weight, grid, num_outputs)
    return y


class _Matmul3d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: CubeGrid, num_outputs: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.num_outputs = grid, num_outputs
        x_NK = all_gather(x.contiguous(), grid.input)
        w_OK = all_gather(weight, grid.weight)[:num_outputs]
        return reduce_scatter(x_NK @ w_OK.t(), grid.output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        x_gradient = (
            _input_gradient(ctx, _flatten_rows(gradient), weight).view_as(x)
            if ctx.needs_input_grad[0]
            else None
        )
        return (
            x_gradient,
            _weight_gradient(ctx, _flatten_rows(gradient), _flatten_rows(x), weight.shape[0]),
            None,
            None,
        )


def _flatten_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


def _input_gradient(ctx: Any, gradient_NO: Tensor, weight: Tensor) -> Tensor:
    """dX = dY W, the same GEMM with the axes in other roles."""
    grid: CubeGrid = ctx.grid
    w_OK = all_gather(weight, grid.weight)[: ctx.num_outputs]
    return reduce_scatter(all_gather(gradient_NO, grid.output) @ w_OK, grid.input)


def _weight_gradient(ctx: Any, gradient_NO: Tensor, x_NK: Tensor, rows: int) -> Tensor:
    """dW = dY^T X, likewise."""
    grid: CubeGrid = ctx.grid
    full_OK = all_gather(gradient_NO, grid.output).t() @ all_gather(x_NK, grid.input)
    return reduce_scatter(_pad_rows(full_OK, rows * grid.weight.size), grid.weight)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else torch.cat((x, x.new_zeros(rows - x.shape[0], *x.shape[1:])))


class Embedding3d(nn.Module):
    """Embedding table in blocks [vocab / l^2, D / l].

    A rank all-gathers the table along `weight`, looks up the tokens of all ranks along `input`, and
    they reduce-scatter the results.

    Args:
        weight: Rows of the vocabulary over `input` and then `weight`, columns over `output`.
        rows: [start, stop) of the vocabulary in the gathered table.
    """

    def __init__(self, weight: nn.Parameter, rows: tuple[int, int], grid: CubeGrid) -> None:
        super().__init__()
        self.weight, self.rows, self.grid = weight, rows, grid

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens of a microbatch [B, T] to this rank's block [B / l^2, T, D / l]."""
        axis = self.grid.weight
        x: Tensor = _Lookup3d.apply(
            tokens_BT.chunk(axis.size)[axis.index], self.weight, self.rows, self.grid
        )
        return x


class _Lookup3d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_BT: Tensor, weight: Tensor, rows: tuple[int, int], grid: CubeGrid
    ) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.rows, ctx.grid, ctx.num_rows = rows, grid, weight.shape[0] * grid.weight.size
        return reduce_scatter(
            embedding_lookup(tokens_BT, all_gather(weight, grid.weight), rows), grid.input
        )

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens_BT,) = ctx.saved_tensors
        full_BTD = all_gather(gradient_BTD.contiguous(), ctx.grid.input)
        table_VD = embedding_gradient(tokens_BT, full_BTD, ctx.rows, ctx.num_rows)
        return None, reduce_scatter(table_VD, ctx.grid.weight), None, None
