"""What a pipeline stage costs on a submesh with the best operator strategies: the inner of Alpa's
two levels (arXiv:2201.12023, section 5), for every range of layers.

Layers are alike, so a stage is known by how many it has and by whether it has the model's ends.
They share a choice, and the seconds of a choice grow by a constant a layer: the least over all
choices is a concave piecewise linear function of the layers, of which only the corners are
searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.layer_operators import model_graph
from workbench.planner.autoshard.strategy_search.memory_limit import solve_within_memory

Pick = tuple[int, ...]
PRECISION = 1e-9
"""Relative difference at which two choices cost the same."""
FIRST, LAST = ("embedding", "embedding.norm"), ("final_norm", "head", "loss")


@dataclass(frozen=True)
class StageCost:
    """A stage on one submesh, a microbatch forward and backward."""

    seconds: float
    bytes: float
    """Parameters with their states, and saved activations, of a rank."""
    strategies: dict[str, str]
    """Module pattern -> strategy."""


def stage_graph(
    shape: Shape, sequences: int, length: int, num_layers: int, first: bool, last: bool
) -> OperatorGraph:
    """The operators of `num_layers` layers, with the embedding if it is the `first` stage and the
    head if it is the `last`.
    """
    of_stage = shape.model_copy(
        update={"layers": num_layers, "tied": shape.tied and first and last}
    )
    whole = model_graph(of_stage, sequences, length, fused=True)
    left_out = (() if first else FIRST) + (() if last else LAST)
    kept = [i for i, op in enumerate(whole.operators) if op.name not in left_out]
    at = {old: new for new, old in enumerate(kept)}
    edges = (
        replace(edge, source=at[edge.source], target=at[edge.target])
        for edge in whole.edges
        if edge.source in at and edge.target in at
    )
    return OperatorGraph(tuple(whole.operators[i] for i in kept), tuple(edges))


@dataclass
class StageCosts:
    """Costs of the stages of one model on the submeshes of a cluster.

    Args:
        shape: The model.
        sequences: Of one microbatch.
        length: Tokens of a sequence.
        pricing: Ranks of a submesh -> prices on it.
    """

    shape: Shape
    sequences: int
    length: int
    pricing: Callable[[int], GraphPricing]
    _pricings: dict[int, GraphPricing] = field(default_factory=dict)
    _picks: dict[tuple[int, bool, bool], dict[int, Pick]] = field(default_factory=dict)
    _known: dict[tuple[int, int, bool, bool, float | None, int], StageCost] = field(
        default_factory=dict
    )

    def cost(
        self, start: int, stop: int, ranks: int, memory: float | None = None, in_flight: int = 1
    ) -> StageCost:
        """The least seconds of layers [start, stop) on `ranks` ranks.

        Args:
            start: First layer.
            stop: One past the last layer.
            ranks: Of the submesh.
            memory: Bytes of a rank.
            in_flight: Microbatches whose activations it keeps at once.

        Raises:
            PlanError: No strategies fit the memory.
        """
        ends = start == 0, stop == self.shape.layers
        key = stop - start, ranks, *ends, memory, in_flight
        if key not in self._known:
            free = self._free(stop - start, ranks, *ends, in_flight)
            if memory is not None and free.bytes > memory:
                priced = self._priced(stop - start, ranks, *ends, in_flight, memory)
                free = _stage_cost(priced, solve_within_memory(priced)[0])
            self._known[key] = free
        return self._known[key]

    def _free(
        self, num_layers: int, ranks: int, first: bool, last: bool, in_flight: int
    ) -> StageCost:
        """Without a limit."""
        key = ranks, first, last
        if key not in self._picks:
            self._picks[key] = picks = {}
            most = self.shape.layers
            for count in {1, most}:
                picks[count] = self._solved(count, *key)
            self._corners(1, most, *key)
        priced = self._priced(num_layers, *key, in_flight)
        options = set(self._picks[key].values())
        return min((_stage_cost(priced, pick) for pick in options), key=lambda c: c.seconds)

    def _corners(self, low: int, high: int, ranks: int, first: bool, last: bool) -> None:
        """Search between two counts until the lines of their choices meet on the envelope."""
        key = ranks, first, last
        picks = self._picks[key]
        if high - low < 2 or picks[low] == picks[high]:
            return
        one, other = (self._line(picks[count], *key) for count in (low, high))
        if one[1] == other[1]:
            return
        middle = round((other[0] - one[0]) / (one[1] - other[1]))
        middle = min(max(middle, low + 1), high - 1)
        picks[middle] = self._solved(middle, *key)
        best = min(base + slope * middle for base, slope in (one, other))
        base, slope = self._line(picks[middle], *key)
        if base + slope * middle < best * (1 - PRECISION):
            self._corners(low, middle, *key)
            self._corners(middle, high, *key)

    def _line(self, pick: Pick, ranks: int, first: bool, last: bool) -> tuple[float, float]:
        """(seconds at no layer, seconds a layer) of a choice."""
        two, three = (
            _stage_cost(self._priced(count, ranks, first, last), pick).seconds for count in (2, 3)
        )
        return two - 2 * (three - two), three - two

    def _solved(self, num_layers: int, ranks: int, first: bool, last: bool) -> Pick:
        return solve_within_memory(self._priced(num_layers, ranks, first, last))[0]

    def _priced(
        self,
        num_layers: int,
        ranks: int,
        first: bool,
        last: bool,
        in_flight: int = 1,
        memory: float | None = None,
    ) -> PricedGraph:
        if ranks not in self._pricings:
            self._pricings[ranks] = self.pricing(ranks)
        graph = stage_graph(self.shape, self.sequences, self.length, num_layers, first, last)
        own = replace(self._pricings[ranks], in_flight=in_flight)  # which shares what is known
        return own.price(graph, memory=memory)


def _stage_cost(priced: PricedGraph, picked: Pick) -> StageCost:
    priced.refine(picked)
    problem = priced.bounded()
    strategies = {
        module: own[option].text
        for operator, own, option in zip(priced.graph.operators, priced.options, picked)
        for module in operator.modules
    }
    return StageCost(problem.total_cost(picked), problem.total_bytes(picked), strategies)
