"""Operator strategies worth trying on a pipeline stage: the fastest at every number of layers, and
some that take less memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.plan.operators.strategy_form import Form
from workbench.planner.autoshard.for_plans.stage_graph import leading_layers, stage_graph
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.operator_splits import ShardingStrategy
from workbench.planner.autoshard.strategy_search.memory_limit import least_memory, least_time
from workbench.planner.autoshard.strategy_search.pinned_strategies import pinned_strategies, pins_of

Strategies = Mapping[str, str]
"""Module pattern -> strategy; on one rank there are none. What `blocks.*` has, layers have that no
other pattern names: those before an MoE model's others are named by their numbers.
"""
Pick = tuple[int, ...]
Named = TypeVar("Named")
SHARES = (0.01, 0.1, 1.0)
"""Prices of memory that are tried, relative to the seconds per byte without one."""
Line = tuple[float, float]


@dataclass
class StageChoices:
    """Choices on one submesh.

    Args:
        shape: The model.
        sequences: Of one microbatch.
        length: Tokens of a sequence.
        pricing: Prices on the submesh.
        fixed: Module pattern -> strategy that its operators keep.
    """

    shape: Shape
    sequences: int
    length: int
    pricing: GraphPricing
    fixed: Mapping[str, Form] = field(default_factory=dict)
    _known: dict[tuple[bool, bool], tuple[Strategies, ...]] = field(default_factory=dict)
    _graphs: dict[tuple[int, bool, bool, bool], PricedGraph] = field(default_factory=dict)

    def of(self, first: bool, last: bool) -> tuple[Strategies, ...]:
        """The choices of a stage that has these ends of the model, the fastest first."""
        if (first, last) not in self._known:
            priced = self._priced(self._least(first) + 1, first, last)
            picks = dict.fromkeys(self._picks(first, last))
            leading = leading_layers(self.shape)
            self._known[first, last] = tuple(_strategies(priced, pick, leading) for pick in picks)
        return self._known[first, last]

    def _least(self, first: bool) -> int:
        """Layers of a stage that has all kinds of them."""
        return 1 + first * leading_layers(self.shape)

    def _picks(self, first: bool, last: bool) -> Iterator[Pick]:
        for again in (False, True):
            most, least = self.shape.layers, self._least(first)
            fastest = {count: self._solved(count, first, last, again) for count in (most, least)}
            yield from fastest.values()
            if not again:
                yield from self._between(least, most, fastest, first, last)
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

    def _priced(self, num_layers: int, first: bool, last: bool, again: bool = False) -> PricedGraph:
        key = num_layers, first, last, again
        if key not in self._graphs:
            graph = stage_graph(self.shape, self.sequences, self.length, num_layers, first, last)
            own = replace(self.pricing, recomputed_layers=num_layers if again else 0)
            self._graphs[key] = own.price(graph, self._options(graph))
        return self._graphs[key]

    def _options(self, graph: OperatorGraph) -> list[tuple[ShardingStrategy, ...]]:
        every = [self.pricing.options(operator) for operator in graph.operators]
        pinned = pinned_strategies(graph, every, pins_of(graph, self.fixed))
        return [(pinned[at],) if at in pinned else own for at, own in enumerate(every)]

    def _seconds(self, pick: Pick, first: bool, last: bool) -> Line:
        """(seconds at no layer, seconds a layer), by two numbers of layers."""
        samples = [self._least(first) + more for more in (1, 2)]
        graphs = [self._priced(count, first, last) for count in samples]
        for priced in graphs:
            priced.refine(pick)
        two, three = (priced.bounded().total_cost(pick) for priced in graphs)
        return two - samples[0] * (three - two), three - two


def of_layers(
    of_stage: Iterable[tuple[str, Named]], start: int, layers: int
) -> Iterator[tuple[str, Named]]:
    """(module, what it has) of the layers of a stage.

    Args:
        of_stage: The same by patterns, as `Strategies` have them.
        start: First layer.
        layers: Of the stage.
    """
    found = [(pattern.split(".", 2), own) for pattern, own in of_stage]
    inside = [(path, own) for path, own in found if path[0] == "blocks"]
    named = {path[1] for path, _ in inside}
    for layer in map(str, range(start, start + layers)):
        key = layer if layer in named else "*"
        yield from ((f"blocks.{layer}.{path[2]}", own) for path, own in inside if path[1] == key)


def _strategies(priced: PricedGraph, pick: Pick, leading: int) -> dict[str, str]:
    return {
        _pattern(module, leading): own[option].text
        for operator, own, option in zip(priced.graph.operators, priced.options, pick)
        for module in operator.modules
    }


def _pattern(module: str, leading: int) -> str:
    """A module of leading layers by itself, of others for all of them."""
    kind, *path = module.split(".", 2)
    is_other = kind == "blocks" and path[0] != "*" and int(path[0]) >= leading
    return f"blocks.*.{path[1]}" if is_other else module
