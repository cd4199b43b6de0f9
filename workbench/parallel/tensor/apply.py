"""Split a model's linear layers over the tensor axis as a table says."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from workbench.models.transformer import Attention
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.collectives import copy_to
from workbench.parallel.tensor.linear import RowLinear, SharedLinear
from workbench.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyHeadLoss

MEGATRON = {
    "embedding.tokens": "vocabulary",
    "blocks.*.attention.q": "column",
    "blocks.*.attention.[kv]": "heads",
    "blocks.*.attention.o": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "vocabulary",
}
"""Module pattern -> how it is split: column, row or vocabulary (1909.08053). What is not named is replicated.

`heads` is column, but never through a head: where there are fewer heads than ranks, neighbours share one.
"""

_DIM = {"column": 0, "heads": 0, "vocabulary": 0, "row": 1}


def split_modules(model: nn.Module, layouts: dict[str, Layout], table: dict[str, str], axis: MeshAxis) -> None:
    """Narrow the modules of a model on the meta device, in place, and record their parameters' new layouts."""
    entered: set[str] = set()
    for path, module in list(model.named_modules()):
        kind = next((kind for pattern, kind in table.items() if fnmatchcase(path, pattern)), None)
        if kind is None:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        pieces = _pieces(parent, module, kind, axis)
        _narrow(path, module, layouts, kind, axis, pieces)
        if pieces < axis.size:
            setattr(parent, name, SharedLinear(module.weight, module.bias, axis, pieces))
        if kind == "column" and parent_path not in entered:
            # Siblings share one input: one copy_to, so one all-reduce in backward, serves them all.
            entered.add(parent_path)
            parent.register_forward_pre_hook(partial(_enter, axis))
        elif kind in ("row", "vocabulary"):
            setattr(parent, name, _replacement(path, module, layouts, kind, axis))


def _enter(axis: MeshAxis, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return copy_to(inputs[0], axis), *inputs[1:]


def _pieces(parent: nn.Module, module: nn.Module, kind: str, axis: MeshAxis) -> int:
    """How many different pieces the ranks hold of a module."""
    if kind != "heads":
        return axis.size
    assert isinstance(module, nn.Linear) and isinstance(parent, Attention)
    return min(axis.size, module.out_features // parent.head_dim)


def _narrow(path: str, module: nn.Module, layouts: dict[str, Layout], kind: str, axis: MeshAxis, pieces: int) -> None:
    for name in ("weight", "bias"):
        parameter = getattr(module, name, None)
        if parameter is None or (kind == "row" and name == "bias"):
            continue
        key = f"{path}.{name}"
        layout = layouts[key]
        if axis.name in layout.copies:
            dim = _DIM[kind]
            layout = layout.split(dim, axis) if pieces == axis.size else layout.share(dim, axis, pieces)
            layouts[key] = layout
        setattr(module, name, nn.Parameter(torch.empty(layout.local_shape, dtype=parameter.dtype, device="meta")))


def _replacement(path: str, module: nn.Module, layouts: dict[str, Layout], kind: str, axis: MeshAxis) -> nn.Module:
    if kind == "row":
        assert isinstance(module, nn.Linear)
        return RowLinear(module.weight, module.bias, axis)  # type: ignore[arg-type]
    rows = layouts[f"{path}.weight"].slices[0]
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return (VocabularyEmbedding if isinstance(module, nn.Embedding) else VocabularyHeadLoss)(weight, rows, axis)
