"""2-D and 2.5-D products: SUMMA on a q x q grid (2104.05343), d times side by side on other tokens
(2105.14500).

Rank (i, j) of a layer of the grid holds block [i, j] of every matrix: of activations rows of tokens
i and columns j, of a weight W of [out, in] columns j of the outputs and rows i of the inputs. Each
of the q steps of a product broadcasts one block along each side, or broadcasts one and sums the
partial results along the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.parallel.mesh import Mesh, MeshAxis
from workbench.parallel.tensor.grid.grid_collectives import broadcast, exchanged, reduce, together
from workbench.parallel.tensor.tensor_collectives import share
from workbench.parallel.tensor.vocab_parallel import look_up, table_gradient


@dataclass(frozen=True)
class Square:
    """The sides of a q x q x d grid as one rank sees them: its index along `column` is j, along
    `row` i.
    """

    whole: MeshAxis
    column: MeshAxis
    row: MeshAxis
    depth: MeshAxis | None

    @classmethod
    def of(cls, mesh: Mesh) -> Square:
        """Columns are innermost, layers outermost."""
        axes = mesh.axes
        return cls(axes["tensor"], axes["tensor.0"], axes["tensor.1"], axes.get("tensor.2"))

    def own(self, x: Tensor) -> Tensor:
        """This rank's sequences of a microbatch [B, ...]: [B / (q d), ...]."""
        index, parts = self.part
        return x.chunk(parts)[index]

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a microbatch's sequences this rank has, and of how many: q d."""
        layers, layer = (1, 0) if self.depth is None else (self.depth.size, self.depth.index)
        return layer * self.row.size + self.row.index, layers * self.row.size

    @property
    def mirror(self) -> int:
        """Index in the whole grid of rank (j, i) of this layer."""
        q = self.column.size
        return self.row.index + q * self.column.index + self.whole.index // q**2 * q**2


class SummaLinear(nn.Module):
    """y = x W^T + b by blocks. Weight [out / q, in / q], bias [out / q], equal on the ranks of a
    column.

    `piece` of `pieces` is which outputs it has, where several columns share some (a key-value
    head).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        grid: Square,
        piece: int = 0,
        pieces: int = 0,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.grid = weight, bias, grid
        self.piece, self.pieces = piece, pieces or grid.column.size

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Block [B / (q d), T, in / q] to block [B / (q d), T, out / q]."""
        y = summa(x_BTD, self._own(self.weight), self.grid)
        return y if self.bias is None else y + self._own(self.bias)

    def _own(self, parameter: Tensor) -> Tensor:
        column = self.grid.column
        return (
            parameter
            if self.pieces == column.size
            else share(parameter, column, self.piece, self.pieces)
        )


def summa(x: Tensor, weight: Tensor, grid: Square) -> Tensor:
    """Block of x W^T, [..., out / q], of blocks x [..., in / q] and W [out / q, in / q]."""
    y: Tensor = _Summa.apply(x, weight, grid)
    return y


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Square) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        x_NK, y = x.flatten(0, -2).contiguous(), x.new_zeros(*x.shape[:-1], weight.shape[0])
        y_NO = y.view(-1, weight.shape[0])
        for k in range(grid.column.size):
            x_block, weight_block = together(
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


def _input_gradient(gradient_NO: Tensor, weight: Tensor, grid: Square) -> Tensor:
    """Block j of dX = sum over columns of dY W: column k sums the part that belongs to it."""
    return _summed(lambda block: gradient_NO @ block, weight, grid.row, grid.column)


def _weight_gradient(gradient_NO: Tensor, x_NK: Tensor, grid: Square) -> Tensor:
    """Block i of dW = sum over rows of dY^T X: row k sums the part that belongs to it."""
    return _summed(lambda block: gradient_NO.t() @ block, x_NK, grid.column, grid.row)


def _summed(
    multiply: Callable[[Tensor], Tensor], x: Tensor, along: MeshAxis, over: MeshAxis
) -> Tensor:
    """What index k of `over` gets where the ranks' products with block k of `x` are summed; a sum
    and the next block move side by side.
    """
    own: Tensor | None = None
    moves = [broadcast(x, along, 0)]
    for k in range(along.size):
        block = together(*moves).pop()
        moves.clear()
        product = multiply(block)
        del block  # before there is a new one
        own = product if over.index == k else own
        moves.append(reduce(product, over, k))
        del product
        moves += [broadcast(x, along, k + 1)] if k + 1 < along.size else []
    together(*moves)
    assert own is not None
    return own


class SummaEmbedding(nn.Module):
    """Rows i and columns j of the table, [vocab / q, D / q]: a rank looks its tokens up in all
    blocks of its column.
    """

    def __init__(self, weight: nn.Parameter, vocab: int, grid: Square) -> None:
        super().__init__()
        self.weight, self.vocab, self.grid = weight, vocab, grid

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """A microbatch's tokens [B, T] to this rank's block [B / (q d), T, D / q]."""
        x: Tensor = _LookUp.apply(self.grid.own(tokens_BT), self.weight, self.vocab, self.grid.row)
        return x


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight: Tensor, vocab: int, axis: MeshAxis) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.axis, ctx.vocab, ctx.room = axis, vocab, weight.shape[0]
        x_BTD = weight.new_zeros(*tokens_BT.shape, weight.shape[1])
        for k in range(axis.size):
            x_BTD += look_up(tokens_BT, together(broadcast(weight, axis, k)).pop(), _rows(ctx, k))
        return x_BTD

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens_BT,) = ctx.saved_tensors
        own: Tensor | None = None
        for k in range(ctx.axis.size):
            block_VD = table_gradient(tokens_BT, gradient_BTD, _rows(ctx, k), ctx.room)
            together(reduce(block_VD, ctx.axis, k))
            own = block_VD if ctx.axis.index == k else own
        assert own is not None
        return None, own, None, None


def _rows(ctx: Any, k: int) -> tuple[int, int]:
    return min(k * ctx.room, ctx.vocab), min((k + 1) * ctx.room, ctx.vocab)


def logits(x_BTD: Tensor, weight_VD: Tensor, grid: Square, tied: bool) -> Tensor:
    """Block [B / (q d), T, vocab / q]. A tied weight lies as the embedding's, with tokens along its
    rows: rank (i, j) and rank (j, i) lend each other their blocks.
    """
    if tied:
        weight_VD = exchanged(weight_VD, grid.whole, grid.mirror)
    return summa(x_BTD, weight_VD, grid)
