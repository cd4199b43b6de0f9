"""A traced graph as a plan runs it: which operators are sharded how, and its pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.plan.operators.traced.graph_placement import (
    NodeShards,
    ParameterShards,
    parameter_shards,
    place_graph,
)
from workbench.plan.operators.traced.node_factors import FactoredGraph
from workbench.plan.operators.traced.stage_cuts import GraphStage, graph_stages
from workbench.plan.operators.traced.traced_sites import named_placements


@dataclass(frozen=True)
class PlannedGraph:
    """A module's graph, and how a plan shards it.

    Attributes:
        factored: The graph.
        shards: Node id -> how it is sharded.
        stored: Parameter id -> how it is stored.
        stages: Parts that pipeline stages run.
    """

    factored: FactoredGraph
    shards: Mapping[str, NodeShards]
    stored: Mapping[str, ParameterShards]
    stages: Sequence[GraphStage]


def planned_graph(
    factored: FactoredGraph,
    operators: Mapping[str, object],
    sides: Sequence[int],
    stages: int,
    dtype: str,
) -> PlannedGraph:
    """Shard a graph by a plan's strategies, and cut it into stages.

    Args:
        factored: The graph.
        operators: The plan's strategies.
        sides: Of the grid that tensor ranks are, outermost first.
        stages: Number of pipeline stages.
        dtype: Of what passes between them, as torch writes it.

    Raises:
        PlanError: A strategy is not legal for the graph, or it has no such stages.
    """
    named = named_placements(factored, operators, math.prod(sides), sides)
    placed = place_graph(factored, named, sides)
    stored = parameter_shards(factored, placed, sides)
    return PlannedGraph(factored, placed, stored, graph_stages(factored, placed, stages, dtype))
