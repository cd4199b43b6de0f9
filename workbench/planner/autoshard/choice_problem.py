"""The choice itself, as numbers only: nodes with a cost for each option, edges with a cost for each
pair of options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReshardingEdge:
    """An edge from node `source` to node `target`; costs [options of source, options of target]."""

    source: int
    target: int
    costs: Array


@dataclass(frozen=True)
class StrategyProblem:
    """Pick one option for each node, so that nodes and edges together cost least."""

    costs: tuple[Array, ...]
    """Of each node, one an option."""
    edges: tuple[ReshardingEdge, ...]
    bytes: tuple[Array, ...] = ()
    """Memory of each node, one an option; read only where there is a limit."""
    limit: float | None = None
    """Bytes that the picked options may take together."""

    @property
    def is_chain(self) -> bool:
        """Whether the edges lead from each node to the next, and nowhere else."""
        return [(e.source, e.target) for e in self.edges] == [
            (i, i + 1) for i in range(len(self.costs) - 1)
        ]

    def total(self, picked: Sequence[int]) -> float:
        """Cost of these options."""
        nodes = sum(float(cost[option]) for cost, option in zip(self.costs, picked))
        return nodes + sum(
            float(edge.costs[picked[edge.source], picked[edge.target]]) for edge in self.edges
        )

    def memory(self, picked: Sequence[int]) -> float:
        """Bytes of these options."""
        return sum(float(size[option]) for size, option in zip(self.bytes, picked))
