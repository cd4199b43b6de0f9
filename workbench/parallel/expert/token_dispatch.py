"""MoE dispatch and combine over expert-parallel ranks: all-to-all to the experts and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.models.moe import CountReader, GroupedExperts, TokenDispatcher
from workbench.parallel.expert.expert_collectives import all_to_all, exchange_counts
from workbench.parallel.mesh import MeshAxis


class AllToAllDispatcher(TokenDispatcher):
    """The dispatcher seam over ranks that each hold the same number of neighbouring experts.

    Rows arrive sorted by source rank and then by expert. They are sorted by expert, so that each
    expert's GEMM reads one contiguous slice, and put back in order before the all-to-all that
    returns them. The counts are exchanged first, unless every expert has the same number of rows
    (a capacity factor).
    """

    def __init__(self, read_counts: CountReader, axis: MeshAxis) -> None:
        super().__init__()
        self.read_counts, self.axis = read_counts, axis

    def forward(self, x_RD: Tensor, counts_E: Tensor | None, experts: GroupedExperts) -> Tensor:
        """Outputs of the experts [R, D] for rows [R, D], sorted by (global) expert."""
        sent, received = self._row_counts(x_RD, counts_E, len(experts.up.weight))
        num_sent, num_received = [sum(row) for row in sent], [sum(row) for row in received]
        by_expert = list(zip(*received))
        x_SD = transpose_groups(all_to_all(x_RD, num_sent, num_received, self.axis), received)
        y_SD = experts(x_SD, [sum(row) for row in by_expert])
        return all_to_all(transpose_groups(y_SD, by_expert), num_received, num_sent, self.axis)

    def _row_counts(
        self, x_RD: Tensor, counts_E: Tensor | None, num_local: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Rows sent [rank][its expert] and received [rank][local expert], on the host.

        Both are read at once: there is one wait for the device.
        """
        ranks = self.axis.size
        if counts_E is None:
            even = [[len(x_RD) // (ranks * num_local)] * num_local] * ranks
            return even, even
        both = torch.stack((counts_E, exchange_counts(counts_E, self.axis).flatten()))
        sent, received = self.read_counts(both, len(x_RD))
        return _chunks(sent, num_local), _chunks(received, num_local)


def transpose_groups(x_RD: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows that are sorted by (a, b), `counts[a][b]` of each, to be sorted by (b, a)."""
    if len(counts) == 1 or len(counts[0]) == 1:
        return x_RD
    groups = x_RD.split([count for row in counts for count in row])
    width = len(counts[0])
    return torch.cat([groups[a * width + b] for b in range(width) for a in range(len(counts))])


def _chunks(counts: list[int], size: int) -> list[list[int]]:
    return [counts[i : i + size] for i in range(0, len(counts), size)]
