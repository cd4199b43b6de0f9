"""The choice as numbers only: nodes with a cost per option, edges with a cost per pair of
options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.planner.autoshard.strategy_search.shared_arrays import Array, SharedArrays

Options = NDArray[np.int64]


class Priced(Protocol):
    """A choice whose prices are known, or bounded until they are asked for."""

    def bounded(self) -> StrategyProblem:
        """The choice at the prices that are known, and lower bounds of the others."""

    def refine(self, picked: tuple[int, ...]) -> bool:
        """Price what these options have between them; whether any price was not known."""


@dataclass(frozen=True)
class ReshardingEdge:
    """An edge from node `source` to node `target`."""

    source: int
    target: int
    costs: Array
    """Seconds of resharding, [options of source, options of target]; inf: illegal together."""


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

    def bounded(self) -> StrategyProblem:
        """This problem, all of whose prices are known."""
        return self

    def refine(self, picked: Sequence[int]) -> bool:
        """Whether a price between these options was not known: none."""
        return False

    def total_cost(self, picked: Sequence[int]) -> float:
        """Seconds of these options, resharding included."""
        nodes = sum(float(cost[option]) for cost, option in zip(self.node_costs, picked))
        return nodes + sum(
            float(edge.costs[picked[edge.source], picked[edge.target]]) for edge in self.edges
        )

    def total_bytes(self, picked: Sequence[int]) -> float:
        """Bytes of these options."""
        return sum(float(size[option]) for size, option in zip(self.node_bytes, picked))

    def fits(self, picked: Sequence[int]) -> bool:
        """Whether these options are within the limit."""
        return self.memory_limit is None or self.total_bytes(picked) <= self.memory_limit

    def restricted(self, allowed: Sequence[Options]) -> StrategyProblem:
        """The same choice among some options of each node."""
        return replace(
            self,
            node_costs=tuple(cost[keep] for cost, keep in zip(self.node_costs, allowed)),
            node_bytes=tuple(size[keep] for size, keep in zip(self.node_bytes, allowed)),
            edges=tuple(
                replace(e, costs=e.costs[np.ix_(allowed[e.source], allowed[e.target])])
                for e in self.edges
            ),
        )

    def weighted(self, seconds_per_byte: float) -> StrategyProblem:
        """The same choice where memory costs time, and has no limit."""
        if not seconds_per_byte:
            return replace(self, memory_limit=None)
        shared = SharedArrays()
        costs = (
            shared.once(_weighted, *both, fixed=seconds_per_byte)
            for both in zip(self.node_costs, self.node_bytes)
        )
        return replace(self, node_costs=tuple(costs), memory_limit=None)


def _weighted(seconds: Array, size: Array, seconds_per_byte: float) -> Array:
    return seconds + seconds_per_byte * size
