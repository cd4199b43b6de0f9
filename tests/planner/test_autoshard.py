"""Operator strategies: legal forms, hand-computed costs, and the exact choice against brute
force.
"""

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from workbench.errors import PlanError
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorDim,
    OperatorGraph,
    OperatorTensor,
)
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard import (
    TensorBytes,
    choose_strategies,
    ideal_machine,
    parse_strategy,
    read_strategies,
    strategy_text,
    write_strategies,
)
from workbench.planner.autoshard.device_mesh import LogicalMesh, logical_mesh
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.layer_operators import branch_graph, layer_graph, model_graph
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import operator_cost, redistribution
from workbench.planner.autoshard.operator_splits import ShardingStrategy, legal_strategies
from workbench.planner.autoshard.strategy_search.choice_problem import (
    ReshardingEdge,
    StrategyProblem,
)
from workbench.planner.autoshard.strategy_search.integer_program import solve_by_integer_programming
from workbench.planner.autoshard.strategy_search.series_parallel import solve_by_dynamic_programming

MACHINE = ideal_machine(flops=1e12, bandwidth=1e9, latency=1e-6)
GPT = Shape(layers=3, hidden=64, heads=4, ffn=256, vocab=500, mlp="gelu", norm="layernorm")


def priced_graph(graph: OperatorGraph, ranks: int, machine: MachineModel = MACHINE) -> PricedGraph:
    return GraphPricing(logical_mesh(ranks, machine), machine, TensorBytes()).price(graph)


def product(
    rows: int = 8, inner: int = 16, columns: int = 32, units: tuple[int, int, int] = (8, 16, 32)
) -> Operator:
    dims = tuple(
        OperatorDim(n, s, u)
        for n, s, u in zip(("rows", "inner", "columns"), (rows, inner, columns), units)
    )
    inputs = (
        OperatorTensor("input", ("rows", "inner")),
        OperatorTensor("weight", ("inner", "columns"), "parameter"),
    )
    return Operator(
        "product",
        "MatMul",
        dims,
        inputs,
        OperatorTensor("output", ("rows", "columns")),
        gemm_widths=(columns,),
    )


def option(operator: Operator, grid: LogicalMesh, text: str) -> ShardingStrategy:
    return next(s for s in legal_strategies(operator, grid) if strategy_text(s.form) == text)


# --- legal strategies -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12])
def test_strategies_are_all_divisor_triples_whose_product_divides_the_ranks(ranks: int) -> None:
    operator = product(units=(8, 12, 6))
    legal = {
        (a, b, c)
        for a, b, c in itertools.product(range(1, ranks + 1), repeat=3)
        if ranks % (a * b * c) == 0 and 8 % a == 0 and 12 % b == 0 and 6 % c == 0
    }
    found = legal_strategies(operator, logical_mesh(ranks, MACHINE))
    assert sorted(s.form for s in found) == sorted((((a, b), (b, c))) for a, b, c in legal)


def test_a_grid_gives_each_axis_to_one_dimension_or_none() -> None:
    found = legal_strategies(product(units=(4, 16, 32)), logical_mesh((4, 2), MACHINE))
    outside = [("rows", name) for name in (None, "inner", "columns")]
    inside = [(None, name) for name in (None, "inner", "columns")]
    both = [("inner", "inner"), ("inner", "columns"), ("columns", "columns")]
    assert sorted(map(str, (s.placement for s in found))) == sorted(
        map(str, outside + inside + both)
    )
    assert len({s.form for s in found}) == len(found)


def test_a_dimension_of_one_unit_stays_whole() -> None:
    assert {
        s.form for s in legal_strategies(product(units=(1, 1, 1)), logical_mesh(4, MACHINE))
    } == {((1, 1), (1, 1))}


@pytest.mark.parametrize(
    "form, placement",
    [
        ("((2,1),(1,1))", ("rows", None, None)),
        ("((1,1),(1,2))", (None, None, "columns")),
        ("((1,2),(2,1))", (None, None, "inner")),
        ("((4,1),(1,2))", ("rows", "rows", "columns")),
        ("((2,2),(2,2))", ("rows", "inner", "columns")),
    ],
)
def test_on_plain_ranks_rows_lie_outside_so_that_columns_meet_the_next_inner_dimension(
    form: str, placement: tuple[Any, ...]
) -> None:
    assert option(product(), logical_mesh(8, MACHINE), form).placement == placement


# --- costs, by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form, moved",
    [
        ("((4,1),(1,1))", [("backward", "weight", 16 * 32)]),  # rows: the weight's gradient
        ("((1,4),(4,1))", [("forward", "output", 8 * 32)]),  # contraction: the output
        ("((1,1),(1,4))", [("backward", "input", 8 * 16)]),  # columns: the input's gradient
        ("((1,1),(1,1))", []),
    ],
)
def test_the_operator_reduces_what_is_partial(form: str, moved: list[Any]) -> None:
    operator, grid = product(), logical_mesh(4, MACHINE)
    cost = operator_cost(
        operator, option(operator, grid, form), grid, MACHINE, TensorBytes(element=2)
    )
    assert [(m.when, m.tensor, m.bytes) for m in cost.moves] == [(w, t, 2 * n) for w, t, n in moved]
    for move in cost.moves:
        assert move.seconds == pytest.approx(2 * 3 / 4 * move.bytes / 1e9 + 2 * 3 * 1e-6, rel=1e-12)
    used = 4 if moved else 1
    assert cost.compute == pytest.approx(3 * 2 * 8 * 16 * 32 / used / 1e12, rel=1e-12)


def test_memory_counts_local_parameters_with_states_and_the_local_output() -> None:
    operator, grid = product(), logical_mesh(8, MACHINE)
    cost = operator_cost(
        operator, option(operator, grid, "((2,1),(1,4))"), grid, MACHINE, TensorBytes(2, 2, 16)
    )
    assert (cost.parameter_bytes, cost.activation_bytes) == (16 * 32 / 4 * 16, 8 * 32 / 8 * 2)


def test_a_weight_is_reduced_once_in_all_microbatches() -> None:
    operator, grid = product(), logical_mesh(4, MACHINE)
    rows = option(operator, grid, "((4,1),(1,1))")
    one, eight = (
        operator_cost(operator, rows, grid, MACHINE, TensorBytes(gradient=4), n) for n in (1, 8)
    )
    assert one.moves[0].bytes == 16 * 32 * 4
    assert eight.moves[0].seconds == pytest.approx(one.moves[0].seconds / 8, rel=1e-12)


@pytest.mark.parametrize(
    "held, wanted, kinds",
    [
        ((0,), (0,), []),
        ((0,), (None,), [("forward", "all_gather", 3 / 4 * 400), ("backward", "slice", 0)]),
        ((None,), (1,), [("forward", "slice", 0), ("backward", "all_gather", 3 / 4 * 400)]),
        (
            (0,),
            (1,),
            [("forward", "all_to_all", 3 / 4 * 100), ("backward", "all_to_all", 3 / 4 * 100)],
        ),
    ],
)
def test_redistribution_moves_the_tensor_and_its_gradient_back(
    held: tuple[Any, ...], wanted: tuple[Any, ...], kinds: list[Any]
) -> None:
    grid = logical_mesh((4,), ideal_machine(1e12, bandwidth=1.0, latency=0.0))
    there, back = (TensorLayout.placed(at, 2) for at in (held, wanted))
    moves = redistribution(there, back, 400.0, grid, "x")
    assert [(m.when, m.kind, m.seconds) for m in moves] == kinds


def test_a_slice_comes_before_a_gather_and_leaves_it_less() -> None:
    grid = logical_mesh((2, 4), ideal_machine(1e12, bandwidth=1.0, latency=0.0))
    held, wanted = (TensorLayout.placed(at, 2) for at in ((0, None), (None, 1)))
    there = [m for m in redistribution(held, wanted, 800.0, grid, "x") if m.when == "forward"]
    assert [(m.kind, m.bytes, m.seconds) for m in there] == [
        ("slice", 100.0, 0.0),
        ("all_gather", 200.0, 100.0),
    ]


def test_an_all_reduce_over_two_levels_crosses_the_outer_one_with_a_part() -> None:
    grid = logical_mesh((2, 4), ideal_machine(1e12, bandwidth=(1.0, 10.0), latency=(0.5, 0.25)))
    inside, outside = 2 * (3 / 4 * 80 / 10 + 3 * 0.25), 2 * (1 / 2 * 20 / 1 + 0.5)
    assert grid.seconds("all_reduce", 80.0, (0, 1)) == pytest.approx(inside + outside, rel=1e-12)


def test_equal_links_make_one_ring() -> None:
    grid = logical_mesh(8, ideal_machine(1e12, bandwidth=2.0, latency=0.5))
    assert grid.seconds("all_gather", 80.0, (0, 1, 2)) == pytest.approx(
        7 / 8 * 80 / 2 + 7 * 0.5, rel=1e-12
    )


@pytest.mark.parametrize("form, used", [("((1,1),(1,1))", 1), ("((2,2),(2,2))", 4)])
def test_an_addition_takes_as_long_as_its_memory_traffic(form: str, used: int) -> None:
    machine, tensors = (
        ideal_machine(1e12, 1e9, 1e-6, 1e9),
        [OperatorTensor(n, ("rows", "width")) for n in "abc"],
    )
    dims = OperatorDim("rows", 8, 8), OperatorDim("width", 16, 16)
    operator, grid = (
        Operator("add", "Add", dims, tuple(tensors[:2]), tensors[2]),
        logical_mesh(4, machine),
    )
    cost = operator_cost(
        operator, option(operator, grid, form), grid, machine, TensorBytes(element=2)
    )
    # Two inputs are read twice and their gradients written, the output written and its gradient
    # read.
    assert cost.compute == pytest.approx((2 * 3 + 2) * 8 * 16 * 2 / used / 1e9, rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_every_input_that_an_operator_makes_has_its_edge(fused: bool) -> None:
    graph = model_graph(GPT, 2, 16, fused)
    wanted = {
        (op.name, t.name)
        for op in graph.operators[1:]
        for t in op.inputs
        if t.kind in ("activation", "residual")
    }
    assert {(graph.operators[e.target].name, e.target_tensor.name) for e in graph.edges} == wanted
    names = [op.name for op in graph.operators]
    layers = {
        (names[e.source], names[e.target]): e.num_layers
        for e in graph.edges
        if e.num_layers != GPT.layers
    }
    assert layers == {
        ("embedding", "attention_norm"): 1,
        ("mlp.down", "attention_norm"): 2,
        ("mlp_norm", "attention_norm"): 2,
        ("mlp.down", "final_norm"): 1,
        ("mlp_norm", "final_norm"): 1,
        ("final_norm", "head"): 1,
        ("head", "loss"): 1,
    }
    residual = [
        names[e.source]
        for e in graph.edges
        if (names[e.target], e.target_tensor.name) == ("mlp_norm", "residual")
    ]
    assert residual == ["attention_norm"]


@pytest.mark.parametrize("runs", [(1, 1, 1), (2, 1)])
def test_layers_with_a_choice_of_their_own_cost_the_same_together(runs: tuple[int, ...]) -> None:
    shared, own = (
        priced_graph(model_graph(GPT, 4, 16, True, of), 4).problem for of in (None, runs)
    )
    picked = solve_by_dynamic_programming(shared)
    block = picked[1:-3]
    unrolled = (picked[0], *block * len(runs), *picked[-3:])
    assert own.total_cost(unrolled) == pytest.approx(shared.total_cost(picked), rel=1e-12)
    assert own.total_bytes(unrolled) == pytest.approx(shared.total_bytes(picked), rel=1e-12)
    best = own.total_cost(solve_by_dynamic_programming(own))
    assert best <= shared.total_cost(picked) * (1 + 1e-12)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(20), deadline=None)
def test_the_problem_is_the_sum_of_what_its_operators_and_tensors_cost(seed: int) -> None:
    grouped = GPT.model_copy(update={"kv_heads": 2, "mlp": "swiglu"})
    priced = priced_graph(model_graph(grouped, 4, 16), 4)
    rng = np.random.default_rng(seed)
    picked = tuple(int(rng.integers(len(options))) for options in priced.options)
    rows = [
        cost[i].seconds * op.num_layers
        for cost, i, op in zip(priced.costs, picked, priced.graph.operators)
    ]
    moved = [
        edge.num_layers * move.seconds
        for edge in priced.graph.edges
        if edge.source_tensor.kind == "activation"
        for move in priced.moves(edge, picked)
    ]
    assert priced.problem.total_cost(picked) == pytest.approx(sum(rows) + sum(moved), rel=1e-12)


def test_grouped_heads_move_fewer_keys_and_values() -> None:
    grouped = GPT.model_copy(update={"kv_heads": 2})
    graph = layer_graph(grouped, 2, 16)
    sizes = {
        edge.target_tensor.name: graph.operators[edge.target].size(edge.target_tensor)
        for edge in graph.edges
    }
    assert (sizes["query"], sizes["key"], sizes["value"]) == (2 * 16 * 64, 2 * 16 * 32, 2 * 16 * 32)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_the_whole_model_are_the_shape_s_matrices(tied: bool) -> None:
    graph = model_graph(GPT.model_copy(update={"tied": tied}), 1, 32)
    counted = sum(
        o.num_layers * o.size(t) for o in graph.operators for t in o.inputs if t.kind == "parameter"
    )
    blocks = 3 * (4 * 64 * 64 + 2 * 64 * 256 + 2 * 64)
    assert counted == blocks + 64 + 512 * 64 * (1 if tied else 2)


# --- the exact choice -----------------------------------------------------------------------------


def brute(problem: StrategyProblem) -> tuple[Any, ...] | None:
    legal = (
        picked
        for picked in itertools.product(*(range(len(cost)) for cost in problem.node_costs))
        if problem.memory_limit is None or problem.total_bytes(picked) <= problem.memory_limit
    )
    return min(legal, key=problem.total_cost) if legal else None


@st.composite
def problems(draw: Callable[..., Any], chain: bool) -> StrategyProblem:
    count = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [int(rng.integers(1, 5)) for _ in range(count)]
    pairs = [(i, i + 1) for i in range(count - 1)]
    if not chain:
        pairs += [
            (i, j) for i in range(count) for j in range(count) if i != j and rng.random() < 0.3
        ]
    # Whole numbers and few of them: equal rows, equal columns and equal optima all occur.
    ceiling = draw(st.sampled_from([3, 1000]))
    edges = tuple(
        ReshardingEdge(i, j, rng.integers(0, ceiling, (sizes[i], sizes[j])).astype(float))
        for i, j in pairs
    )
    costs, held = (
        tuple(rng.integers(0, ceiling, n).astype(float) for n in sizes) for _ in range(2)
    )
    return StrategyProblem(costs, edges, held)


@given(problems(chain=True))
@settings(max_examples=examples(40), deadline=None)
def test_dynamic_and_integer_programming_find_the_optimum_of_a_chain(
    problem: StrategyProblem,
) -> None:
    best = problem.total_cost(brute(problem))
    assert problem.total_cost(solve_by_dynamic_programming(problem)) == best
    assert problem.total_cost(solve_by_integer_programming(problem)) == best


@given(problems(chain=False), st.floats(0.0, 1.0))
@settings(max_examples=examples(60), deadline=None)
def test_integer_programming_finds_the_optimum_of_a_graph_within_a_limit(
    problem: StrategyProblem, tightness: float
) -> None:
    least, most = (sum(f(size) for size in problem.node_bytes) for f in (np.min, np.max))
    limited = StrategyProblem(
        problem.node_costs,
        problem.edges,
        problem.node_bytes,
        float(max(1, round(least + tightness * (most - least)))),
    )
    for asked in (problem, limited):
        picked = solve_by_integer_programming(asked)
        assert asked.total_cost(picked) == asked.total_cost(brute(asked))
        assert asked.memory_limit is None or asked.total_bytes(picked) <= asked.memory_limit


@pytest.mark.parametrize("rate", [1e8, 1e10, 1e12])
def test_a_priced_block_with_its_residual_is_solved_as_brute_force_does(rate: float) -> None:
    machine = ideal_machine(1e12, rate, 1e-6, 1e11)
    priced = priced_graph(layer_graph(GPT, 1, 32, fused=True), 2, machine)
    best = brute(priced.problem)
    assert priced.problem.total_cost(solve_by_integer_programming(priced.problem)) == pytest.approx(
        priced.problem.total_cost(best), rel=1e-12
    )
    tight = replace(priced.problem, memory_limit=0.75 * priced.problem.total_bytes(best))
    assert tight.total_cost(solve_by_integer_programming(tight)) == pytest.approx(
        tight.total_cost(brute(tight)), rel=1e-12
    )


@pytest.mark.parametrize("ranks", [2, (2,)])
@pytest.mark.parametrize("rate", [1e8, 1e10, 1e12])
def test_a_priced_branch_is_solved_as_brute_force_does(
    ranks: int | tuple[int], rate: float
) -> None:
    machine = ideal_machine(1e12, rate, 1e-6, 1e11)
    parts: tuple[tuple[Literal["attention", "mlp"], bool], ...]
    parts = (("mlp", False), ("attention", True), ("attention", False))
    for part, fused in parts:
        priced = priced_graph(branch_graph(GPT, 2, 16, fused, part), ranks, machine)
        picked = solve_by_dynamic_programming(priced.problem)
        assert priced.problem.total_cost(picked) == pytest.approx(
            priced.problem.total_cost(brute(priced.problem)), rel=1e-12
        )


def test_the_sum_of_the_rows_is_the_total() -> None:
    found = choose_strategies(GPT, 64, 4, ideal_machine(1e12, 1e9, 1e-6, 1e11), sequence_length=16)
    total = sum(row.seconds * row.times for row in found.rows)
    total += sum(between.seconds * between.times for between in found.redistributions)
    assert found.seconds == pytest.approx(total, rel=1e-12)
    assert found.bytes == pytest.approx(sum(row.bytes * row.times for row in found.rows), rel=1e-12)


# --- text -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 4096), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_strategy_survives_writing_and_reading(parts: list[list[int]]) -> None:
    form = tuple(map(tuple, parts))
    assert parse_strategy(strategy_text(form), "x") == form
    assert read_strategies(write_strategies({"blocks.*.mlp.up": form})) == {"blocks.*.mlp.up": form}


@pytest.mark.parametrize(
    "text, form",
    [
        ("((4,1),(1,1))", ((4, 1), (1, 1))),
        (" ( (4, 1) , (1,1), ) ", ((4, 1), (1, 1))),
        ("((2,),)", ((2,),)),
        ("((4))", ((4,),)),
    ],
)
def test_legal_text(text: str, form: tuple[Any, ...]) -> None:
    assert parse_strategy(text, "x") == form


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "()",
        "(())",
        "((4,1)",
        "((4,1),(1,1)))",
        "((4,-1),(1,1))",
        "((0,1),)",
        "((4.0,1),)",
        "((a,1),)",
        "((4,,1),)",
        "((4,1)(1,1))",
        "__import__('os')",
        "((1,1),(1,1))\n; x",
        "((٤,1),)",
        None,
        [[4, 1], [1, 1]],
        "(" * 5000,
        "((1" + "0" * 50 + ",1),)",
    ],
)
def test_illegal_text_is_refused_with_the_legal_form(text: list[list[int]] | str | None) -> None:
    with pytest.raises(
        PlanError,
        match=r"strategy\.operators\.head: is .*legal: a tuple of tuples.*\(\(4,1\),\(1,1\)\)",
    ):
        read_strategies({"head": text})


# --- refusals -------------------------------------------------------------------------------------


def test_a_limit_that_nothing_meets_names_the_least() -> None:
    least = choose_strategies(GPT, 64, 4, MACHINE, memory=2**30).bytes
    with pytest.raises(
        PlanError, match=r"memory: is 9\.537e-07 GiB a rank, but the least .* GiB or more"
    ) as e:
        choose_strategies(GPT, 64, 4, MACHINE, memory=1024.0)
    said = float(str(e.value).split("takes ")[1].split(" GiB")[0]) * 2**30
    assert said <= least * 1.001
    # And the least itself is met.
    assert choose_strategies(GPT, 64, 4, MACHINE, memory=said * 1.001).bytes <= said * 1.001


def test_ranks_that_divide_nothing_are_refused_with_what_could_be_split() -> None:
    with pytest.raises(
        PlanError,
        match=r"ranks: is 7, which no operator can be split over .*attention\.qkv inner 64",
    ):
        choose_strategies(GPT, 64, 7, MACHINE)


@pytest.mark.parametrize(
    "call, message",
    [
        ({"tokens": 0}, "tokens: is 0"),
        ({"tokens": 10, "sequence_length": 4}, "legal: a multiple of 4"),
        ({"ranks": 0}, "ranks: is 0"),
        ({"ranks": (2, 0)}, "ranks: is"),
        ({"ranks": ()}, "ranks: is"),
        ({"ranks": 512}, "ranks: is 512; legal: up to 256, or a grid"),
        ({"memory": 0.0}, "memory: is 0"),
        ({"memory": float("nan")}, "memory: is nan"),
        (
            {"machine": ideal_machine(1e12, (1e9, 1e9), 1e-6)},
            r"machine.links: has 2 values for 1 axes",
        ),
        (
            {"fixed": {"blocks.3.nose": ((1,),)}},
            r"operators.blocks.3.nose: names no operator of the model; did you mean blocks",
        ),
        (
            {"fixed": {"head": ((3, 1), (1, 1))}},
            r"operators.head: is \(\(3,1\),\(1,1\)\) for head; legal: \(\(1",
        ),
    ],
)
def test_what_is_impossible_is_refused(call: dict[str, Any], message: str) -> None:
    call = {"tokens": 64, "ranks": (2,), "machine": MACHINE} | call
    with pytest.raises(PlanError, match=message):
        choose_strategies(GPT, **call)


@pytest.mark.parametrize(
    "rates", [(0, 1, 1), (1, -1, 1), (1, 1, -1), (float("nan"), 1, 1), (1, 1, float("inf"))]
)
def test_a_machine_has_positive_rates(rates: tuple[Any, ...]) -> None:
    with pytest.raises(PlanError, match="machine"):
        ideal_machine(*rates)


def test_the_solver_is_imported_only_when_it_is_asked() -> None:
    program = "import sys, workbench.planner.autoshard; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
