"""Head and loss on a tensor grid: a rank's tokens, the vocabulary sharded over one grid axis."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.vocab_parallel import loss_kernels, vocab_parallel_cross_entropy


class GridParallelHeadLoss(nn.Module):
    """The head_loss seam on a tensor grid.

    Args:
        weight: This rank's block of the output projection.
        project: (x, weight) -> this rank's block of the logits.
        own: Targets of a microbatch [B, T] -> those of this rank's sequences.
        rows: [start, stop) of the vocabulary in that block; the rest is padding.
        axis: The grid axis that shards the vocabulary.
    """

    kernels = "eager"
    """Kernels of the loss: the plan's, set once the module is built."""
    plain_below = 0
    """Minimum number of logits for these kernels; below it the loss runs in eager mode."""

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
        return vocab_parallel_cross_entropy(
            logits_NV,
            self.own(targets_BT).flatten(),
            self.rows,
            self.axis,
            loss_kernels(self, logits_NV),
        )
