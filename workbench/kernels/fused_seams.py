"""Fused versions of the models' seams (`workbench.models.seams`).

A replaced seam keeps its module, parameters, name and hooks; only its forward changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.kernels.activation import GATED, KINDS, activate
from workbench.kernels.bias_dropout_residual import dropout_add
from workbench.kernels.cross_entropy import cross_entropy
from workbench.kernels.linear_cross_entropy import linear_cross_entropy
from workbench.kernels.residual_norm import add_norm
from workbench.kernels.rope import rope
from workbench.models.counter_dropout import Dropout
from workbench.models.seams import Activate, AddNorm, HeadLoss, Positions, Reduction, Rope
from workbench.runtime_facts.fused_thresholds import (
    ATEN_SEAMS,
    MIN_FUSED_LOSS_NUMEL,
    MIN_FUSED_SEAM_NUMEL,
)


class FusedAddNorm(AddNorm):
    """Residual addition and normalisation in one pass over memory."""

    kernels: str
    plain_below: int

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum), both [B, T, D]."""
        if x_BTD.numel() < self.plain_below:
            return super().forward(x_BTD, residual_BTD)
        centred = self.kind == "layernorm"
        return add_norm(
            x_BTD, residual_BTD, self.weight, self.bias, self.epsilon, centred, self.kernels
        )


class FusedRope(Rope):
    """Rotary position embedding in place: input queries and keys are overwritten."""

    kernels: str
    plain_below: int

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [B, T, heads, head_dim]."""
        if q_BTHK.numel() < self.plain_below:
            return super().forward(q_BTHK, k_BTHK, positions)
        return rope(q_BTHK, k_BTHK, positions.cos, positions.sin, self.kernels)


class FusedActivate(Activate):
    """Activation in one pass; backward recomputes intermediate values."""

    kernels: str
    plain_below: int

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor | None) -> Tensor:
        """Activated features [B, T, F]."""
        if gate_BTF.numel() < self.plain_below:
            return super().forward(gate_BTF, up_BTF)
        return activate(self.kind, gate_BTF, up_BTF, kernels=self.kernels)


class FusedHeadLoss(HeadLoss):
    """Output projection and loss in chunks of tokens, without full logits.

    Vocabulary parallelism replaces it: it materialises the logits of its shard, and computes the
    loss by plain operators below `plain_below` logits.
    """

    kernels: str
    plain_below: int

    def forward(self, x_BTD: Tensor, targets_BT: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Negative log-likelihood of the valid tokens: a scalar, or without reduction [B, T]."""
        loss = linear_cross_entropy(
            x_BTD.flatten(0, -2),
            self.weight,
            targets_BT.flatten(),
            kernels=self.kernels,
            softcap=self.softcap,
            reduction=reduction,
        )
        return loss if reduction == "sum" else loss.view_as(targets_BT)


class FusedDropout(Dropout):
    """Dropout that recomputes its mask; drops the same entries as the plain one."""

    kernels: str

    def forward(self, x_BTD: Tensor, rows_BT: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]; `rows_BT` are the tokens' numbers, of which the mask is a
        hash.
        """
        if not self.rate or not self.training:
            return x_BTD
        assert rows_BT is not None, "dropout needs the numbers of its tokens"
        return dropout_add(
            x_BTD, None, None, rows_BT, self.key, self.rate, self.first_channel, self.kernels
        )


FUSED_SEAMS: dict[type[nn.Module], type[nn.Module]] = {
    AddNorm: FusedAddNorm,
    Rope: FusedRope,
    Activate: FusedActivate,
    HeadLoss: FusedHeadLoss,
    Dropout: FusedDropout,
}
"""Plain seam -> fused seam; attention already is torch's fused operator."""


def replace_seams(model: nn.Module, kernels: str, device: str = "cuda") -> None:
    """Replace the seams of a model, in place.

    On CPU, fused means torch's own operator where it has one, plain operators for small tensors and
    for dropout, and compiled code otherwise.

    Args:
        model: The model.
        kernels: eager, compiled or fused.
        device: The plan's device type: cuda or cpu.

    Raises:
        ValueError: `kernels` is none of these.
    """
    if kernels not in ("eager", "compiled", "fused"):
        raise ValueError(f"kernels are {kernels!r}; legal: 'eager', 'compiled' or 'fused'")
    if kernels == "eager":
        return
    on_processor = kernels == "fused" and device == "cpu"
    for module in model.modules():
        if isinstance(module, Activate) and module.kind not in KINDS:
            continue  # torch's own operator is one kernel that saves its input alone
        if isinstance(module, AddNorm) and module.zero_centered:
            continue  # fused norms multiply by weight alone
        plain = on_processor and (
            isinstance(module, Dropout) or getattr(module, "kind", None) in ATEN_SEAMS
        )
        if type(module) in FUSED_SEAMS and not plain:
            below = MIN_FUSED_LOSS_NUMEL if isinstance(module, HeadLoss) else MIN_FUSED_SEAM_NUMEL
            set_seam(module, FUSED_SEAMS[type(module)], kernels, below if on_processor else 0)


def set_seam(module: Any, kind: type[nn.Module], kernels: str, plain_below: int = 0) -> None:
    """Change a module's class to `kind`, a subclass that differs only in its forward."""
    module.__class__ = kind
    module.kernels, module.plain_below = kernels, plain_below


def warm_up(models: Iterable[nn.Module], dtype: torch.dtype, batch: int = 2) -> Iterator[str]:
    """Compile the seams' CPU code before the first step, on small modules of the same kinds.

    All dims of the small inputs differ, or torch.compile would specialise on equal sizes. On GPUs
    code is specialised on widths (see `engine.kernel_warm_up`).

    Args:
        models: The models whose seams will run.
        dtype: Dtype of parameters and activations.
        batch: Micro-batch; 1 is specialised on.

    Yields:
        The name of each kind, before it is compiled.
    """
    done: set[tuple[Any, ...]] = set()
    for module in [
        m for model in models for m in model.modules() if getattr(m, "kernels", "eager") != "eager"
    ]:
        kind = type(module), getattr(module, "kind", None)
        if kind not in done and type(module) is not FusedDropout:  # which is never compiled
            done.add(kind)
            yield type(module).__name__.removeprefix("Fused")
            make = _SMALL.get(type(module), _split_head)
            zeros = partial(torch.zeros, min(batch, 3), dtype=dtype, requires_grad=True)
            small, every_input = make(module, zeros)
            replace_seams(small.to(dtype), str(module.kernels))
            for inputs in every_input:
                _run(small, inputs)


def _run(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward and backward."""
    with torch.enable_grad():
        made = module(*inputs)
        results = [x for x in (made if isinstance(made, tuple) else (made,)) if x.requires_grad]
        torch.autograd.backward(results, [torch.zeros_like(x) for x in results])


Zeros = Callable[..., Tensor]
Small = tuple[nn.Module, list[tuple[Any, ...]]]


def _norm(like: Any, zeros: Zeros) -> Small:
    inputs = [(zeros(5, 10), residual) for residual in (None, zeros(5, 10))]
    return AddNorm(like.kind, 10, like.epsilon, like.bias is not None), inputs


def _rope(like: Any, zeros: Zeros) -> Small:
    table = zeros(5, 6)[0].detach()
    positions = Positions(torch.arange(5), table, table)
    return Rope(), [(zeros(5, 4, 12) * 1, zeros(5, heads, 12) * 1, positions) for heads in (2, 1)]


def _activate(like: Any, zeros: Zeros) -> Small:
    return Activate(like.kind), [(zeros(5, 10), zeros(5, 10) if like.kind in GATED else None)]


def _head(like: Any, zeros: Zeros) -> Small:
    vocab = 128 if len(like.weight) % 64 == 0 else 100  # rows that follow each other, or not
    return HeadLoss(10, vocab), [(x := zeros(5, 10), torch.zeros(x.shape[:2], dtype=torch.long))]


class VocabParallelLoss(nn.Module):
    """Vocabulary-parallel loss on a single rank; the last `padding` columns are no entries."""

    def __init__(self, kernels: str) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, logits_NV: Tensor, targets_N: Tensor, padding: int) -> Tensor:
        """The loss summed over tokens; overwrites the logits."""
        rows = 0, logits_NV.shape[1] - padding
        return cross_entropy(
            logits_NV, targets_N, rows, reduce=(Tensor.clone, Tensor.clone), kernels=self.kernels
        )


def _split_head(like: Any, zeros: Zeros) -> Small:
    targets = torch.zeros(zeros(5).numel(), dtype=torch.long)
    return VocabParallelLoss(like.kernels), [
        (zeros(5, 100).flatten(0, 1) * 1, targets, padding) for padding in (0, 2)
    ]


_SMALL: dict[type[nn.Module], Callable[[Any, Zeros], Small]] = {
    FusedAddNorm: _norm,
    FusedRope: _rope,
    FusedActivate: _activate,
    FusedHeadLoss: _head,
}
"""Fused seam -> function that makes a small plain one of its kind, and its inputs."""
