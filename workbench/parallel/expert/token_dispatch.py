"""Rows to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.models.moe import Counting, Exchange, Experts
from workbench.parallel.expert.expert_collectives import all_to_all, exchange_counts
from workbench.parallel.mesh import MeshAxis


class ExpertExchange(Exchange):
    """The exchange seam over ranks, each of which holds as many neighbouring experts.

    Rows arrive by source rank and, of each, by expert; they are sorted by expert, multiplied, and
    sent back in the order in which they came. How many go where is exchanged first, unless every
    expert has the same number.
    """

    def __init__(self, counting: Counting, axis: MeshAxis) -> None:
        super().__init__()
        self.counting, self.axis = counting, axis

    def forward(self, x_RD: Tensor, counts_E: Tensor | None, experts: Experts) -> Tensor:
        """The experts' outputs [R, D], row by row."""
        sent, received = self._counts(x_RD, counts_E, len(experts.up.weight))
        there, here = [sum(own) for own in sent], [sum(own) for own in received]
        by_expert = list(zip(*received))
        x_SD = regrouped(all_to_all(x_RD, there, here, self.axis), received)
        y_SD = experts(x_SD, [sum(own) for own in by_expert])
        return all_to_all(regrouped(y_SD, by_expert), here, there, self.axis)

    def _counts(
        self, x_RD: Tensor, counts_E: Tensor | None, own: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Rows sent and received, each [other rank][one of its experts, or of ours]; one wait for
        the device.
        """
        ranks = self.axis.size
        if counts_E is None:
            even = [[len(x_RD) // (ranks * own)] * own] * ranks
            return even, even
        both = torch.stack((counts_E, exchange_counts(counts_E, self.axis).flatten()))
        sent, received = self.counting(both, len(x_RD))
        return _cut(sent, own), _cut(received, own)


def regrouped(x_RD: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Rows that stand as [a][b], `counts[a][b]` of each, as [b][a]."""
    if len(counts) == 1 or len(counts[0]) == 1:
        return x_RD
    pieces = x_RD.split([count for row in counts for count in row])
    width = len(counts[0])
    return torch.cat([pieces[a * width + b] for b in range(width) for a in range(len(counts))])


def _cut(counts: list[int], size: int) -> list[list[int]]:
    return [counts[i : i + size] for i in range(0, len(counts), size)]
