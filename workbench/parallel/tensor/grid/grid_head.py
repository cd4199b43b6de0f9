"""The output projection and the loss on a tensor grid: each rank's tokens, the vocabulary split
over one side.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.vocab_parallel import cross_entropy, runs


class GridHeadLoss(nn.Module):
    """The head_loss seam. `project(x, weight)` gives a rank's block of the logits, `own(targets)`
    its targets; `rows` of the vocabulary are real there, `axis` splits it.
    """

    kernels = "eager"
    """What runs the loss: the plan's kernels, set once the module is built."""
    plain_below = 0
    """Of how many logits on."""

    def __init__(
        self,
        weight: nn.Parameter,
        project: Callable[[Tensor, Tensor], Tensor],
        own: Callable[[Tensor], Tensor],
        rows: tuple[int, int],
        axis: MeshAxis,
    ) -> None:
        super().__init__()
        self.weight, self.project, self.own, self.rows, self.axis = weight, project, own, rows, axis

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Summed loss of this rank's tokens of a microbatch's targets [B, T]; equal on the ranks
        along `axis`.
        """
        logits_NV = self.project(x_BTD, self.weight).flatten(0, -2)
        return cross_entropy(
            logits_NV, self.own(targets_BT).flatten(), self.rows, self.axis, runs(self, logits_NV)
        )
