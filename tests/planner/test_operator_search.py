"""Search modes of operator strategies: exactness, gaps, propagation, pins, and refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.planner.drawn_graphs import combinations, drawn_graph, least_by_brute_force, pairs
from workbench.errors import PlanError
from workbench.plan.model.model_shape import Shape
from workbench.planner.autoshard import (
    OperatorPlan,
    TensorBytes,
    choose_strategies,
    ideal_machine,
    parse_strategy,
)
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.autoshard.strategy_choice import choose
from workbench.planner.autoshard.strategy_search.choice_problem import (
    ReshardingEdge,
    StrategyProblem,
)
from workbench.planner.autoshard.strategy_search.memory_limit import solve_within_memory
from workbench.planner.autoshard.strategy_search.series_parallel import solve_by_dynamic_programming

MAX_COMBINATIONS = 400_000
LLAMA = Shape(layers=4, hidden=4096, heads=32, ffn=14336, vocab=32000, mlp="swiglu")
H100 = ideal_machine(flops=500e12, bandwidth=300e9, latency=5e-6, memory_bandwidth=2.5e12)
MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation")


def pricing(ranks: int, seed: int = 0) -> GraphPricing:
    rate = 10 ** (8 + seed % 4)
    machine = ideal_machine(1e14, rate, 1e-6, 1e12)
    return GraphPricing(logical_mesh(ranks, machine), machine, TensorBytes())


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(b, marks=pytest.mark.slow) for b in range(1, 10))]
)
def test_dynamic_programming_is_exact_on_series_parallel_graphs(batch: int) -> None:
    """Fifty drawn graphs of up to 8 operators, with and without a memory limit."""
    for seed in range(50 * batch, 50 * batch + 50):
        graph = drawn_graph(seed)
        priced = pricing(4 if seed % 3 == 0 else 2, seed).price(graph)
        if combinations(priced.problem) > MAX_COMBINATIONS:
            priced = pricing(2, seed).price(graph)
        problem = priced.problem
        best = least_by_brute_force(problem)
        picked = solve_by_dynamic_programming(problem)
        assert problem.total_cost(picked) == pytest.approx(best, rel=1e-12), seed
        least = sum(float(size.min()) for size in problem.node_bytes)
        limit = least + (seed % 7) / 7 * (problem.total_bytes(picked) - least)
        limited = StrategyProblem(problem.node_costs, problem.edges, problem.node_bytes, limit)
        within, _ = solve_within_memory(limited)
        assert limited.fits(within)
        assert limited.total_cost(within) == pytest.approx(
            least_by_brute_force(limited), rel=1e-9
        ), seed


@pytest.mark.parametrize("count", [3, 4, 5, 6])
@pytest.mark.parametrize("most", [4, 9])
def test_graphs_that_are_not_series_parallel_are_exact_too(count: int, most: int) -> None:
    """Complete graphs, some pairs of options illegal; many options take the integer program."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sizes = [int(rng.integers(2, most if count < 6 else 5)) for _ in range(count)]
        edges = []
        for i, j in pairs(count):
            costs = rng.integers(0, 50, (sizes[i], sizes[j])).astype(float)
            costs[rng.random(costs.shape) < 0.1] = np.inf
            edges.append(ReshardingEdge(i, j, costs))
        own = tuple(rng.integers(0, 50, n).astype(float) for n in sizes)
        problem = StrategyProblem(own, tuple(edges))
        best = least_by_brute_force(problem)
        if np.isfinite(best):
            assert problem.total_cost(solve_by_dynamic_programming(problem)) == best


@pytest.mark.parametrize("seed", range(8))
def test_no_mode_beats_dynamic_programming(seed: int) -> None:
    graph = drawn_graph(1000 + seed)
    at = pricing(8, seed)
    exact = choose(graph, at, {}, "dynamic_programming")
    best = exact.priced.problem.total_cost(exact.picked)
    last = len(graph.operators) - 1
    pin = {f"op{last}": exact.priced.options[last][exact.picked[last]].form}
    for mode in ("recursive_programming", "sharding_propagation"):
        found = choose(graph, at, pin, mode)
        assert found.priced.problem.total_cost(found.picked) >= best * (1 - 1e-12)


@pytest.mark.parametrize("ranks", [(2, 2, 2), (4, 2), (2, 3), 8])
@pytest.mark.parametrize("recomputed", [0, 1])
def test_no_redistribution_is_faster_than_its_bound(ranks: Any, recomputed: int) -> None:
    """On links of drawn speeds, every pair of strategies of the ends of every edge."""
    for seed in range(6):
        rng, levels = np.random.default_rng(seed), 3 if ranks == 8 else len(ranks)
        links = tuple(10 ** rng.uniform(8, 11, levels)), tuple(10 ** rng.uniform(-7, -5, levels))
        machine = ideal_machine(1e14, *links, 1e12)
        at = GraphPricing(
            logical_mesh(ranks, machine), machine, TensorBytes(), recomputed_layers=recomputed
        )
        for table in at.price(drawn_graph(seed)).tables:
            bounds = table.seconds.copy()
            prices = table.exact().seconds
            assert (bounds <= prices * (1 + 1e-9) + 1e-15).all(), seed


# --- propagation ----------------------------------------------------------------------------------


def found(mode: str = "dynamic_programming", ranks: Any = 4, **more: Any) -> OperatorPlan:
    fixed = {name: parse_strategy(text, name) for name, text in more.pop("pins", {}).items()}
    shape = more.pop("shape", LLAMA)
    return choose_strategies(
        shape,
        more.pop("sequences", 4) * 2048,
        ranks,
        H100,
        sequence_length=2048,
        fused=True,
        fixed=fixed,
        mode=mode,
        **more,
    )


def by_name(plan: OperatorPlan) -> dict[str, tuple[str, str]]:
    return {row.operator: (row.strategy, row.reason) for row in plan.rows}


def test_a_pinned_gemm_shards_what_follows_it_by_the_same_axis() -> None:
    rows = by_name(found("sharding_propagation", pins={"blocks.*.attention.q": "((1,1),(1,4))"}))
    assert rows["attention.qkv"] == ("((1,1),(1,4))", "pinned by you")
    assert rows["attention.attend"][1] == "from attention.qkv by heads"
    assert rows["attention.o"] == ("((1,4),(4,1))", "from attention.attend by inner")
    assert rows["mlp.up"] == ("((1,1),(1,1))", "replicated: nothing reaches it")
    assert rows["head"][1] == "replicated: nothing reaches it"


OF_ROWS = {
    "for it is cheaper": "least time",
    "pinned by you": "pinned by you",
    "for each shares a weight with one pinned by you": "shares a weight with one pinned by you",
    "for nothing reaches them": "replicated: nothing reaches it",
}
"""Reason of the sentence for replicated operators -> reason that their rows give."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "pins",
    [
        {"blocks.*.mlp.down": "((1,2),(2,1))"},
        {"blocks.*.attention.q": "((1,1),(1,4))"},
        {"blocks.*.attention.q": "((1,1),(1,4))", "blocks.*.mlp.up": "((1,1),(1,1))"},
        {"head": "((1,1),(1,1))"},
    ],
    ids=["down", "query", "replicated", "tied"],
)
def test_the_sentence_gives_the_reasons_of_the_rows(mode: str, pins: dict[str, str]) -> None:
    tied = LLAMA.model_copy(update={"tied": True}) if "head" in pins else LLAMA
    plan = found(mode, pins=pins, shape=tied)
    said = {
        name: why
        for why, names in re.findall(r"Replicated on several ranks, ([^:]*): (.*?)\. ", plan.reason)
        for name in names.split(", ")
    }
    assert said.keys() <= {row.operator for row in plan.rows}
    for row in plan.rows:
        if row.operator in said:
            others = ("from ", "replicated, as ", "least redistribution", "conflict between ")
            known = OF_ROWS.get(said[row.operator])
            assert row.reason == known if known else row.reason.startswith(others), row
    assert said or mode != "sharding_propagation"
    if mode == "sharding_propagation":
        assert "cheaper" not in plan.reason and "costs more than it saves" not in plan.reason


def test_a_layout_flows_backward_too() -> None:
    rows = by_name(found("sharding_propagation", pins={"blocks.*.mlp.down": "((1,2),(2,1))"}))
    assert rows["mlp.activate"][1] == "from mlp.down by width"
    assert rows["mlp.up"] == ("((1,1),(1,2))", "from mlp.activate by columns")


def test_sequences_flow_through_residuals_and_norms_to_the_ends() -> None:
    plan = found("sharding_propagation", pins={"blocks.*.mlp.up": "((4,1),(1,1))"})
    rows = by_name(plan)
    assert rows["embedding"][0] == "((1,1),(4,))" and rows["loss"][0] == "((4,1),(4,))"
    assert all(row.strategy.startswith(("((4", "((1,1),(4")) for row in plan.rows)
    assert not plan.redistributions


def test_a_conflict_is_resolved_at_least_redistribution_and_says_what_it_saves() -> None:
    pins = {"blocks.*.attention.o": "((4,1),(1,1))", "blocks.*.mlp.up": "((1,1),(1,4))"}
    plan = found("sharding_propagation", pins=pins)
    reasons = {row.operator: row.reason for row in plan.rows}
    said = [reason for reason in reasons.values() if reason.startswith("conflict between ")]
    assert said and all("'s layout costs " in reason and "more" in reason for reason in said)


def test_the_sum_of_a_gradient_is_no_redistribution() -> None:
    """Where rows meet columns an all-gather and a reduce-scatter take the place of an all-reduce:
    what is before stays split by rows.
    """
    pins = {f"blocks.{i}.mlp.up": ("((1,1),(1,4))", "((2,1),(1,2))")[i % 2] for i in range(4)}
    plan = found("sharding_propagation", pins=pins)
    attention = [row for row in plan.rows if "attention." in row.operator]
    assert attention and all(row.strategy.startswith("((2,1") for row in attention)
    up = {"blocks.*.attention_norm": "((4,1),(1,))", "blocks.*.mlp.up": "((1,1),(1,4))"}
    plan = found("sharding_propagation", pins=up)
    (more,) = re.findall(r"mlp.up's layout costs ([\d.]+) ms more", by_name(plan)["mlp_norm"][1])
    other = found("sharding_propagation", pins=plan.forms | {"blocks.*.mlp_norm": "((1,1),(1,))"})
    assert between(other) - between(plan) == pytest.approx(1e-3 * float(more), rel=0.01)


def between(plan: OperatorPlan) -> float:
    """Seconds of redistribution, and of the sums that it may take along."""
    sums = [m.seconds * r.times for r in plan.rows for m in r.moves if m.tensor != "weight"]
    return sum(sums) + sum(r.seconds * r.times for r in plan.redistributions)


def test_a_pin_that_is_kept_says_so_in_every_mode() -> None:
    for mode in MODES:
        rows = by_name(found(mode, pins={"head": "((2,1),(1,2))"}))
        assert rows["head"] == ("((2,1),(1,2))", "pinned by you")
    assert rows["final_norm"][1] != "least time"
    assert by_name(found())["head"][1] == "least time"


def test_layers_that_pins_tell_apart_have_a_choice_each() -> None:
    plan = found(pins={"blocks.[01].mlp.up": "((1,1),(1,1))"})
    rows = by_name(plan)
    assert rows["blocks.0-1.mlp.up"] == ("((1,1),(1,1))", "pinned by you")
    assert rows["blocks.2-3.mlp.up"][1] == "least time"
    assert plan.forms["blocks.1.mlp.gate"] == "((1,1),(1,1))"


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mode": "exhaustive"}, "mode: is 'exhaustive'; legal: dynamic_programming, recursive_"),
        ({"mode": "sharding_propagation"}, "starts from strategies that the plan names"),
        (
            {"pins": {"blocks.*.mlp.upp": "((1,1),(1,4))"}},
            "names no operator of the model; did you mean",
        ),
        ({"pins": {"blocks.*.mlp.up": "((1,1),(1,3))"}}, "for mlp.up; legal: ((1,1),(1,1))"),
        (
            {"pins": {"*.mlp.up": "((1,1),(1,4))", "blocks.*.mlp.*p": "((4,1),(1,1))"}},
            "gives mlp.up two strategies, ((1,1),(1,4)) (*.mlp.up) and ((4,1),(1,1))",
        ),
        (
            {"pins": {"*.attention.q": "((1,1),(1,4))", "*.attention.k": "((4,1),(1,1))"}},
            "legal: one, for blocks.*.attention.q, blocks.*.attention.k",
        ),
        (
            {
                "pins": {"head": "((1,1),(1,4))", "embedding.tokens": "((2,1),(1,))"},
                "shape": LLAMA.model_copy(update={"tied": True}),
            },
            "which leaves head no legal strategy; legal: ((4,1),(1,))",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(more: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        found(**more)
    assert said in str(refused.value), refused.value


def test_the_same_strategy_twice_is_one() -> None:
    pins = {"*.mlp.up": "((1,1),(1,4))", "blocks.*.mlp.*p": "((1,1),(1,4))"}
    assert by_name(found(pins=pins))["mlp.up"] == ("((1,1),(1,4))", "pinned by you")
