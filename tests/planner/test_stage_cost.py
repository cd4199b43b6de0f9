"""Costs of pipeline stages with the best operator strategies: equal to a search of each stage."""

from __future__ import annotations

import pytest

from workbench.errors import PlanError
from workbench.plan.model.model_shape import Shape
from workbench.planner.autoshard import TensorBytes, ideal_machine
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.for_plans.stage_cost import StageCosts, stage_graph
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.autoshard.strategy_search.memory_limit import solve_within_memory

SHAPE = Shape(layers=12, hidden=1024, heads=16, ffn=4096, vocab=51200, mlp="gelu", tied=True)


def pricing(rate: float, ranks: int) -> GraphPricing:
    machine = ideal_machine(1e14, rate, 1e-5, 1e12)
    return GraphPricing(logical_mesh(ranks, machine), machine, TensorBytes())


@pytest.mark.parametrize("rate", [1e9, 1e10, 1e11])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_range_costs_what_its_own_search_finds(rate: float, ranks: int) -> None:
    costs = StageCosts(SHAPE, 8, 512, lambda count: pricing(rate, count))
    for start, stop in ((0, 1), (0, 5), (3, 4), (3, 9), (2, 12), (11, 12), (0, 12)):
        graph = stage_graph(SHAPE, 8, 512, stop - start, start == 0, stop == 12)
        priced = pricing(rate, ranks).price(graph)
        best = priced.problem.total_cost(solve_within_memory(priced)[0])
        assert costs.cost(start, stop, ranks).seconds == pytest.approx(best, rel=1e-9)


def test_a_limit_costs_time_and_is_kept() -> None:
    costs = StageCosts(SHAPE, 8, 512, lambda count: pricing(1e9, count))
    free = costs.cost(0, 6, 4)
    tight = costs.cost(0, 6, 4, 0.6 * free.bytes)
    assert tight.bytes <= 0.6 * free.bytes and tight.seconds > free.seconds
    assert tight.strategies != free.strategies
    with pytest.raises(PlanError, match="memory"):
        costs.cost(0, 6, 4, 0.01 * free.bytes)


def test_microbatches_in_flight_keep_their_activations() -> None:
    costs = StageCosts(SHAPE, 8, 512, lambda count: pricing(1e9, count))
    one, two, four = (costs.cost(2, 8, 2, in_flight=n) for n in (1, 2, 4))
    assert one.seconds == two.seconds == four.seconds
    assert four.bytes - two.bytes == pytest.approx(2 * (two.bytes - one.bytes), rel=1e-12)
    limited = costs.cost(2, 8, 2, memory=0.8 * four.bytes, in_flight=4)
    assert limited.bytes <= 0.8 * four.bytes and limited.seconds > one.seconds
