"""Lay a model over a tensor grid: every linear layer, norm and embedding in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.models import Transformer
from workbench.models.seams import AddNorm
from workbench.models.transformer import Attention
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import SIDES, Mesh, MeshAxis
from workbench.parallel.tensor.grid import summa, tensor_3d
from workbench.parallel.tensor.grid.grid_dropout import keep_own_masks
from workbench.parallel.tensor.grid.grid_head import GridHeadLoss
from workbench.parallel.tensor.grid.grid_norm import SplitNorm
from workbench.parallel.tensor.grid.summa import Square, SummaEmbedding, SummaLinear
from workbench.parallel.tensor.grid.tensor_3d import Cube, CubeEmbedding, CubeLinear
from workbench.parallel.tensor.shard_range import Cut

Layouts = dict[str, Layout]


def lay_over_grid(model: Transformer, layouts: Layouts, mesh: Mesh, algorithm: str) -> None:
    """Replace the modules of a model on the meta device, in place, and record their parameters' new
    layouts.
    """
    sides = tuple(side for side in SIDES if side in mesh.axes)
    for name, layout in layouts.items():
        layouts[name] = replace(
            layout, copies=(*sides, *(axis for axis in layout.copies if axis != "tensor"))
        )
    lay: OnSquare | OnCube = (OnCube if algorithm == "3d" else OnSquare)(model, layouts, mesh)
    for path, module in list(model.named_modules()):
        parent_path, _, name = path.rpartition(".")
        if isinstance(module, AddNorm):
            setattr(model.get_submodule(parent_path), name, lay.norm(path, module))
        elif isinstance(module, nn.Linear):
            parent = model.get_submodule(parent_path)
            setattr(
                parent,
                name,
                lay.linear(path, module, _outputs(model, parent, name, module, lay.outputs(name))),
            )
        elif path == "embedding.positions":
            lay.narrow(path, module, "weight", {1: Cut.even(model.shape.hidden, lay.hidden)})
        elif path == "embedding.tokens":
            setattr(model.get_submodule(parent_path), name, lay.embedding(path, module))
        elif path == "head":
            model.head = lay.head(path, module)  # type: ignore[assignment]
    keep_own_masks(model, lay.part, Cut.even(model.shape.hidden, lay.hidden).start)


def _outputs(
    model: Transformer, parent: nn.Module, name: str, module: nn.Linear, axis: MeshAxis
) -> Cut:
    """What a rank makes of a layer's outputs; attention's are cut between heads."""
    if isinstance(parent, Attention) and name != "o":
        return Cut.heads(name, model.shape, axis)
    return Cut.even(module.out_features, axis)


class _OnGrid:
    """What is common to all grids: narrowing parameters, and norms over the split hidden width."""

    def __init__(
        self, model: Transformer, layouts: Layouts, hidden: MeshAxis, part: tuple[int, int]
    ) -> None:
        self.model, self.layouts = model, layouts
        self.hidden, self.part = hidden, part
        """The residual stream: the side over which its width is split, and which sequences are
        here, of how many.
        """

    def narrow(self, path: str, module: nn.Module, name: str, cuts: dict[int, Cut]) -> nn.Parameter:
        """The parameter cut along dims, in its module and its layout."""
        key = f"{path}.{name}"
        for dim, cut in cuts.items():
            self.layouts[key] = cut.of(self.layouts[key], dim)
        own = nn.Parameter(torch.empty(self.layouts[key].local_shape, device="meta"))
        setattr(module, name, own)
        return own

    def bias(self, path: str, module: nn.Module, cut: Cut) -> nn.Parameter | None:
        """A vector: cut along one side, equal along the others."""
        return None if module.bias is None else self.narrow(path, module, "bias", {0: cut})

    def norm(self, path: str, module: AddNorm) -> SplitNorm:
        """Over the split hidden width."""
        width = self.model.shape.hidden
        cut = Cut.even(width, self.hidden)
        weight = self.narrow(path, module, "weight", {0: cut})
        return SplitNorm(
            weight, self.bias(path, module, cut), module.kind, module.epsilon, width, self.hidden
        )


class OnSquare(_OnGrid):
    """2-D and 2.5-D."""

    def __init__(self, model: Transformer, layouts: Layouts, mesh: Mesh) -> None:
        self.grid = Square.of(mesh)
        super().__init__(model, layouts, self.grid.column, self.grid.part)

    def outputs(self, name: str) -> MeshAxis:
        """The side over which a layer's outputs are split."""
        return self.grid.column

    def linear(self, path: str, module: nn.Linear, outputs: Cut) -> SummaLinear:
        """Outputs over columns, inputs over rows."""
        cuts = {0: outputs, 1: Cut.even(module.in_features, self.grid.row)}
        weight = self.narrow(path, module, "weight", cuts)
        return SummaLinear(
            weight, self.bias(path, module, outputs), self.grid, outputs.piece, outputs.pieces
        )

    def embedding(self, path: str, module: nn.Module) -> SummaEmbedding:
        """Vocabulary over rows, width over columns."""
        return SummaEmbedding(
            self._table(path, module, self.grid.row, self.grid.column), self._vocab, self.grid
        )

    def head(self, path: str, module: nn.Module) -> GridHeadLoss:
        """Vocabulary over columns, width over rows; a tied one as the embedding's."""
        row, column, tied = self.grid.row, self.grid.column, self.model.shape.tied
        weight = self._table(path, module, *((row, column) if tied else (column, row)))
        cut = Cut.even(self._vocab, column)
        project = partial(summa.logits, grid=self.grid, tied=tied)
        return GridHeadLoss(weight, project, self.grid.own, (cut.start, cut.stop), column)

    @property
    def _vocab(self) -> int:
        return self.model.shape.vocab

    def _table(
        self, path: str, module: nn.Module, vocab: MeshAxis, width: MeshAxis
    ) -> nn.Parameter:
        cuts = {0: Cut.even(self._vocab, vocab), 1: Cut.even(self.model.shape.hidden, width)}
        return self.narrow(path, module, "weight", cuts)


class OnCube(_OnGrid):
    """3-D."""

    def __init__(self, model: Transformer, layouts: Layouts, mesh: Mesh) -> None:
        self.grid = Cube.of(mesh)
        super().__init__(model, layouts, self.grid.output, self.grid.part(self.grid.input))

    def outputs(self, name: str) -> MeshAxis:
        """The side over which a layer's outputs are split."""
        return self._view(name).input

    def linear(self, path: str, module: nn.Linear, outputs: Cut) -> CubeLinear:
        """Outputs over `input` and then over `weight`, inputs over `output`."""
        grid = self._view(path.rpartition(".")[2])
        weight = self._block(path, module, outputs, Cut.even(module.in_features, grid.output))
        bias = self.bias(path, module, outputs)
        return CubeLinear(weight, bias, grid, outputs.room, outputs.piece, outputs.pieces)

    def embedding(self, path: str, module: nn.Module) -> CubeEmbedding:
        """As the head's, so that they can be one."""
        weight, cut = self._table(path, module)
        return CubeEmbedding(weight, (cut.start, cut.stop), self.grid)

    def head(self, path: str, module: nn.Module) -> GridHeadLoss:
        """Vocabulary over `input` and then over `weight`, width over `output`."""
        weight, cut = self._table(path, module)
        project = partial(tensor_3d.multiply, grid=self.grid, num_outputs=cut.room)
        own: Callable[..., Any] = partial(self.grid.own, fine=self.grid.output)
        return GridHeadLoss(weight, project, own, (cut.start, cut.stop), self.grid.input)

    def _view(self, name: str) -> Cube:
        """Projections back into the residual stream come after a layer that reads it."""
        return self.grid.turned() if name in ("o", "down") else self.grid

    def _table(self, path: str, module: nn.Module) -> tuple[nn.Parameter, Cut]:
        shape = self.model.shape
        cut = Cut.even(shape.vocab, self.grid.input, unit=self.grid.weight.size)
        return self._block(path, module, cut, Cut.even(shape.hidden, self.grid.output)), cut

    def _block(self, path: str, module: nn.Module, outputs: Cut, inputs: Cut) -> nn.Parameter:
        key, axis = f"{path}.weight", self.grid.weight
        room = -(-outputs.room // axis.size)
        start, stop = (min((axis.index + n) * room, outputs.kept) for n in (0, 1))
        self.narrow(path, module, "weight", {0: outputs, 1: inputs})
        self.layouts[key] = self.layouts[key].cut(0, axis, (start, stop), room)
        own = nn.Parameter(torch.empty(self.layouts[key].local_shape, device="meta"))
        module.weight = own
        return own
