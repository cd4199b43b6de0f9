"""Mixtures of experts over ranks: experts spread over the expert axis, each expert's width over the
tensor axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.models.moe import Counting, Mixture
from workbench.parallel.expert.auxiliary_loss import share_of
from workbench.parallel.expert.expert_collectives import summed
from workbench.parallel.expert.token_dispatch import ExpertExchange
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import GRADIENTS, Mesh, MeshAxis
from workbench.parallel.tensor.tensor_collectives import (
    copy_to,
    gather_tokens,
    reduce_from,
    scatter_tokens,
)

SPLIT = {"gate.weight": 0, "up.weight": 0, "gate.bias": 0, "up.bias": 0, "down.weight": 1}
"""Parameter of a feed-forward layer -> dim that the tensor axis splits, experts apart (1909.08053).
"""

Sums = Mapping[str, tuple[MeshAxis, ...]]


def spread_experts(
    model: Transformer, layouts: dict[str, Layout], mesh: Mesh, sequence: bool, counting: Counting
) -> None:
    """Narrow the mixtures of a model on the meta device, in place, and record their parameters' new
    layouts.

    On the tensor axis a mixture is one split region: what enters is copied (with `sequence`
    gathered), partial results of routed and shared experts are added (and scattered) once. All of
    its gradients are then partial, its router's too: `gradient_sums` says so.
    """
    for path, mixture in model.named_modules():
        if isinstance(mixture, Mixture):
            mixture.exchange.counting = counting
            if mesh["expert"].size > 1:
                _spread(path, mixture, layouts, mesh, counting)
            if mesh["context"].size > 1:
                mixture.route.whole = partial(summed, axis=mesh["context"])
            if mesh["tensor"].size > 1:
                _narrow(path, mixture, layouts, mesh["tensor"])
                mixture.register_forward_pre_hook(partial(_enter, mesh["tensor"], sequence))
                mixture.register_forward_hook(partial(_leave, mesh["tensor"], sequence))


def gradient_sums(layouts: Mapping[str, Layout], tensor: Sums, mesh: Mesh) -> Sums:
    """Local name -> the axes over which a parameter's gradient is summed; `tensor` names those of
    plain tensor ranks.

    An expert's has met the tokens of all expert ranks already; a router's, and a bias that every
    tensor rank adds a share of, are partial on the tensor ranks.
    """
    sums: dict[str, tuple[MeshAxis, ...]] = {}
    parts = mesh.axes.get("tensor" + GRADIENTS, mesh["tensor"])
    for name, layout in layouts.items():
        data = mesh["expert_replicas"] if "expert_replicas" in layout.copies else mesh["replicas"]
        partial = name.endswith((".route.weight", ".experts.down.bias", ".shared.down.bias"))
        sums[name] = (parts, data) if partial and parts.size > 1 else (*tensor[name], data)
    return sums


def _spread(
    path: str, mixture: Mixture, layouts: dict[str, Layout], mesh: Mesh, counting: Counting
) -> None:
    mixture.exchange = ExpertExchange(counting, mesh["expert"])
    for name, _ in list(mixture.experts.named_parameters()):
        key = f"{path}.experts.{name}"
        apart = layouts[key].differing("replicas", but=("expert", "expert_replicas"))
        _shrink(mixture.experts, name, layouts, key, apart.split(0, mesh["expert"]))


def _narrow(path: str, mixture: Mixture, layouts: dict[str, Layout], axis: MeshAxis) -> None:
    for part, owner in (("experts", mixture.experts), ("shared", mixture.shared)):
        for name, _ in [] if owner is None else list(owner.named_parameters()):
            if name in SPLIT:
                assert owner is not None
                key, stacked = f"{path}.{part}.{name}", part == "experts"
                _shrink(owner, name, layouts, key, layouts[key].split(SPLIT[name] + stacked, axis))
    mixture.experts.down.bias_share = 1 / axis.size
    if mixture.shared is not None:
        down = mixture.shared.down
        assert isinstance(down, nn.Linear)
        mixture.shared.down = PartialLinear(down, 1 / axis.size)


def _shrink(
    owner: nn.Module, name: str, layouts: dict[str, Layout], key: str, layout: Layout
) -> None:
    module, _, last = name.rpartition(".")
    layouts[key] = layout
    setattr(
        owner.get_submodule(module),
        last,
        nn.Parameter(torch.empty(layout.local_shape, device="meta")),
    )


class PartialLinear(nn.Module):
    """A row-split linear layer whose partial results, and a share of its bias, are added
    elsewhere.
    """

    def __init__(self, linear: nn.Linear, bias_share: float) -> None:
        super().__init__()
        self.weight, self.bias, self.bias_share = linear.weight, linear.bias, bias_share

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / ranks] to a part of [..., out]."""
        return nn.functional.linear(
            x, self.weight, None if self.bias is None else self.bias * self.bias_share
        )


def _enter(
    axis: MeshAxis, sequence: bool, module: nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    return (gather_tokens(inputs[0], axis) if sequence else copy_to(inputs[0], axis),)


def _leave(
    axis: MeshAxis,
    sequence: bool,
    module: nn.Module,
    inputs: tuple[Tensor],
    outputs: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    branch, auxiliary = outputs
    branch = scatter_tokens(branch, axis) if sequence else reduce_from(branch, axis)
    return branch, None if auxiliary is None else share_of(auxiliary, 1 / axis.size)
