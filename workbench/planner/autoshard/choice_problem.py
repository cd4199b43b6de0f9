"""The choice as numbers only: nodes with a cost per option, edges with a cost per pair of
options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReshardingEdge:
    """An edge from node `source` to node `target`."""

    source: int
    target: int
    costs: Array
    """Seconds of resharding, [options of source, options of target]."""


@dataclass(frozen=True)
class StrategyProblem:
    """Pick one option for each node, so that nodes and edges together cost least."""

    node_costs: tuple[Array, ...]
    """Seconds of each node, [options]."""
    edges: tuple[ReshardingEdge, ...]
    node_bytes: tuple[Array, ...] = ()
    """Memory of each node, [options]; read only where there is a limit."""
    memory_limit: float | None = None
    """Bytes that the picked options may take together."""

    @property
    def is_chain(self) -> bool:
        """Whether the edges lead from each node to the next, and nowhere else."""
        return [(e.source, e.target) for e in self.edges] == [
            (i, i + 1) for i in range(len(self.node_costs) - 1)
        ]

    def total_cost(self, picked: Sequence[int]) -> float:
        """Seconds of these options, resharding included."""
        nodes = sum(float(cost[option]) for cost, option in zip(self.node_costs, picked))
        return nodes + sum(
            float(edge.costs[picked[edge.source], picked[edge.target]]) for edge in self.edges
        )

    def total_bytes(self, picked: Sequence[int]) -> float:
        """Bytes of these options."""
        return sum(float(size[option]) for size, option in zip(self.node_bytes, picked))
