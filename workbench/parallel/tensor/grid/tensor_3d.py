"""3-D products on an l x l x l cube (2105.14450): every matrix in l^3 blocks, gathered along one
side before it is multiplied; partial results are summed and scattered along the third.

A linear layer sees the cube's sides as `input`, `weight` and `output`. Rank (a, b, c) on them holds
of its input tokens (b, a) and columns c, of the weight [out, in] outputs (a, b) and inputs c, of
the output tokens (b, c) and columns a: the next layer's input, with the sides of input and output
changed about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.tensor.grid.grid_collectives import all_gather, reduce_scatter
from workbench.parallel.tensor.tensor_collectives import share
from workbench.parallel.tensor.vocab_parallel import look_up, table_gradient


@dataclass(frozen=True)
class Cube:
    """The sides of the cube in the eyes of one layer."""

    input: MeshAxis
    weight: MeshAxis
    output: MeshAxis

    @classmethod
    def of(cls, mesh: Mesh) -> Cube:
        """As a layer sees it that reads the residual stream."""
        return cls(mesh["tensor.0"], mesh["tensor.1"], mesh["tensor.2"])

    def turned(self) -> Cube:
        """As a layer sees it that comes after one of this view."""
        return Cube(self.output, self.weight, self.input)

    def own(self, x: Tensor, fine: MeshAxis) -> Tensor:
        """This rank's sequences of a microbatch [B, ...], cut along `weight` and then along `fine`:
        [B / l^2, ...].
        """
        index, parts = self.part(fine)
        return x.chunk(parts)[index]

    def part(self, fine: MeshAxis) -> tuple[int, int]:
        """Which part of a microbatch's sequences that is, and of how many: l^2."""
        return self.weight.index * fine.size + fine.index, self.weight.size * fine.size


class CubeLinear(nn.Module):
    """y = x W^T + b by blocks. Weight [out / l^2, in / l], bias [out / l], equal along `weight` and
    `output`.

    `num_outputs` is what the gathered weight has of real outputs and common padding; `piece` of
    `pieces` is which it has, where several ranks along `input` share some (a key-value head).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        grid: Cube,
        num_outputs: int,
        piece: int = 0,
        pieces: int = 0,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.grid, self.num_outputs = weight, bias, grid, num_outputs
        self.piece, self.pieces = piece, pieces or grid.input.size

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Block [B / l^2, T, in / l] to block [B / l^2, T, out / l]."""
        y = multiply(x_BTD, self._own(self.weight), self.grid, self.num_outputs)
        return y if self.bias is None else y + self._own(self.bias)

    def _own(self, parameter: Tensor) -> Tensor:
        axis = self.grid.input
        return (
            parameter
            if self.pieces == axis.size
            else share(parameter, axis, self.piece, self.pieces)
        )


def multiply(x: Tensor, weight: Tensor, grid: Cube, num_outputs: int) -> Tensor:
    """Block of x W^T, [..., out / l], of blocks x [..., in / l] and W [out / l^2, in / l]."""
    y: Tensor = _Multiply.apply(x, weight, grid, num_outputs)
    return y


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Cube, num_outputs: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.num_outputs = grid, num_outputs
        whole, w_OK = (
            all_gather(x.contiguous(), grid.input),
            all_gather(weight, grid.weight)[:num_outputs],
        )
        return reduce_scatter(whole @ w_OK.t(), grid.output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        x_gradient = (
            _input_gradient(ctx, _rows(gradient), weight).view_as(x)
            if ctx.needs_input_grad[0]
            else None
        )
        return (
            x_gradient,
            _weight_gradient(ctx, _rows(gradient), _rows(x), weight.shape[0]),
            None,
            None,
        )


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


def _input_gradient(ctx: Any, gradient_NO: Tensor, weight: Tensor) -> Tensor:
    """dX = dY W, the same product with the sides changed about."""
    grid: Cube = ctx.grid
    w_OK = all_gather(weight, grid.weight)[: ctx.num_outputs]
    return reduce_scatter(all_gather(gradient_NO, grid.output) @ w_OK, grid.input)


def _weight_gradient(ctx: Any, gradient_NO: Tensor, x_NK: Tensor, rows: int) -> Tensor:
    """dW = dY^T X, likewise."""
    grid: Cube = ctx.grid
    whole_OK = all_gather(gradient_NO, grid.output).t() @ all_gather(x_NK, grid.input)
    return reduce_scatter(_padded(whole_OK, rows * grid.weight.size), grid.weight)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else torch.cat((x, x.new_zeros(rows - x.shape[0], *x.shape[1:])))


class CubeEmbedding(nn.Module):
    """Part of the table's rows along `input` and `weight`, columns along `output`: [vocab / l^2, D
    / l].

    `rows` is what of the vocabulary the gathered table holds: a rank looks up all tokens of the
    ranks along `input` there, and the results are summed and scattered.
    """

    def __init__(self, weight: nn.Parameter, rows: tuple[int, int], grid: Cube) -> None:
        super().__init__()
        self.weight, self.rows, self.grid = weight, rows, grid

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """A microbatch's tokens [B, T] to this rank's block [B / l^2, T, D / l] of the residual
        stream.
        """
        axis = self.grid.weight
        x: Tensor = _LookUp.apply(
            tokens_BT.chunk(axis.size)[axis.index], self.weight, self.rows, self.grid
        )
        return x


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_BT: Tensor, weight: Tensor, rows: tuple[int, int], grid: Cube
    ) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.rows, ctx.grid, ctx.height = rows, grid, weight.shape[0] * grid.weight.size
        return reduce_scatter(look_up(tokens_BT, all_gather(weight, grid.weight), rows), grid.input)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens_BT,) = ctx.saved_tensors
        whole_BTD = all_gather(gradient_BTD.contiguous(), ctx.grid.input)
        table_VD = table_gradient(tokens_BT, whole_BTD, ctx.rows, ctx.height)
        return None, reduce_scatter(table_VD, ctx.grid.weight), None, None
