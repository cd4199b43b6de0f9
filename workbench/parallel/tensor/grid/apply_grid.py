"""Apply 2-D, 2.5-D or 3-D tensor parallelism: linear layers, norms and embeddings in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.models.block import Attention
from workbench.models.counter_dropout import SAMPLE_STRIDE, Dropout
from workbench.models.seams import AddNorm
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import GRID_AXES, Mesh, MeshAxis
from workbench.parallel.tensor.grid import summa, tensor_3d
from workbench.parallel.tensor.grid.grid_head import GridParallelHeadLoss
from workbench.parallel.tensor.grid.grid_norm import GridParallelNorm
from workbench.parallel.tensor.grid.summa import SquareGrid, SummaEmbedding, SummaLinear
from workbench.parallel.tensor.grid.tensor_3d import CubeGrid, Embedding3d, Linear3d
from workbench.parallel.tensor.shard_range import ShardRange

Layouts = dict[str, Layout]


def apply_grid_parallel(model: Transformer, layouts: Layouts, mesh: Mesh, algorithm: str) -> None:
    """Replace the modules of a model by sharded ones, in place, and record their parameters'
    layouts.

    Args:
        model: A stage, on the meta device.
        layouts: Local parameter name -> layout; updated.
        algorithm: "2d", "2.5d" or "3d".
    """
    grid_axes = tuple(name for name in GRID_AXES if name in mesh.axes)
    for name, layout in layouts.items():
        layouts[name] = replace(
            layout,
            replicated_over=(
                *grid_axes,
                *(axis for axis in layout.replicated_over if axis != "tensor"),
            ),
        )
    sharding: SquareGridSharding | CubeGridSharding = (
        CubeGridSharding if algorithm == "3d" else SquareGridSharding
    )(model, layouts, mesh)
    for path, module in list(model.named_modules()):
        parent_path, _, name = path.rpartition(".")
        if isinstance(module, AddNorm):
            setattr(model.get_submodule(parent_path), name, sharding.norm(path, module))
        elif isinstance(module, nn.Linear):
            parent = model.get_submodule(parent_path)
            setattr(
                parent,
                name,
                sharding.linear(
                    path, module, _output_range(model, parent, name, module, sharding.outputs(name))
                ),
            )
        elif path == "embedding.positions":
            sharding.shard(
                path, module, "weight", {1: ShardRange.even(model.shape.hidden, sharding.hidden)}
            )
        elif path == "embedding.tokens":
            setattr(model.get_submodule(parent_path), name, sharding.embedding(path, module))
        elif path == "head":
            model.head = sharding.head(path, module)  # type: ignore[assignment]
    shard_dropout_masks(
        model, sharding.part, ShardRange.even(model.shape.hidden, sharding.hidden).start
    )


def _output_range(
    model: Transformer, parent: nn.Module, name: str, module: nn.Linear, axis: MeshAxis
) -> ShardRange:
    """The outputs of a layer that a rank has; those of attention's projections are whole heads."""
    if isinstance(parent, Attention) and name != "o":
        return ShardRange.heads(name, model.shape, axis)
    return ShardRange.even(module.out_features, axis)


def shard_dropout_masks(model: Transformer, part: tuple[int, int], first_channel: int) -> None:
    """Make a model's dropout draw the masks of its block of the residual stream.

    Args:
        part: (which part of a microbatch's sequences, of how many) the block has.
        first_channel: The first channel of the block.
    """
    for module in model.modules():
        if isinstance(module, Dropout):
            module.first_channel = first_channel
    model.local_part_of = partial(local_token_ids, part, model.embedding is not None)


def local_token_ids(part: tuple[int, int], has_tokens: bool, rows_BT: Tensor) -> Tensor:
    """Ids of the tokens [B / parts, T] of a rank's block of the residual stream.

    Args:
        part: (which part of a microbatch's sequences, of how many) the block has.
        has_tokens: Whether the stage's input is all tokens of a microbatch (the first stage). A
            later stage's input has the block's sequences only, and `rows_BT` counts them from the
            microbatch's first.
        rows_BT: Ids for the stage's input.
    """
    index, parts = part
    batch = rows_BT.shape[0] // (parts if has_tokens else 1)
    return rows_BT[:batch] + index * batch * SAMPLE_STRIDE


class _GridSharding:
    """What all grids share: sharding of parameters, and norms over the sharded hidden width."""

    def __init__(
        self, model: Transformer, layouts: Layouts, hidden: MeshAxis, part: tuple[int, int]
    ) -> None:
        self.model, self.layouts = model, layouts
        self.hidden, self.part = hidden, part
        """The residual stream: the axis that shards its width, and (which part, of how many) of its
        sequences are here.
        """

    def shard(
        self, path: str, module: nn.Module, name: str, ranges: dict[int, ShardRange]
    ) -> nn.Parameter:
        """Shard a parameter along dims, in its module and its layout."""
        key = f"{path}.{name}"
        for dim, shard in ranges.items():
            self.layouts[key] = shard.apply(self.layouts[key], dim)
        own = nn.Parameter(torch.empty(self.layouts[key].local_shape, device="meta"))
        setattr(module, name, own)
        return own

    def bias(self, path: str, module: nn.Module, shard: ShardRange) -> nn.Parameter | None:
        """A bias: sharded over one axis, replicated over the others."""
        return None if module.bias is None else self.shard(path, module, "bias", {0: shard})

    def norm(self, path: str, module: AddNorm) -> GridParallelNorm:
        """A norm over the sharded hidden width."""
        width = self.model.shape.hidden
        shard = ShardRange.even(width, self.hidden)
        weight = self.shard(path, module, "weight", {0: shard})
        return GridParallelNorm(
            weight, self.bias(path, module, shard), module.kind, module.epsilon, width, self.hidden
        )


class SquareGridSharding(_GridSharding):
    """2-D and 2.5-D: SUMMA."""

    def __init__(self, model: Transformer, layouts: Layouts, mesh: Mesh) -> None:
        self.grid = SquareGrid.of(mesh)
        super().__init__(model, layouts, self.grid.column, self.grid.part)

    def outputs(self, name: str) -> MeshAxis:
        """The axis that shards a layer's outputs."""
        return self.grid.column

    def linear(self, path: str, module: nn.Linear, outputs: ShardRange) -> SummaLinear:
        """A linear layer: outputs over columns, inputs over rows."""
        ranges = {0: outputs, 1: ShardRange.even(module.in_features, self.grid.row)}
        weight = self.shard(path, module, "weight", ranges)
        return SummaLinear(
            weight, self.bias(path, module, outputs), self.grid, outputs.shard, outputs.num_shards
        )

    def embedding(self, path: str, module: nn.Module) -> SummaEmbedding:
        """The token embedding: vocabulary over rows, width over columns."""
        return SummaEmbedding(
            self._table(path, module, self.grid.row, self.grid.column), self._vocab, self.grid
        )

    def head(self, path: str, module: nn.Module) -> GridParallelHeadLoss:
        """The head: vocabulary over columns, width over rows; if tied, as the embedding's."""
        row, column, tied = self.grid.row, self.grid.column, self.model.shape.tied
        weight = self._table(path, module, *((row, column) if tied else (column, row)))
        vocab = ShardRange.even(self._vocab, column)
        project = partial(summa.grid_logits, grid=self.grid, tied=tied)
        return GridParallelHeadLoss(
            weight, project, self.grid.own, (vocab.start, vocab.stop), column
        )

    @property
    def _vocab(self) -> int:
        return self.model.shape.vocab

    def _table(
        self, path: str, module: nn.Module, vocab: MeshAxis, width: MeshAxis
    ) -> nn.Parameter:
        ranges = {
            0: ShardRange.even(self._vocab, vocab),
            1: ShardRange.even(self.model.shape.hidden, width),
        }
        return self.shard(path, module, "weight", ranges)


class CubeGridSharding(_GridSharding):
    """3-D."""

    def __init__(self, model: Transformer, layouts: Layouts, mesh: Mesh) -> None:
        self.grid = CubeGrid.of(mesh)
        super().__init__(model, layouts, self.grid.output, self.grid.part(self.grid.input))

    def outputs(self, name: str) -> MeshAxis:
        """The axis that shards a layer's outputs."""
        return self._roles(name).input

    def linear(self, path: str, module: nn.Linear, outputs: ShardRange) -> Linear3d:
        """A linear layer: outputs over `input` and then `weight`, inputs over `output`."""
        grid = self._roles(path.rpartition(".")[2])
        weight = self._block(
            path, module, outputs, ShardRange.even(module.in_features, grid.output)
        )
        bias = self.bias(path, module, outputs)
        return Linear3d(weight, bias, grid, outputs.num_local, outputs.shard, outputs.num_shards)

    def embedding(self, path: str, module: nn.Module) -> Embedding3d:
        """The token embedding: sharded as the head, so that they can be tied."""
        weight, vocab = self._table(path, module)
        return Embedding3d(weight, (vocab.start, vocab.stop), self.grid)

    def head(self, path: str, module: nn.Module) -> GridParallelHeadLoss:
        """The head: vocabulary over `input` and then `weight`, width over `output`."""
        weight, vocab = self._table(path, module)
        project = partial(tensor_3d.matmul_3d, grid=self.grid, num_outputs=vocab.num_local)
        own: Callable[..., Any] = partial(self.grid.own, minor=self.grid.output)
        return GridParallelHeadLoss(
            weight, project, own, (vocab.start, vocab.stop), self.grid.input
        )

    def _roles(self, name: str) -> CubeGrid:
        """Roles of the axes: o and down read the output of layers that read the residual stream."""
        return self.grid.swapped() if name in ("o", "down") else self.grid

    def _table(self, path: str, module: nn.Module) -> tuple[nn.Parameter, ShardRange]:
        shape = self.model.shape
        shard = ShardRange.even(shape.vocab, self.grid.input, multiple=self.grid.weight.size)
        return self._block(
            path, module, shard, ShardRange.even(shape.hidden, self.grid.output)
        ), shard

    def _block(
        self, path: str, module: nn.Module, outputs: ShardRange, inputs: ShardRange
    ) -> nn.Parameter:
        key, axis = f"{path}.weight", self.grid.weight
        num_local = -(-outputs.num_local // axis.size)
        start, stop = (min((axis.index + n) * num_local, outputs.num_real) for n in (0, 1))
        self.shard(path, module, "weight", {0: outputs, 1: inputs})
        self.layouts[key] = self.layouts[key].split_at(0, axis, (start, stop), num_local)
        own = nn.Parameter(torch.empty(self.layouts[key].local_shape, device="meta"))
        module.weight = own
        return own
