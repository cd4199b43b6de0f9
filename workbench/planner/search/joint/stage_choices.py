"""Choices of operator strategies for a pipeline stage, with what each costs for any number of
layers: of a choice, seconds and bytes grow by a constant a layer, for layers are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from workbench.plan.model.model_shape import Shape
from workbench.planner.autoshard.for_plans.stage_cost import stage_graph
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.operator_cost import OperatorCost
from workbench.planner.autoshard.strategy_search.memory_limit import least_memory, least_time

Pick = tuple[int, ...]
SHARES = (0.01, 0.1, 1.0)
"""Prices of memory that are tried, relative to the seconds per byte without one."""
SAMPLES = (2, 3)
"""Layers from which a choice's line is drawn."""
Line = tuple[float, float]


@dataclass(frozen=True)
class StageChoice:
    """Strategies of the operators of one stage; lines are (at no layer, a layer)."""

    strategies: dict[str, str]
    """Module pattern -> strategy."""
    seconds: Line
    """Of a microbatch, forward and backward."""
    parameters: Line
    """Elements on a rank."""
    kept: Line
    """Bytes of activations of a microbatch."""
    seconds_again: float
    """That recomputation adds, a layer."""
    kept_again: float
    """Bytes of activations of a microbatch that a recomputed layer keeps."""
    once: float
    """Bytes of the activations of the layer being recomputed, one for all microbatches."""


@dataclass
class StageChoices:
    """Choices on one submesh: the fastest at every number of layers, and some that take less
    memory.

    Args:
        shape: The model.
        sequences: Of one microbatch.
        length: Tokens of a sequence.
        pricing: Prices on the submesh.
    """

    shape: Shape
    sequences: int
    length: int
    pricing: GraphPricing
    _known: dict[tuple[bool, bool], tuple[StageChoice, ...]] = field(default_factory=dict)
    _graphs: dict[tuple[int, bool, bool, bool, int], PricedGraph] = field(default_factory=dict)

    def of(self, first: bool, last: bool) -> tuple[StageChoice, ...]:
        """The choices of a stage that has these ends of the model."""
        if (first, last) not in self._known:
            picks = dict.fromkeys(self._picks(first, last))
            self._known[first, last] = tuple(self._choice(p, first, last) for p in picks)
        return self._known[first, last]

    def _picks(self, first: bool, last: bool) -> Iterator[Pick]:
        for again in (False, True):
            most = self.shape.layers
            fastest = {count: self._solved(count, first, last, again) for count in {1, most}}
            yield from fastest.values()
            if not again:
                yield from self._between(1, most, fastest, first, last)
            priced = self._priced(most, first, last, again)
            problem = priced.bounded()
            price = problem.total_cost(fastest[most]) / problem.total_bytes(fastest[most])
            yield from (least_time(priced, share * price) for share in SHARES)
            yield least_memory(priced.bounded())

    def _between(
        self, low: int, high: int, picks: dict[int, Pick], first: bool, last: bool
    ) -> Iterator[Pick]:
        """The fastest choices between two counts: corners of a concave line."""
        if high - low < 2 or picks[low] == picks[high]:
            return
        (base, slope), (other, steeper) = (
            self._seconds(picks[count], first, last) for count in (high, low)
        )
        if slope == steeper:
            return
        middle = min(max(round((base - other) / (steeper - slope)), low + 1), high - 1)
        picks[middle] = self._solved(middle, first, last)
        if picks[middle] in (picks[low], picks[high]):
            return
        yield picks[middle]
        yield from self._between(low, middle, picks, first, last)
        yield from self._between(middle, high, picks, first, last)

    def _solved(self, num_layers: int, first: bool, last: bool, again: bool = False) -> Pick:
        return least_time(self._priced(num_layers, first, last, again))

    def _priced(
        self, num_layers: int, first: bool, last: bool, again: bool = False, in_flight: int = 1
    ) -> PricedGraph:
        key = num_layers, first, last, again, in_flight
        if key not in self._graphs:
            graph = stage_graph(self.shape, self.sequences, self.length, num_layers, first, last)
            layers = num_layers if again else 0
            own = replace(self.pricing, in_flight=in_flight, recomputed_layers=layers)
            self._graphs[key] = own.price(graph)
        return self._graphs[key]

    def _seconds(self, pick: Pick, first: bool, last: bool, again: bool = False) -> Line:
        graphs = [self._priced(count, first, last, again) for count in SAMPLES]
        for priced in graphs:
            priced.refine(pick)
        return _line(*(priced.bounded().total_cost(pick) for priced in graphs))

    def _choice(self, pick: Pick, first: bool, last: bool) -> StageChoice:
        def line(of: Callable[[PricedGraph, Pick], float], again: bool, flying: int = 1) -> Line:
            graphs = (self._priced(count, first, last, again, flying) for count in SAMPLES)
            return _line(*(flying * of(priced, pick) for priced in graphs))

        plain, again = (self._seconds(pick, first, last, each) for each in (False, True))
        # What all microbatches share does not grow with them.
        one, two = (line(_activations, True, flying) for flying in (1, 2))
        return StageChoice(
            _strategies(self._priced(SAMPLES[0], first, last), pick),
            plain,
            line(_parameters, False),
            line(_activations, False),
            again[1] - plain[1],
            two[1] - one[1],
            2 * one[0] - two[0],
        )


def _line(two: float, three: float) -> Line:
    slope = three - two
    return two - SAMPLES[0] * slope, slope


def _strategies(priced: PricedGraph, pick: Pick) -> dict[str, str]:
    return {
        module: own[option].text
        for operator, own, option in zip(priced.graph.operators, priced.options, pick)
        for module in operator.modules
    }


def _parameters(priced: PricedGraph, pick: Pick) -> float:
    return sum(cost.parameter_bytes * n for cost, n in _costs(priced, pick)) / (
        priced.pricing.sizes.state
    )


def _activations(priced: PricedGraph, pick: Pick) -> float:
    """Bytes of a microbatch."""
    return sum(cost.activation_bytes * n for cost, n in _costs(priced, pick))


def _costs(priced: PricedGraph, pick: Pick) -> Iterator[tuple[OperatorCost, int]]:
    """(cost of one layer, layers) of each operator."""
    for operator, own, option in zip(priced.graph.operators, priced.costs, pick):
        yield own[option], operator.num_layers
