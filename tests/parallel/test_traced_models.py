"""Language models that others wrote, traced and sharded by operators, equal one device."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel import users_language_models
from tests.parallel.test_operators_python import users
from workbench import verbs
from workbench.engine.python_model.check_python_model import check_python_model
from workbench.engine.python_model.trace_graph import trace_graph
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.models.traced.export_trace import trace_module
from workbench.plan.operators.layer_patterns import joined_layers
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.plan.operators.strategy_form import read_strategies, strategy_text
from workbench.plan.operators.traced.graph_placement import NodeShards, place_graph, unruled
from workbench.plan.operators.traced.node_factors import FactoredGraph, factor_graph
from workbench.plan.operators.traced.stage_cuts import GraphStage, graph_stages, multiply_adds
from workbench.plan.operators.traced.traced_graph import TracedNode
from workbench.plan.operators.traced.traced_operators import traced_operators
from workbench.plan.operators.traced.traced_sites import named_placements, traced_sites
from workbench.plan.schema import Plan
from workbench.planner.autoshard import ideal_machine
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.operator_splits import legal_strategies
from workbench.planner.autoshard.strategy_choice import choose_in_graph
from workbench.rehearsal.rehearse import rehearse

MODELS = ("encoder_lm", "tied_gpt", "einsum_moe", "where_moe", "rotary_lm")
LAYERS = "encoder.layers.*"
ENCODER = {
    "embed": "((2,1),(1,))",
    f"{LAYERS}.self_attn.linear": "((1,1),(1,2))",
    f"{LAYERS}.self_attn.linear_2": "((1,2),(2,1))",
    f"{LAYERS}.linear1": "((1,1),(1,2))",
    f"{LAYERS}.linear2": "((1,2),(2,1))",
    "head": "((1,1),(1,2))",
}
GPT = {
    "wte": "((2,1),(1,))",
    "h.*.attn.c_attn": "((1,1),(1,2))",
    "h.*.attn.c_proj": "((1,2),(2,1))",
    "h.*.c_fc": "((1,1),(1,2))",
    "h.[01].c_proj": "((1,2),(2,1))",
    "lm_head": "((1,1),(1,2))",
}
MIXED = {
    "wte": "((1,2),(1,))",
    "h.0.attn.matmul": "((1,2,1,1),(1,2,1,1))",
    "h.0.attn.softmax": "((2,1),)",
    "h.1.c_fc": "((1,2),(2,1))",
    "h.1.mul_4": "((1,2),(1,2))",
}
EXPERTS = {"moe.einsum_3": "((1,2,1,1),(2,1,1))", "moe.einsum_4": "((1,2,1,1),(2,1,1))"}
PAIRED = {"moe.experts.*.0.*": "((1,1),(1,2))", "moe.experts.*.2.*": "((1,2),(2,1))"}
GRID = {
    f"{LAYERS}.self_attn.linear": "((2,1),(1,2))",
    f"{LAYERS}.self_attn.linear_2": "((2,2),(2,1))",
    f"{LAYERS}.linear1": "((1,1),(1,4))",
    "head": "((2,1),(1,2))",
}


def on(
    factory: str,
    tensor: int = 1,
    data: int = 1,
    operators: dict[str, str] | None = None,
    changes: dict[str, Any] | None = None,
    **args: Any,
) -> Plan:
    """A user's language model on tensor x data ranks."""
    model = {"model.python": f"tests.parallel.users_language_models:{factory}"}
    return users(tensor, data, operators, model | (changes or {}), **args)


def equal(plan: Plan) -> None:
    answer = verify(plan, "fp64", allow_code=True)
    assert answer["passed"], answer


def graph_of(factory: str) -> OperatorGraph:
    return traced_operators(factor_graph(trace_graph(on(factory), True, 4).graph))


@pytest.mark.parametrize(
    "plan",
    [
        on("encoder_lm", data=2),
        on("encoder_lm", 2, operators=ENCODER),
        on("tied_gpt", 2, operators=GPT),
        pytest.param(on("tied_gpt", 2, operators=MIXED), marks=pytest.mark.slow),
        pytest.param(on("encoder_lm", 4, operators=GRID), marks=pytest.mark.slow),
        on("einsum_moe", 2, operators=EXPERTS),
        on("where_moe", 2, operators=PAIRED),
        pytest.param(
            on("encoder_lm", 2, operators=ENCODER, batch_first=False, norm_first=True),
            marks=pytest.mark.slow,
        ),
        on("rotary_lm", 2, operators={"layers.*.kv": "((1,1),(1,2))", "embed": "((1,1),(2,))"}),
    ],
    ids=[
        *("dropout", "encoder", "tied", "mixed", "grid"),
        *("expert", "experts", "transposed", "rotary"),
    ],
)
def test_fp64(plan: Plan) -> None:
    equal(plan)


FOLDED = {
    "qkv": "((1,1),(1,3))",
    "bmm": "((1,3,1,1),(1,3,1,1))",
    "masked_fill": "((1,3),(1,))",
    "softmax": "((1,3),)",
    "up": "((1,1),(1,3))",
    "silu": "((1,3),)",
    "add_2": "((1,3),(1,3))",
}
WITHOUT_ROWS = {
    "bmm": "((3,1,1),(3,1,1))",
    "masked_fill": "((3,),)",
    "softmax": "((3,),)",
    "silu": "((3,),)",
    "add_2": "((3,),(3,))",
}
"""Strategies that split no sequences, on three ranks; and how one sequence lets them be written."""


def of_batch(sequences: int, length: int = 16) -> dict[str, Any]:
    batch = {"training.micro_batch": sequences, "training.global_batch": 6}
    return batch | {"training.sequence_length": length}


def folded(sequences: int, operators: dict[str, str], **more: Any) -> Plan:
    changes = of_batch(sequences) | more
    return on("folded_lm", 3, operators=operators, changes=changes, width=48, heads=3)


@pytest.mark.parametrize(
    "factory",
    [
        "folded_lm",
        "tied_gpt",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("encoder_lm", "rotary_lm")),
    ],
)
def test_dimensions_are_those_of_any_batch(factory: str) -> None:
    def dims(sequences: int, length: int = 16) -> dict[str, Any]:
        graph = trace_graph(on(factory, changes=of_batch(sequences, length)), True).graph
        return {name: site.dims for name, site in traced_sites(factor_graph(graph)).items()}

    assert dims(1) == dims(2) == dims(3) == dims(1, length=1) == dims(2, length=1)


@pytest.mark.parametrize("operators", [FOLDED, WITHOUT_ROWS], ids=["whole", "without rows"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_strategy_is_legal_at_any_batch(sequences: int, operators: dict[str, str]) -> None:
    equal(folded(sequences, operators))


def test_without_rows_nothing_is_split_by_them() -> None:
    def shards(operators: dict[str, str]) -> dict[str, NodeShards]:
        factored = factor_graph(trace_graph(folded(3, FOLDED), True).graph)
        return place_graph(factored, named_placements(factored, operators, 3, (3,)), (3,))

    whole = FOLDED | {"bmm": "((3,1,1,1),(3,1,1,1))"}  # three numbers of four are the first three
    assert shards(WITHOUT_ROWS) == shards({name: whole[name] for name in WITHOUT_ROWS})


@pytest.mark.slow
@pytest.mark.parametrize("searched", [1, 2])
def test_what_the_search_finds_is_legal_at_any_batch(searched: int) -> None:
    graph = traced_operators(factor_graph(trace_graph(folded(searched, FOLDED), True).graph))
    forms = choose_in_graph(graph, 3, ideal_machine(1e9, 1e9, 0.0, 1e9)).forms
    for sequences in (1, 2, 3):
        equal(folded(sequences, forms))
        pinned = choose_in_graph(
            traced_operators(factor_graph(trace_graph(folded(sequences, FOLDED), True).graph)),
            3,
            ideal_machine(1e9, 1e9, 0.0, 1e9),
            fixed=read_strategies(forms),
        )
        assert pinned.forms == forms


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero(zero: int) -> None:
    equal(on("encoder_lm", 2, 2, ENCODER, {"strategy.data.zero": zero}))


def pipelined(factory: str, tensor: int = 1, data: int = 1, **more: Any) -> Plan:
    """On two pipeline ranks."""
    operators, changes = more.pop("operators", None), more.pop("changes", {})
    pipeline = {"strategy.pipeline.size": 2, "cluster.gpus": 2 * tensor * data}
    return on(factory, tensor, data, operators, pipeline | changes, **more)


INTERLEAVED = {"strategy.pipeline.schedule": "interleaved", "strategy.pipeline.chunks": 2}


@pytest.mark.parametrize(
    "plan",
    [
        pipelined("encoder_lm"),
        pipelined("tied_gpt"),
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                pipelined("encoder_lm", changes=INTERLEAVED, layers=4),
                pipelined("rotary_lm"),
                pipelined("where_moe"),
                pipelined("encoder_lm", 2, operators=ENCODER),
                pipelined("encoder_lm", 2, operators={"embed": "((1,1),(2,))"}),
                pipelined("tied_gpt", 2, operators=GPT),
                pipelined("tied_gpt", data=2, changes={"strategy.data.zero": 3}),
                pipelined("encoder_lm", data=2, changes={"strategy.data.zero": 1}),
            )
        ),
    ],
    ids=[
        *("encoder", "tied", "interleaved", "rotary", "experts"),
        *("tensor", "rows", "tied-tensor", "tied-zero-3", "zero-1"),
    ],
)
def test_stages(plan: Plan) -> None:
    equal(plan)


def _parameters(factored: FactoredGraph, stage: GraphStage) -> set[str]:
    names = factored.graph.parameters
    return {names[r.source] for n in stage.nodes for r in n.inputs if r.source in names}


def _multiply_adds(node: TracedNode) -> int:
    """Of a layer whose result is [tokens, columns]: inner dims are 32, but for `h.*.c_proj`."""
    if node.op not in ("addmm", "linear"):
        return 0
    inner = 128 if node.module.endswith(".c_proj") and ".attn." not in node.module else 32
    return math.prod(node.outputs[0].shape) * inner


def test_stages_are_cut_where_one_tensor_passes_and_balanced() -> None:
    torch.manual_seed(0)
    model = users_language_models.tied_gpt(layers=6).train()
    graph, _ = trace_module(model, 2, 16, torch.float32, with_loss=False)
    factored = factor_graph(graph)
    stages = graph_stages(factored, place_graph(factored, {}, ()), 3, "torch.float32")
    assert [stage.read for stage in stages[1:]] == [stage.written for stage in stages[:-1]]
    weights = sum(len(_parameters(factored, stage)) for stage in stages)
    assert weights == len([*model.named_parameters()]) + 1  # the tied one is on two
    products = [sum(map(_multiply_adds, stage.nodes)) for stage in stages]
    assert max(products) < 1.1 * sum(products) / 3
    with pytest.raises(PlanError, match=r"makes 99 stages, but one tensor .* legal: up to \d+"):
        graph_stages(factored, place_graph(factored, {}, ()), 99, "torch.float32")


def test_attention_counts_as_its_two_products() -> None:
    model = users_language_models.encoder_lm(width=32, heads=4, layers=1, dropout=0.0).train()
    graph, _ = trace_module(model, 2, 16, torch.float32, with_loss=False)
    (attention,) = (node for node in graph.nodes if node.op == "scaled_dot_product_attention")
    assert multiply_adds(factor_graph(graph), attention) == 2 * (2 * 16 * 16 * 32)


@pytest.mark.slow
@pytest.mark.parametrize("factory", MODELS)
def test_what_the_search_finds(factory: str) -> None:
    forms = choose_in_graph(graph_of(factory), 4, ideal_machine(1e9, 1e9, 0.0, 1e9)).forms
    assert any(set(form) & set("24") for form in forms.values())
    equal(on(factory, 4, 1, forms, {"training.micro_batch": 4}))


@pytest.mark.slow
@pytest.mark.parametrize("factory", MODELS)
def test_any_legal_strategies(factory: str) -> None:
    mesh = logical_mesh(4, ideal_machine(1e9, 1e9, 0.0, 1e9))
    draw = random.Random(factory)
    forms = {
        operator.name: strategy_text(draw.choice(legal_strategies(operator, mesh)).form)
        for operator in graph_of(factory).operators
        if draw.random() < 0.6
    }
    equal(on(factory, 4, 1, forms, {"training.micro_batch": 4}))


def test_the_verb_finds_strategies_and_runs_no_code_unasked() -> None:
    with pytest.raises(PlanError, match="--allow-code"):
        verbs.operators(on("encoder_lm", data=2), 2)
    plan = on("encoder_lm", data=2).replace(
        **{"cluster.gpu": "h100-sxm-80gb", "model.args": {"width": 2048, "heads": 16}}
    )
    found = verbs.operators(plan, 2, allow_code=True)
    assert {"embed", f"{LAYERS}.self_attn.linear", f"{LAYERS}.linear1", "loss"} <= {*found.forms}
    assert found.source == "estimated"
    assert "layers.*.linear1" in found.reason and "layers.0" not in found.reason
    assert {row.operator: row.times for row in found.rows}[f"{LAYERS}.linear1"] == 2


def test_data_dependent_control_flow_is_named_and_still_runs_without_strategies(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PlanError, match=r"users_language_models.py:\d+: if len\(rows\) > 0") as it:
        check_python_model(on("nonzero_moe", 2, operators={"head": "((1,1),(1,2))"}), True)
    assert "data parallelism and ZeRO run it" in str(it.value)
    assert capfd.readouterr().err == ""  # torch's own log says less
    equal(on("nonzero_moe", data=2, changes={"strategy.data.zero": 3}))


def test_shapes_that_values_decide_are_named_and_still_run_without_strategies() -> None:
    plan = on("unguarded_moe", data=2)
    with pytest.raises(PlanError, match=r"traced: users_language_models.py:\d+ \(nonzero\) has"):
        check_python_model(on("unguarded_moe", 2, operators={"head": "((1,1),(1,2))"}), True)
    with pytest.raises(PlanError, match=r"rehearsed: .*:\d+: rows = torch.nonzero\(chosen"):
        rehearse(plan, allow_code=True)
    equal(plan)


class Positions(nn.Module):
    """Drops positions, which all sequences share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(260, 8), nn.Linear(8, 260)
        self.places = nn.Parameter(torch.zeros(16, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = nn.functional.dropout(self.places, 0.1, self.training)
        logits: torch.Tensor = self.head(self.embed(tokens) + places)
        return logits


class Verbose(Positions):
    """Raises an error as long as a file."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("why " * 10_000 + "\n")


def test_what_a_module_says_when_it_is_traced_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_language_models, "encoder_lm", Verbose)
    with pytest.raises(PlanError, match=r"why \.\.\. .* characters left out") as it:
        check_python_model(on("encoder_lm", 2, operators={"head": "((1,1),(1,2))"}), True)
    said = str(it.value)
    assert len(said) < 1200 and "data parallelism" not in said and "cannot be traced" not in said
    assert f"its forward fails: {__file__}:" in said and "for tokens [2, 16]" in said


class Misshapen(Positions):
    """Multiplies shapes that do not fit."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed(tokens)
        return embedded @ torch.ones(3, 3)


def test_shapes_that_do_not_fit_are_not_said_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_language_models, "encoder_lm", Misshapen)
    with pytest.raises(PlanError, match=r"@ torch.ones.*; if it runs on one device, data para"):
        check_python_model(on("encoder_lm", 2, operators={"head": "((1,1),(1,2))"}), True)


def test_dropout_that_sequences_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_language_models, "encoder_lm", Positions)
    for sequences in (1, 2):
        changes = {"training.micro_batch": sequences}
        with pytest.raises(PlanError, match="has no dimension of sequences"):
            check_python_model(on("encoder_lm", data=2, changes=changes), True)


class Counting(Positions):
    """Counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


def test_a_buffer_that_forward_writes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_language_models, "encoder_lm", Counting)
    with pytest.raises(PlanError, match=r"model.python: its forward writes the buffer calls"):
        check_python_model(on("encoder_lm", 2, operators={"head": "((1,1),(1,2))"}), True)


class Rolled(nn.Module):
    """Calls an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(260, 8), nn.Linear(8, 260)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens).roll(1, 1))
        return logits


def test_an_operator_without_a_rule_is_named_and_runs_on_replicated_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(users_language_models, "encoder_lm", Rolled)
    (said,) = unruled(factor_graph(trace_graph(on("encoder_lm"), True, 4).graph))
    assert "roll (roll, test_traced_models.py:" in said
    equal(on("encoder_lm", 2, operators={"embed": "((1,1),(2,))", "head": "((2,1),(1,1))"}))


def test_masks_have_the_rate_and_differ_between_steps_and_operators() -> None:
    from workbench.models.counter_dropout import SampleIndices
    from workbench.parallel.operators.factor_redistribution import FactorGrid
    from workbench.parallel.operators.sharded_dropout import ElementIds, dropout
    from workbench.plan.operators.traced.node_factors import TensorFactors

    samples, ones = SampleIndices(), torch.ones(8, 64, 32)
    factors = TensorFactors(((8,), (64,), (32,)), (0, 1, 2))
    ids = ElementIds(factors, (), FactorGrid(), 0, samples, torch.device("cpu"))
    first, other = (dropout(ones, ids, 0.1, name, 0) for name in ("a", "b"))
    again = dropout(ones, ids, 0.1, "a", 0)
    samples.start_step(8, 8)
    later = dropout(ones, ids, 0.1, "a", 0)
    assert first.equal(again)
    assert abs(float((first == 0).double().mean()) - 0.1) < 0.01
    for another in (other, later):
        assert 0.15 < float(((first == 0) != (another == 0)).double().mean()) < 0.21


def test_layers_that_repeat_are_one_pattern_where_it_matches_nothing_else() -> None:
    forms = {"h.0.c": "((1,),)", "h.1.c": "((1,),)", "h.0.a": "((1,),)", "h.1.a": "((2,),)"}
    assert joined_layers(forms) == {"h.*.c": "((1,),)", "h.0.a": "((1,),)", "h.1.a": "((2,),)"}
    nested = forms | {"h.0.attn.c": "((2,),)"}
    assert joined_layers(nested)["h.0.c"] == "((1,),)"
