"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) of linear layers.

A layer with an adapter has two parameters more, `lora_a` [rank, in] and `lora_b` [out, rank], and
its output is x W^T + s (x A^T) B^T. The weight W is frozen: backward computes its input's gradient,
and no gradient of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from workbench.adapters.four_bit_tensor import FrozenWeight
from workbench.adapters.frozen_linear import adapted_linear, frozen_linear
from workbench.adapters.thin_gemms import add_up_projection, scaled_down_projection
from workbench.models import Transformer
from workbench.models.counter_dropout import Dropout, token_rows
from workbench.models.grouped_gemm import GroupedLinear, RowGroups, grouped_linear
from workbench.models.weight_init import seed_of
from workbench.plan.model.block_linears import adapter_scale, is_adapted
from workbench.plan.schema import Lora

LORA_A, LORA_B = "lora_a", "lora_b"
_disabled: ContextVar[bool] = ContextVar("adapters_disabled", default=False)


@contextmanager
def adapters_disabled() -> Iterator[None]:
    """A context in which models with adapters compute what their frozen weights alone say."""
    before = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(before)


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's two."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


@dataclass(eq=False)
class LoraAdapter:
    """The adapter of one layer, whose module holds the parameters.

    Attributes:
        module: Has `lora_a` and `lora_b`, or this rank's slices of them, and `lora_dropout`.
        scale: The s of s (x A^T) B^T.
    """

    module: nn.Module
    scale: float

    @property
    def active(self) -> bool:
        """Whether the adapter adds to its layer's output."""
        return not _disabled.get()

    @property
    def a(self) -> nn.Parameter:
        """`lora_a` [rank, in]; [experts, rank, in] of experts."""
        return cast("nn.Parameter", self.module.lora_a)

    @property
    def b(self) -> nn.Parameter:
        """`lora_b` [out, rank]; [experts, out, rank] of experts."""
        return cast("nn.Parameter", self.module.lora_b)

    @property
    def dropout(self) -> Dropout:
        """Of the adapter's input; its first channel is that of this rank's slice."""
        return cast("Dropout", self.module.lora_dropout)

    def down(self, x: Tensor, local: bool = False) -> Tensor:
        """s x A^T, [..., in] to [..., rank].

        Args:
            x: The layer's input.
            local: Whether it has the tokens of the residual stream, not those of a tensor-parallel
                region.
        """
        dropped = self._dropped(x, local)
        return scaled_down_projection(x if dropped is None else dropped, self.a, self.scale)

    def add_up(self, y: Tensor, down: Tensor, b: Tensor | None = None) -> Tensor:
        """y + (s x A^T) B^T, in place of y [..., out], which no backward reads.

        Args:
            y: Output of the frozen weight.
            down: s x A^T [..., rank].
            b: In place of `lora_b`.
        """
        return add_up_projection(y, down, self.b if b is None else b)

    def linear(
        self,
        x: Tensor,
        weight: FrozenWeight,
        bias: Tensor | None = None,
        *,
        b: Tensor | None = None,
        columns: int | None = None,
    ) -> Tensor:
        """The layer's output, [..., in] to [..., out].

        Args:
            x: The layer's input.
            weight: [out, in].
            bias: [out].
            b: In place of `lora_b`.
            columns: Columns of weight and `lora_a` that x has; None: all.
        """
        if not self.active:
            return frozen_linear(x, weight, bias, columns)
        a = self.a if columns is None else self.a[:, :columns]
        b = self.b if b is None else b
        dropped = self._dropped(x)
        return adapted_linear(x, weight, bias, a, b, self.scale, dropped, columns)

    def _dropped(self, x: Tensor, local: bool = False) -> Tensor | None:
        """The adapter's input where it is not the layer's."""
        if not (self.dropout.rate and self.dropout.training):
            return None
        rows = token_rows()
        dropped: Tensor = self.dropout(x, rows.local if local else rows.region)
        return dropped

    def add_grouped(self, y_RO: Tensor, x_RI: Tensor, groups: RowGroups) -> Tensor:
        """The same for rows that are sorted by expert; not in place."""
        if not self.active:
            return y_RO
        down_RK = grouped_linear(x_RI, self.a, None, groups) * self.scale
        return y_RO + grouped_linear(down_RK, self.b, None, groups)


class LoraLinear(nn.Module):
    """A linear layer of a frozen weight with an adapter.

    Args:
        linear: The layer.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight: FrozenWeight = linear.weight
        self.bias = linear.bias
        self.lora: LoraAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.lora is None:
            return frozen_linear(x, self.weight, self.bias)
        return self.lora.linear(x, self.weight, self.bias)


def add_adapters(model: Transformer, lora: Lora, seed: int) -> None:
    """Give the layers that `lora` names adapters, and freeze all else, in place."""
    freeze(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | GroupedLinear) and is_adapted(path, lora):
            *experts, outputs, inputs = module.weight.shape
            shapes = (*experts, lora.rank, inputs), (*experts, outputs, lora.rank)
            adapt(model, path, module, lora, *shapes, seed)


def freeze(model: nn.Module) -> None:
    """Let no parameter of `model` have a gradient."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def adapt(
    model: Transformer,
    path: str,
    module: nn.Module,
    lora: Lora,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    seed: int,
) -> LoraAdapter:
    """Give the layer `module` at `path` an adapter, on the device of its weight.

    Args:
        model: Has the layer; a plain linear layer is replaced in it.
        path: Of the layer.
        module: The layer.
        lora: The plan's.
        a_shape: Local shape of `lora_a`.
        b_shape: Local shape of `lora_b`.
        seed: Of dropout.
    """
    own = with_place(model, path, module)
    weight = cast("Tensor", own.weight)
    for name, shape in ((LORA_A, a_shape), (LORA_B, b_shape)):
        empty = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        own.register_parameter(name, nn.Parameter(empty))
    # A module of the model, which evaluation switches off.
    own.lora_dropout = Dropout(lora.dropout, seed_of(f"{path}.lora.dropout", seed))
    adapter = LoraAdapter(own, adapter_scale(lora))
    if isinstance(own, GroupedLinear):
        own.add_adapter = adapter.add_grouped
    else:
        own.lora = adapter  # type: ignore[assignment]
    model.drops_in_layers = model.drops_in_layers or lora.dropout > 0
    return adapter


def with_place(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """The layer at `path` with places for an adapter and a weight in 4 bits, which experts and
    layers of tensor-parallel ranks have; a plain linear layer is replaced by a `LoraLinear`.
    """
    if not isinstance(module, nn.Linear):
        return module
    parent, _, name = path.rpartition(".")
    own = LoraLinear(module)
    setattr(model.get_submodule(parent), name, own)
    return own
