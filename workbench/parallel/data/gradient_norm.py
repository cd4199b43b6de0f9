"""This rank's share of the gradient norm, of gradients that need not be there at the same time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.parallel.layout import Layout, square_norm
from workbench.parallel.mesh import Mesh


class GradientNorm:
    """The squared norm of gradients, of which some leave the device before the step's end.

    Args:
        layouts: Of each gradient, by its name.
        mesh: Says which of several copies of a slice this rank owns.
        finds_overflow: Whether an overflow in a gradient that this rank does not own makes the
            result NaN (loss scaling).
        device: Where gradients are.
        dtype: Of gradients.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        finds_overflow: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._layouts, self._mesh, self._finds_overflow = dict(layouts), mesh, finds_overflow
        self._device = device
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._left: Tensor | None = None

    def restart(self) -> None:
        """Forget the gradients of the last step."""
        self._left = None

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients that are final, and about to leave; none where a shard is padding."""
        if not gradients:
            return
        square = self._square(gradients)
        self._left = square if self._left is None else self._left + square

    def square(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The scalar that ranks sum: of what was added, and of `gradients`, which stayed."""
        if self._left is None:
            return self._square(gradients)
        return self._left + self._square(gradients) if gradients else self._left

    def _square(self, gradients: Mapping[str, Tensor]) -> Tensor:
        if not gradients:  # nothing that this rank holds is trained
            return torch.zeros((), dtype=self._dtype, device=self._device)
        square = square_norm(dict(gradients), self._layouts, self._mesh)
        if self._finds_overflow:
            square = square + unowned_overflow(gradients, self._layouts, self._mesh)
        return square


def unowned_overflow(
    gradients: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh
) -> Tensor | float:
    """A term for this rank's squared norm: NaN where a gradient it does not own has overflowed.

    Gradients that another rank owns are not in this rank's norm, but their local copy may overflow
    by itself. Zero times the norm is 0 if it is finite and NaN otherwise.
    """
    others = [g for name, g in gradients.items() if not layouts[name].is_owner(mesh)]
    if not others:
        return 0.0
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in others]).sum() * 0
