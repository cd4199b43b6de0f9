"""2-D and 2.5-D tensor parallelism: SUMMA on a q x q grid (2104.05343), d times (2105.14500).

Rank (i, j) of a layer of the grid holds block [i, j] of every matrix: of activations the rows of
tokens i and the columns j, of a weight W [out, in] the outputs of column j and the inputs of row i.
A GEMM takes q steps. Each broadcasts one block along rows and one along columns (forward), or
broadcasts one and reduces the partial results along the other (backward). The d layers of 2.5-D
hold the same weights and different tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.tensor.grid.grid_collectives import (
    broadcast,
    reduce,
    run_moves,
    swap_with_gradient,
)
from workbench.parallel.tensor.tensor_collectives import share_weight
from workbench.parallel.tensor.vocab_parallel import embedding_gradient, embedding_lookup


@dataclass(frozen=True)
class SquareGrid:
    """The axes of a q x q x d grid, as a rank sees them.

    Attributes:
        tensor: All ranks of the grid.
        column: This rank's index is its column j.
        row: This rank's index is its row i.
        depth: This rank's index is its layer (2.5-D), or None.
    """

    tensor: MeshAxis
    column: MeshAxis
    row: MeshAxis
    depth: MeshAxis | None

    @classmethod
    def of(cls, mesh: Mesh) -> SquareGrid:
        """Columns are innermost, layers outermost."""
        axes = mesh.axes
        return cls(axes["tensor"], axes["tensor.0"], axes["tensor.1"], axes.get("tensor.2"))

    def own(self, x: Tensor) -> Tensor:
        """This rank's sequences [B / (q d), ...] of a microbatch [B, ...]."""
        index, parts = self.part
        return x.chunk(parts)[index]

    @property
    def part(self) -> tuple[int, int]:
        """(which part of a microbatch's sequences this rank has, of how many): q d parts."""
        layers, layer = (1, 0) if self.depth is None else (self.depth.size, self.depth.index)
        return layer * self.row.size + self.row.index, layers * self.row.size

    @property
    def transposed_rank(self) -> int:
        """Index on the tensor axis of the rank at (j, i) of this layer."""
        q = self.column.size
        return self.row.index + q * self.column.index + self.tensor.index // q**2 * q**2


class SummaLinear(nn.Module):
    """y = x W^T + b in blocks, by SUMMA.

    Args:
        weight: [out / q, in / q].
        bias: [out / q], equal on the ranks of a column.
        grid: The axes.
        shard: Which of `num_shards` different ranges of outputs this column has; several columns
            have the same where they need the same key-value head (GQA).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        grid: SquareGrid,
        shard: int = 0,
        num_shards: int = 0,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.grid = weight, bias, grid
        self.shard, self.num_shards = shard, num_shards or grid.column.size

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Block [B / (q d), T, in / q] to block [B / (q d), T, out / q]."""
        y = summa(x_BTD, self._shared(self.weight), self.grid)
        return y if self.bias is None else y + self._shared(self.bias)

    def _shared(self, parameter: Tensor) -> Tensor:
        column = self.grid.column
        return (
            parameter
            if self.num_shards == column.size
            else share_weight(parameter, column, self.shard, self.num_shards)
        )


def summa(x: Tensor, weight: Tensor, grid: SquareGrid) -> Tensor:
    """Block of x W^T, [..., out / q], of blocks x [..., in / q] and W [out / q, in / q]."""
    y: Tensor = _Summa.apply(x, weight, grid)
    return y


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: SquareGrid) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        x_NK, y = x.flatten(0, -2).contiguous(), x.new_zeros(*x.shape[:-1], weight.shape[0])
        y_NO = y.view(-1, weight.shape[0])
        for k in range(grid.column.size):
            x_block, weight_block = run_moves(
                broadcast(x_NK, grid.column, k), broadcast(weight, grid.row, k)
            )
            y_NO.addmm_(x_block, weight_block.t())
            del x_block, weight_block  # before there are new ones
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient_NO, x_NK = gradient.flatten(0, -2), x.flatten(0, -2).contiguous()
        x_gradient = (
            _input_gradient(gradient_NO, weight, ctx.grid).view_as(x)
            if ctx.needs_input_grad[0]
            else None
        )
        return x_gradient, _weight_gradient(gradient_NO, x_NK, ctx.grid), None


def _input_gradient(gradient_NO: Tensor, weight: Tensor, grid: SquareGrid) -> Tensor:
    """Block j of dX = dY W: for each k the partial results are reduced to column k."""
    return _broadcast_multiply_reduce(
        lambda block: gradient_NO @ block, weight, grid.row, grid.column
    )


def _weight_gradient(gradient_NO: Tensor, x_NK: Tensor, grid: SquareGrid) -> Tensor:
    """Block i of dW = dY^T X: for each k the partial results are reduced to row k."""
    return _broadcast_multiply_reduce(
        lambda block: gradient_NO.t() @ block, x_NK, grid.column, grid.row
    )


def _broadcast_multiply_reduce(
    multiply: Callable[[Tensor], Tensor], x: Tensor, along: MeshAxis, over: MeshAxis
) -> Tensor:
    """Multiply with block k of `x`, for every k, and reduce the results to index k of `over`.

    The reduce of one step and the broadcast of the next are issued together.
    """
    own: Tensor | None = None
    moves = [broadcast(x, along, 0)]
    for k in range(along.size):
        block = run_moves(*moves).pop()
        moves.clear()
        partial_sum = multiply(block)
        del block  # before there is a new one
        own = partial_sum if over.index == k else own
        moves.append(reduce(partial_sum, over, k))
        del partial_sum
        moves += [broadcast(x, along, k + 1)] if k + 1 < along.size else []
    run_moves(*moves)
    assert own is not None
    return own


class SummaEmbedding(nn.Module):
    """Embedding table in blocks [vocab / q, D / q]; each block of a column is broadcast along it.

    A rank looks its tokens up in all blocks of its column, and adds what it finds.
    """

    def __init__(self, weight: nn.Parameter, vocab: int, grid: SquareGrid) -> None:
        super().__init__()
        self.weight, self.vocab, self.grid = weight, vocab, grid

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens of a microbatch [B, T] to this rank's block [B / (q d), T, D / q]."""
        x: Tensor = _SummaLookup.apply(
            self.grid.own(tokens_BT), self.weight, self.vocab, self.grid.row
        )
        return x


class _SummaLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight: Tensor, vocab: int, axis: MeshAxis) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.axis, ctx.vocab, ctx.num_rows = axis, vocab, weight.shape[0]
        x_BTD = weight.new_zeros(*tokens_BT.shape, weight.shape[1])
        for k in range(axis.size):
            x_BTD += embedding_lookup(
                tokens_BT, run_moves(broadcast(weight, axis, k)).pop(), _rows(ctx, k)
            )
        return x_BTD

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens_BT,) = ctx.saved_tensors
        own: Tensor | None = None
        for k in range(ctx.axis.size):
            block_VD = embedding_gradient(tokens_BT, gradient_BTD, _rows(ctx, k), ctx.num_rows)
            run_moves(reduce(block_VD, ctx.axis, k))
            own = block_VD if ctx.axis.index == k else own
        assert own is not None
        return None, own, None, None


def _rows(ctx: Any, k: int) -> tuple[int, int]:
    return min(k * ctx.num_rows, ctx.vocab), min((k + 1) * ctx.num_rows, ctx.vocab)


def grid_logits(x_BTD: Tensor, weight_VD: Tensor, grid: SquareGrid, tied: bool) -> Tensor:
    """This rank's block of the logits [B / (q d), T, vocab / q].

    A tied weight has the embedding's blocks: vocabulary over rows and width over columns. SUMMA
    needs them transposed, so that rank (i, j) and rank (j, i) swap theirs.
    """
    if tied:
        weight_VD = swap_with_gradient(weight_VD, grid.tensor, grid.transposed_rank)
    return summa(x_BTD, weight_VD, grid)
