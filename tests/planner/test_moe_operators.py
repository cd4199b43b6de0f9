"""MoE layers among the operators whose strategies are searched: their form, price and edges; the
choice against brute force; and what is written, against its estimate and one device.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from tests.planner.drawn_graphs import least_by_brute_force
from workbench.costmodel.rank_passes import rank_passes
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape, shape_from
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.plan.operators.strategy_form import strategy_grid
from workbench.plan.rules.strategy.operator_rules import sites
from workbench.plan.rules.supported import require, unsupported
from workbench.plan.schema import Plan
from workbench.planner.autoshard import (
    OperatorPlan,
    TensorBytes,
    choose_for_plan,
    choose_strategies,
    ideal_machine,
    plan_with,
)
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.graph_pricing import GraphPricing, PricedGraph
from workbench.planner.autoshard.layer_operators import layer_graph, model_graph
from workbench.planner.autoshard.layers import feed_forward_operators
from workbench.planner.autoshard.machine_model import MachineModel
from workbench.planner.autoshard.operator_cost import OperatorCost
from workbench.planner.autoshard.operator_splits import legal_strategies
from workbench.planner.autoshard.strategy_search.integer_program import solve_by_integer_programming
from workbench.planner.autoshard.strategy_search.series_parallel import solve_by_dynamic_programming
from workbench.planner.operator_plans.planned_workload import planned_workload

MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation")
MIXED: dict[str, Any] = {
    **LLAMA,
    "moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared": 2, "first_dense": 1},
}
PINS = {"blocks.*.mlp": "((1,),(2,))"}


def shape(written: dict[str, Any], **more: Any) -> Shape:
    return shape_from({**written, **more})


def priced(graph: OperatorGraph, ranks: int, machine: MachineModel) -> PricedGraph:
    return GraphPricing(logical_mesh(ranks, machine), machine, TensorBytes()).price(graph)


# --- the operator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_forms_and_their_places_on_the_grid_are_those_of_the_rules(ranks: int) -> None:
    own = shape(MIXED)
    (layer,) = [op for op in model_graph(own, 4, 16, True).operators if op.kind == "MoE"]
    site = sites(own, 4, ranks, 16)["blocks.1.mlp"]
    found = legal_strategies(layer, logical_mesh(ranks, ideal_machine(1e12, 1e9, 1e-6)))
    pairs = [(r, w) for r in (1, 2, 4) for w in (1, 2, 4, 8) if ranks % (r * w) == 0]
    assert sorted(one.form for one in found) == [((r,), (w,)) for r, w in pairs]
    for one in found:
        assert not [*site.faults(one.form, ranks)]
        if strategy_grid(ranks, [one.form]) != (ranks,):
            assert site.placement(one.form, strategy_grid(ranks, [one.form])) == one.placement


def costs(written: dict[str, Any]) -> dict[str, OperatorCost]:
    """Strategy -> cost of an MoE layer of 4 sequences of 16 tokens over 4 ranks."""
    machine = ideal_machine(1e12, 1e9, 0.0, 1e11)
    found = priced(layer_graph(shape(written), 4, 16, True), 4, machine)
    (at,) = [i for i, op in enumerate(found.graph.operators) if op.kind == "MoE"]
    return {own.text: cost for own, cost in zip(found.options[at], found.costs[at])}


def test_the_price_of_a_layer_by_hand() -> None:
    found = costs(MIXED)
    tokens, rows, hidden, experts, matrix = 64, 128, 32, 4, 32 * 32

    def gemm(m: float, n: float, k: float) -> float:
        return max(2 * m * n * k / 1e12, 2 * (m * n + m * k + n * k) / 1e11)

    def linear(m: float, n: float, k: float) -> float:
        return gemm(m, n, k) + gemm(m, k, n) + gemm(n, k, m)

    for form, r, w in (("((1,),(1,))", 1, 1), ("((4,),(1,))", 4, 1), ("((2,),(2,))", 2, 2)):
        t, width = tokens / r, 32 / w
        seconds = linear(t, experts, hidden) + 3 * linear(t, 2 * width, hidden)
        seconds += 3 * experts * linear(rows / r / experts, width, hidden)
        wide = (rows / r + 2 * t) * width  # of the routed experts and two shared ones
        seconds += 2 * (8 * wide + 8 * rows / r * hidden) / 1e11
        cost = found[form]
        assert cost.compute == pytest.approx(seconds, rel=1e-12)
        weights = experts * hidden + (experts + 2) * 3 * matrix / w
        assert cost.parameter_bytes == 16 * weights
        kept = t * hidden + 2 * rows / r * hidden + 3 * wide
        assert cost.activation_bytes == 2 * kept
    moved = Counter((m.when, m.tensor, m.ranks) for m in found["((2,),(2,))"].moves)
    assert moved == Counter(
        {
            ("forward", "output", 2): 1,
            ("forward", "aux loss", 2): 1,
            ("backward", "router's weight", 4): 1,
            ("backward", "experts' weights", 2): 1,
            ("backward", "shared experts' weights", 2): 1,
        }
    )


def test_a_capacity_bounds_the_rows_of_experts() -> None:
    moe = {"experts": 4, "top_k": 1, "ffn": 32, "capacity": 1.5, "auxiliary_loss": 0.0}
    bounded, free = (
        costs({**LLAMA, "moe": own})["((1,),(1,))"] for own in (moe, moe | {"capacity": None})
    )
    # 6 rows an expert of each of 4 sequences: 96 in place of 64.
    assert bounded.activation_bytes - free.activation_bytes == 2 * 32 * (2 * 32 + 3 * 32)
    assert not [m for m in costs({**LLAMA, "moe": moe})["((4,),(1,))"].moves if "aux" in m.tensor]


@pytest.mark.parametrize("first_dense", [0, 1, 2, 4])
def test_layers_with_and_without_experts_share_no_choice(first_dense: int) -> None:
    own = shape({**MIXED, "moe": {**MIXED["moe"], "first_dense": first_dense}})
    graph = model_graph(own, 2, 16, True)
    layers = Counter({op.kind: 0 for op in graph.operators})
    for op in graph.operators:
        layers[op.kind] += op.num_layers
    assert (layers["MoE"], layers["Activation"]) == (4 - first_dense, first_dense)
    wanted = {
        (op.name, t.name)
        for op in graph.operators[1:]
        for t in op.inputs
        if t.kind in ("activation", "residual")
    }
    wanted -= {("blocks.0.attention_norm", "residual")}  # before the first layer there is none
    assert {(graph.operators[e.target].name, e.target_tensor.name) for e in graph.edges} == wanted
    # A branch and the residual stream leave each layer but the embedding's, which has one.
    entries = [e for e in graph.edges if "attention_norm" in graph.operators[e.target].name]
    assert sum(e.num_layers for e in entries) == 1 + 2 * 3
    names = {module for op in graph.operators for module in op.modules}
    known = sites(own, 2, 2, 16)
    assert {n for name in names for n in _layers(name)} == {*known}


def _layers(name: str) -> list[str]:
    return [name.replace("*", str(layer)) for layer in range(4 if "*" in name else 1)]


def test_parameters_are_the_shapes_matrices() -> None:
    graph = model_graph(shape(MIXED), 1, 16)
    counted = sum(
        o.num_layers * o.size(t) for o in graph.operators for t in o.inputs if t.kind == "parameter"
    )
    attention = 32 * (2 * 32 + 2 * 16)
    dense, sparse = 3 * 32 * 48, 4 * 32 + (4 + 2) * 3 * 32 * 32
    assert counted == 4 * (attention + 2 * 32) + dense + 3 * sparse + 32 + 2 * 384 * 32


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    moe = {
        "experts": 4,
        "top_k": rng.choice((1, 2)),
        "ffn": rng.choice((8, 32)),
        "shared": rng.choice((0, 2)),
    }
    machine = ideal_machine(1e12, 10 ** rng.uniform(8, 12), 1e-6, 1e11)
    graph = layer_graph(shape({**LLAMA, "moe": moe}), rng.choice((1, 2, 4)), 16, True)
    problem = priced(graph, 2, machine).problem
    best = least_by_brute_force(problem)
    for solve in (solve_by_dynamic_programming, solve_by_integer_programming):
        assert problem.total_cost(solve(problem)) == pytest.approx(best, rel=1e-12)
    tight = replace(
        problem, memory_limit=0.8 * problem.total_bytes(solve_by_dynamic_programming(problem))
    )
    within = least_by_brute_force(tight)
    assert tight.total_cost(solve_by_integer_programming(tight)) == pytest.approx(within, rel=1e-12)


def test_without_what_passes_from_a_layer_the_choice_is_worse() -> None:
    written = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 32}}
    graph = layer_graph(shape(written), 2, 16, True)
    mlp = [op.name for op in graph.operators].index("mlp")
    torn = OperatorGraph(graph.operators, tuple(e for e in graph.edges if e.source != mlp))
    machine = ideal_machine(1e11, 1e9, 0.0, 1e10)
    whole, other = (priced(each, 2, machine).problem for each in (graph, torn))
    best, found = map(solve_by_dynamic_programming, (whole, other))
    assert whole.total_cost(best) == pytest.approx(least_by_brute_force(whole), rel=1e-12)
    assert whole.total_cost(found) > whole.total_cost(best) * 1.01


# --- what is written ------------------------------------------------------------------------------


def estimated_calls(full: Any) -> Counter[tuple[Any, ...]]:
    """Collectives of a microbatch that the estimate counts: (kind, ranks, bytes, when), with the
    aux losses'.
    """
    w = planned_workload(full, [0])
    assert w.fixed.grid is not None
    found: Counter[tuple[Any, ...]] = Counter()
    for stage in rank_passes(w)[0]:
        for call, times in stage.calls.items():
            ranks = w.fixed.grid.ranks_over(call.axes)
            if call.dtype == "bf16":
                found[call.kind, ranks, call.bytes, call.action] += times
            elif call.bytes == 4:  # of each layer's aux loss, and one of the loss
                layers = full.shape.layers - full.shape.moe.first_dense
                found["aux", ranks] += times - times % layers
    return found


def searched_calls(found: OperatorPlan) -> Counter[tuple[Any, ...]]:
    """The same as the search prices them, sums of weights' gradients and of the loss apart."""
    moves = [(m, row.times) for row in found.rows for m in row.moves]
    moves += [(m, between.times) for between in found.redistributions for m in between.moves]
    counted: Counter[tuple[Any, ...]] = Counter()
    for move, times in moves:
        if move.tensor == "aux loss":
            counted["aux", move.ranks] += times
        elif not (move.kind == "slice" or "weight" in move.tensor or move.tensor in SUMS):
            when = "F" if move.when == "forward" else "B"
            counted[move.kind, move.ranks, move.bytes, when] += times
    return counted


SUMS = ("table", "statistics")
WRITTEN = {
    "free": {},
    "width": {"blocks.*.mlp": "((1,),(4,))"},
    "rows": {"blocks.*.mlp": "((4,),(1,))"},
    "both, beside tokens": {"blocks.*.mlp": "((2,),(2,))", "blocks.*.mlp_norm": "((1,4,1),(1,))"},
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("model", ["mixtral-8x7b", "tiny-moe"])
def test_collectives_are_those_of_the_written_plans_estimate(model: str, name: str) -> None:
    start = Plan.of(model, gpu="h100-sxm-80gb", gpus=4, strategy="ddp")
    start = start.replace(**{"strategy.operators": WRITTEN[name]})
    found = choose_for_plan(start.resolve())
    assert searched_calls(found) == estimated_calls(plan_with(start, found).resolve())


@pytest.mark.parametrize(("pins", "choices"), [({}, 2), ({"blocks.*.mlp": "((1,),(2,))"}, 4)])
def test_experts_spread_over_ranks_exchange_what_the_estimate_counts(
    pins: dict[str, str], choices: int
) -> None:
    start = Plan.of("mixtral-8x7b", gpu="h100-sxm-80gb", gpus=4, strategy="ddp")
    fields = {"strategy.operators": pins, "strategy.expert.size": 2, "model.moe.top_k": choices}
    start = start.replace(**{"model": start.resolve().shape.model_dump(), **fields})
    found = choose_for_plan(start.resolve(), 2)
    full = plan_with(start, found).resolve()
    require(full, "run")
    searched = Counter(
        {
            (m.when[0].upper(), m.ranks, m.bytes): 2 * row.times
            for row in found.rows
            for m in row.moves
            if m.kind == "all_to_all" and row.kind == "MoE"
        }
    )
    (stage,) = rank_passes(planned_workload(full, [0]))[0]
    estimated = {
        (c.action, c.group_size, c.bytes): n
        for c, n in stage.axis_calls.items()
        if c.bytes > 64  # what says how many rows come from each rank is not priced
    }
    assert searched and searched == estimated
    whole = choose_for_plan(start.replace(**{"strategy.expert.size": 1}).resolve(), 2)
    sizes = [next(r.bytes for r in each.rows if r.kind == "MoE") for each in (found, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    with pytest.raises(PlanError, match=r"strategy\.expert\.size: is 2, but operators leave 1"):
        choose_for_plan(start.resolve())


@pytest.mark.parametrize("fault", ["output", "aux loss"])
def test_a_sum_forgotten_in_the_price_shows(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    operator = feed_forward_operators.moe_operator

    def planted(*of: Any) -> Any:
        made = operator(*of)
        if fault == "aux loss":
            return replace(made, sums=())
        return replace(made, output=replace(made.output, dims=(*made.output.dims, "width")))

    monkeypatch.setattr("workbench.planner.autoshard.layers.block_operators.moe_operator", planted)
    with pytest.raises(AssertionError):
        test_collectives_are_those_of_the_written_plans_estimate(
            "mixtral-8x7b", "both, beside tokens"
        )


RUN = [
    name
    for name, entry in sorted(catalog.models().items())
    if entry.shape.moe and not any((entry.shape.mla, entry.shape.qk_norm, entry.shape.unmodelled))
]
"""Models of the catalog with experts that run."""


def test_models_with_experts_run() -> None:
    assert {"mixtral-8x7b", "mixtral-8x22b", "tiny-moe"} <= {*RUN}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gpus", [pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)] + [8])
@pytest.mark.parametrize("model", RUN)
def test_what_is_written_for_a_catalog_model_is_legal(model: str, gpus: int, mode: str) -> None:
    start = Plan.of(model, gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp")
    if mode == "sharding_propagation":
        start = start.replace(**{"strategy.operators": PINS})
    found = choose_for_plan(start.resolve(), mode=mode)
    full = plan_with(start, found).resolve()
    require(full, "run")
    assert full.strategy.tensor.ranks == gpus and not unsupported(full, "estimate")
    assert all(full.strategy.operators[p] == form for p, form in start.strategy.operators.items())


SHAPES: dict[str, dict[str, Any]] = {
    "shared, dense first": MIXED,
    "one choice, capacity, biases": {
        **LLAMA,
        "biases": "all",
        "moe": {"experts": 4, "top_k": 1, "ffn": 48, "capacity": 1.5},
    },
    "gpt, two dense": {
        **GPT,
        "moe": {"experts": 4, "top_k": 2, "ffn": 64, "first_dense": 2, "auxiliary_loss": 0.0},
    },
}


def written_with(name: str, ranks: int, seed: int, mode: str) -> Plan:
    """A plan whose strategies are the best on a drawn machine, without which small models stay
    unsharded.
    """
    rng, start = random.Random(seed), plan(1, 1, ranks, shape=SHAPES[name], layers=3)
    sequences = 2 * ranks
    found = choose_strategies(
        start.resolve().shape,
        16 * sequences,
        ranks,
        ideal_machine(1e9, 10 ** rng.uniform(8, 11), 0.0, 1e9),
        sequence_length=16,
        fused=True,
        mode=mode,
    )
    return plan_with(start, replace(found, sequences=sequences))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_equals_one_device(name: str, ranks: int, mode: str, seed: int) -> None:
    built = written_with(name, ranks, seed, mode)
    answer = verify(built, "fp64")
    assert answer["passed"], answer
    split = {form for form in built.strategy.operators.values() if "2" in form or "4" in form}
    assert split and Plan.model_validate(built.model_dump()).resolve()


def test_latent_attention_is_refused_by_name() -> None:
    start = Plan.of("deepseek-v2-lite", gpu="h100-sxm-80gb", gpus=2, strategy="ddp")
    with pytest.raises(PlanError, match=r"model\.mla.* does not run; legal for operator"):
        choose_for_plan(start.resolve())
