"""MoE dispatch and combine over expert-parallel ranks: all-to-all to the experts and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.models.grouped_gemm import RowGroups
from workbench.models.host_counts import CountReader, kept_for_recomputation
from workbench.models.moe import ExpertRun, GroupedExperts, TokenDispatcher
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
        super().__init__(read_counts)
        self.axis = axis

    def forward(self, num_rows: int, counts_E: Tensor | None, experts: GroupedExperts) -> ExpertRun:
        """As `TokenDispatcher`: rows are sorted by (global) expert."""
        weight = experts.up.weight
        if counts_E is None:
            counts = equal_counts(num_rows, self.axis.size, len(weight), weight.device)
        else:
            counts = kept_for_recomputation(partial(self._exchange, num_rows, counts_E))
        return partial(self._run, experts, counts)

    def _exchange(self, num_rows: int, counts_E: Tensor) -> ExchangedCounts:
        """Exchange counts and start to read both sides at once: there is one wait for the device,
        which the rows are gathered behind.
        """
        exchanged = exchange_counts(counts_E, self.axis)
        both = torch.stack((counts_E, exchanged.flatten()))
        read = self.read_counts(both, num_rows, self.axis.index, self.axis.size)
        return ExchangedCounts(read, exchanged.sum(0))

    def _run(self, experts: GroupedExperts, counts: ExchangedCounts, x_RD: Tensor) -> Tensor:
        sent, received = counts.by_rank()
        num_sent, num_received = [sum(row) for row in sent], [sum(row) for row in received]
        by_expert = list(zip(*received))
        x_SD = transpose_groups(all_to_all(x_RD, num_sent, num_received, self.axis), received)
        y_SD = experts(x_SD, RowGroups(counts.local_E, lambda: [sum(row) for row in by_expert]))
        return all_to_all(transpose_groups(y_SD, by_expert), num_received, num_sent, self.axis)


@dataclass
class ExchangedCounts:
    """Rows that go from each rank to each expert.

    Attributes:
        read: Gives (rows sent to each expert, rows received by source rank and local expert), each
            flat, on the host.
        local_E: Rows of each local expert, on the device.
    """

    read: Callable[[], list[Any]]
    local_E: Tensor

    def by_rank(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rows sent [rank][its expert] and received [rank][local expert]."""
        sent, received = self.read()
        size = len(self.local_E)
        return _chunks(sent, size), _chunks(received, size)


def equal_counts(
    num_rows: int, ranks: int, num_local: int, device: torch.device
) -> ExchangedCounts:
    """The same number of rows for every expert."""
    each = num_rows // (ranks * num_local)
    flat = [each] * (ranks * num_local)
    return ExchangedCounts(
        lambda: [flat, flat], torch.full((num_local,), each * ranks, device=device)
    )


def transpose_groups(x_RD: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows that are sorted by (a, b), `counts[a][b]` of each, to be sorted by (b, a)."""
    if len(counts) == 1 or len(counts[0]) == 1:
        return x_RD
    groups = x_RD.split([count for row in counts for count in row])
    width = len(counts[0])
    return torch.cat([groups[a * width + b] for b in range(width) for a in range(len(counts))])


def _chunks(counts: list[int], size: int) -> list[list[int]]:
    return [counts[i : i + size] for i in range(0, len(counts), size)]
