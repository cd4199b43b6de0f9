"""Memory-centric tiling (ZeRO-Infinity, 2104.07857, section 5.1.3): a linear layer computed as a
sequence of tiles, of which ZeRO-3 gathers one at a time.

A tile is some of the rows of the weight, and makes as many outputs. Its gradient is computed into
the tile's own bucket, and leaves with it, before the next tile's is: neither the weight nor its
gradient is ever unsharded as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.models.block import Mlp
from workbench.models.gemm_into import multiply_into
from workbench.parallel.layout import Layout


@dataclass(frozen=True)
class TileAccess:
    """How a linear gets at its tiles and rids itself of their gradients.

    Attributes:
        gathered: Within what it returns, a tile has its values.
        accumulate_product: Adds the gradient a b of a tile, given the tile, a and b.
    """

    gathered: Callable[[nn.Parameter], AbstractContextManager[None]]
    accumulate_product: Callable[[nn.Parameter, Tensor, Tensor], None]


class TiledLinear(nn.Module):
    """y = x W^T + b, the weight [out, in] in tiles of equal numbers of rows.

    Args:
        linear: The layer, on the meta device.
        factor: Number of tiles, which divides its outputs.
        recomputed_in: Path of the module that is recomputed with it in backward, or "".
    """

    access: TileAccess
    """Set by what shards the tiles."""

    def __init__(self, linear: nn.Linear, factor: int, recomputed_in: str) -> None:
        super().__init__()
        shape = linear.out_features // factor, linear.in_features
        tiles = [nn.Parameter(torch.empty(shape, device="meta")) for _ in range(factor)]
        self.weight = nn.ParameterList(tiles)
        self.bias, self.recomputed_in = linear.bias, recomputed_in

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y: Tensor = _TiledGemm.apply(x, self.bias, self)
        return y


class _TiledGemm(torch.autograd.Function):
    """The GEMMs of all tiles. Their weights are not in the graph: autograd would ask for all
    gradients at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, linear: TiledLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        rows, x_ND = len(linear.weight[0]), x.flatten(0, -2)
        y_NO = x.new_empty(len(x_ND), rows * len(linear.weight))
        for tile, y_part in zip(linear.weight, y_NO.split(rows, dim=1)):
            with linear.access.gathered(tile):
                multiply_into(y_part, x_ND, tile.t(), first=True)
        if bias is not None:
            y_NO.add_(bias)
        y: Tensor = y_NO.unflatten(0, x.shape[:-1])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), linear = ctx.saved_tensors, ctx.linear
        x_ND, gradient_NO = x.flatten(0, -2), gradient.flatten(0, -2)
        x_gradient = torch.empty_like(x_ND)
        parts = gradient_NO.split(len(linear.weight[0]), dim=1)
        for index in reversed(range(len(parts))):
            tile, part = linear.weight[index], parts[index]
            with linear.access.gathered(tile):
                multiply_into(x_gradient, part, tile, first=index == len(parts) - 1)
            linear.access.accumulate_product(tile, part.t(), x_ND)
        bias = None if linear.bias is None else gradient_NO.sum(0)
        return x_gradient.view_as(x), bias, None


def apply_tiling(
    model: Transformer, layouts: dict[str, Layout], factor: int, recomputed: Iterable[str]
) -> None:
    """Divide the linears of a model's layers into tiles, in place, and record their layouts.

    Args:
        model: A stage, on the meta device.
        layouts: Local parameter name -> layout; updated.
        factor: Tiles of each.
        recomputed: Paths of the modules that activation checkpointing recomputes.
    """
    if factor == 1:
        return
    paths = list(recomputed)
    for path, module in list(model.named_modules()):
        if isinstance(module, Mlp):
            _register_as_computed(module)
        if not isinstance(module, nn.Linear):
            continue
        within = next((around for around in paths if path.startswith(f"{around}.")), "")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, TiledLinear(module, factor, within))
        layout = layouts.pop(f"{path}.weight")
        layouts |= {f"{path}.weight.{i}": layout.tile(i, factor) for i in range(factor)}


def _register_as_computed(mlp: Mlp) -> None:
    """Let the order of a feed-forward layer's modules, and so of its buckets, be that of forward:
    up, gate, down.
    """
    if mlp.gate is not None:
        gate, down = mlp.gate, mlp.down
        del mlp.gate, mlp.down
        mlp.gate, mlp.down = gate, down


def unit_of_tile(name: str) -> str | None:
    """The ZeRO-3 unit of a tile's parameter, by its local name; None where it is no tile's."""
    module, _, number = name.rpartition(".")
    return name if number.isdecimal() and module.endswith(".weight") else None
