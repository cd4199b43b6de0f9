"""How far ranks' tensors are from those of one device, and what that is relative to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from workbench.parallel.layout import Layout
from workbench.plan.schema import Optimizer

NOISE_EPSILONS = 16
"""Rounding allowed to a gradient that is zero in exact arithmetic (a key bias), in epsilons."""
Kind = Literal["loss", "gradients", "weights"]


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor on one rank from the single device."""

    kind: Kind
    tensor: str
    rank: int
    absolute: float
    relative: float


@dataclass(frozen=True)
class DifferenceScale:
    """Denominators of relative differences."""

    tolerance: float
    epsilon: float
    largest_gradient: float
    rounding_only: set[str]
    optimizer: Optimizer
    num_steps: int
    mean_square: bool = False
    """Whether tensors are compared by their root mean squares."""

    def size(self, parts: Iterable[Tensor], numel: int) -> float:
        """Largest entry of a tensor of `numel` entries, or root mean square, from its parts."""
        if not self.mean_square:
            return max((_finite(float(p.abs().max())) for p in parts if p.numel()), default=0.0)
        return math.sqrt(sum(float(p.double().square().sum()) for p in parts) / numel)

    def of(self, kind: Kind, name: str, whole: Tensor) -> float:
        """What differences of one device's tensor `whole` are divided by."""
        scale = max(self.size([whole], whole.numel()), 1e-6 * self.largest_gradient)
        if name not in self.rounding_only:
            return scale
        noise = self.largest_gradient * NOISE_EPSILONS * self.epsilon
        if kind == "gradients":
            return noise / self.tolerance
        return max(scale, self._drift(noise) / self.tolerance)

    def _drift(self, noise: float) -> float:
        """How far a weight may move on gradients of `noise`: AdamW normalises them by their own
        size plus epsilon.
        """
        o = self.optimizer
        return (
            self.num_steps
            * o.learning_rate
            * (min(1.0, noise / o.epsilon) if o.name == "adamw" else noise)
        )


def tensor_difference(
    kind: Kind,
    layout: Layout,
    rank: int,
    mine: Tensor,
    wholes: dict[str, Tensor],
    scale: DifferenceScale,
) -> TensorDifference:
    """How far a tensor of this rank is from one device's.

    Args:
        kind: What it is.
        layout: Of the tensor that the rank holds.
        rank: This rank.
        mine: What the rank holds.
        wholes: Name -> one device's tensor.
        scale: What the difference is relative to.
    """
    whole = wholes[layout.name]
    expected = [part for part, _ in layout.parts(layout.take(whole))]
    gaps = [part.cpu() - other for (part, _), other in zip(layout.parts(mine), expected)]
    gap = _finite(scale.size(gaps, whole.numel()))
    return TensorDifference(kind, layout.name, rank, gap, gap / scale.of(kind, layout.name, whole))


def loss_difference(step: int, rank: int, mine: float, theirs: float) -> TensorDifference:
    """How far the loss that a rank computed is from one device's."""
    gap = _finite(abs(mine - theirs))
    return TensorDifference("loss", f"loss of step {step}", rank, gap, gap / abs(theirs))


def _finite(value: float) -> float:
    """`value`, with NaN as infinity."""
    return value if math.isfinite(value) else math.inf


def check_cover(numel: dict[str, int], owned: list[dict[str, int]]) -> None:
    """Check that the ranks own each entry of every tensor once; `numel` are the tensors' sizes.

    Raises:
        ValueError: They do not; names the tensor.
    """
    for name, expected in numel.items():
        num_owned = sum(part.get(name, 0) for part in owned)
        if num_owned != expected:
            raise ValueError(
                f"{name}: the ranks own {num_owned} of {expected} entries; each must be owned once"
            )


def summarize(
    differences: list[TensorDifference],
    precision: str,
    tolerance: float,
    replaced: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """The answer of `verify`, from every rank's differences."""
    worst = max(differences, key=lambda d: d.relative)
    kinds: tuple[Kind, ...] = ("loss", "gradients", "weights")
    return {
        "precision": precision,
        "tolerance": tolerance,
        "replaced": replaced,
        "max_abs_diff": {k: max(d.absolute for d in differences if d.kind == k) for k in kinds},
        "max_relative_diff": {
            k: max(d.relative for d in differences if d.kind == k) for k in kinds
        },
        "worst": asdict(worst),
        "passed": worst.relative <= tolerance,
    }
