"""Sequence parallelism: what lies between split regions holds a run of the tokens each (2205.05198).

Tokens are cut in the order in which they lie in memory, [B, T] row by row into equal runs, so that gathering and
scattering move no entry within a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.seams import Positions
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.collectives import all_gather, gather_tokens


@dataclass(eq=False)
class Gathered:
    """One gathered input. Layers keep its part alone; the first that runs backward gathers it again for all."""

    axis: MeshAxis
    waiting: int = 0
    whole: Tensor | None = None

    def again(self, part_BTD: Tensor) -> Tensor:
        """The whole input [B, T, D]; let go with the last layer that waits for it."""
        whole = all_gather(part_BTD, self.axis) if self.whole is None else self.whole
        self.waiting -= 1
        self.whole = whole if self.waiting else None
        return whole


class Entrance:
    """Where column-split layers that share an input enter from split tokens: one gather serves them all."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis
        self.part: Tensor | None = None
        self.gathered = Gathered(axis)

    def gather(self, part_BTD: Tensor) -> Tensor:
        """[B, T / ranks, D] to [B, T, D], for the layers that run before `close`."""
        self.part, self.gathered = part_BTD.detach(), Gathered(self.axis)
        return gather_tokens(part_BTD, self.axis)

    def close(self) -> None:
        """Hold the input no longer."""
        self.part = None

    def attach(self, module: nn.Module) -> None:
        """Gather the first argument of `module` round its forward."""
        module.register_forward_pre_hook(lambda _, inputs: (self.gather(inputs[0]), *inputs[1:]))
        module.register_forward_hook(lambda *_: self.close())


def gathered_linear(x_BTD: Tensor, weight: Tensor, bias: Tensor | None, entrance: Entrance) -> Tensor:
    """`F.linear` on an input that `entrance` has gathered, which it does not keep."""
    y: Tensor = _GatheredLinear.apply(x_BTD, entrance.part, weight, bias, entrance.gathered)
    return y


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, part_BTD: Tensor, weight: Tensor, bias: Tensor | None, gathered: Gathered
    ) -> Tensor:
        ctx.save_for_backward(part_BTD, weight)
        ctx.gathered = gathered
        gathered.waiting += 1
        return F.linear(x_BTD, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part_BTD, weight = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2)
        weight_gradient = gradient_NO.t() @ ctx.gathered.again(part_BTD).flatten(0, -2)
        bias_gradient = gradient_NO.sum(0) if ctx.needs_input_grad[3] else None
        return gradient @ weight, None, weight_gradient, bias_gradient, None


def keep_own_positions(axis: MeshAxis, module: nn.Module, inputs: tuple[Tensor, Positions]) -> tuple[Tensor, Positions]:
    """Before an embedding's forward: learned positions are looked up for this rank's run of tokens alone."""
    tokens_BT, positions = inputs
    return tokens_BT, positions._replace(indices=own_run(axis, positions.indices.expand(tokens_BT.shape)))


def own_run(axis: MeshAxis, x_BT: Tensor) -> Tensor:
    """Of something that each token has, [B, T], what belongs to this rank's run of tokens, [B, T / ranks]."""
    batch, length = x_BT.shape
    return x_BT.flatten().chunk(axis.size)[axis.index].view(batch, length // axis.size)


def whole_indices(length: int) -> Callable[[Tensor], Tensor]:
    """Where the tokens that attention meets stand: whole sequences of `length`, however few tokens a stage is given."""

    def indices(x: Tensor) -> Tensor:
        return torch.arange(length, device=x.device)

    return indices
