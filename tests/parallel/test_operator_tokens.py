"""Operators split by tokens: sequence parallelism (2205.05198) written as operator strategies."""

import random
from typing import Any

import pytest

from tests.parallel.operator_strategies import drawn_form, sequence_parallel
from tests.parallel.small import GPT, LLAMA
from tests.parallel.test_operators import collectives, equal, failure, on
from workbench.errors import PlanError
from workbench.parallel import apply_strategy
from workbench.parallel.operators import operator_forward
from workbench.parallel.operators.apply_operators import operator_reduction_axes
from workbench.plan.operators.operator_sites import OUTPUT
from workbench.plan.rules.strategy.operator_rules import placements, problems, sites
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.rehearsal.rehearse import rehearse

DROPOUT = {"training.dropout": 0.2}
TOKENS, TOKENS_4 = "((1,2,1),(1,1))", "((1,4,1),(1,1))"
HEADS = "((1,2,1,1),(1,2,1,1),(1,2,1,1))"
ULYSSES = {
    "embedding.tokens": "((1,1),(1,2))",
    "blocks.*.*_norm": "((1,2,1),(1,))",
    "blocks.*.attention.[qkvo]": TOKENS,
    "blocks.*.attention.attend": HEADS,
    "blocks.*.mlp.up": TOKENS,
    "blocks.*.mlp.down": TOKENS,
    "final_norm": "((1,2,1),(1,))",
    "head": TOKENS,
}
"""Tokens everywhere but in attention, which exchanges them for heads (2309.14509)."""
MIXED: dict[str, str] = {
    "embedding.tokens": "((2,1),(2,1),(2,2,1))",
    "blocks.*.attention_norm": "((2,2,1),(1,))",
    "blocks.*.attention.[qkv]": "((2,1),(1,2))",
    "blocks.*.attention.o": "((1,2,2),(2,1),(1,4,1))",
    "blocks.*.mlp_norm": "((1,4,1),(1,))",
    "blocks.*.mlp.up": "((1,2,1),(1,2))",
    "blocks.*.mlp.activate": "((1,2,2),)",
    "blocks.*.mlp.down": "((1,1,4),(4,1),(1,4,1))",
    "head": "((1,2,1),(1,2))",
    "head.loss": "((1,4,1),(1,4))",
}
"""Sequences, tokens and widths, otherwise in each operator, on 2 x 2 ranks."""


def tokens_on(*mesh: int, shape: dict[str, Any], **more: Any) -> Plan:
    """Megatron's pairs, with all between them split by tokens."""
    more = {"layers": 2} | more
    shapes = on(*mesh, operators={}, shape=shape, **more).resolve().shape
    return on(*mesh, operators=sequence_parallel(shapes, mesh[0]), shape=shape, **more)


@pytest.mark.parametrize("changes", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_sequence_parallelism(shape: dict[str, Any], changes: dict[str, Any]) -> None:
    equal(tokens_on(2, shape=shape, changes=changes))


@pytest.mark.parametrize("shape", [LLAMA | {"kv_heads": 4}, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_communicates_as_algorithm_1d(ranks: int, shape: dict[str, Any]) -> None:
    """Call by call, with the gathering in backward of what is not kept, and gradients of norms and
    learned positions summed once a step.
    """
    plan = tokens_on(ranks, shape=shape, vocab=256)
    manual = plan.replace(**{"strategy.operators": {}, "strategy.tensor.sequence": True})
    assert collectives(plan) == collectives(manual) != {}


def test_tokens_are_exchanged_for_heads() -> None:
    """All-to-alls of query, key, value and output, and no tokens are gathered."""
    plan = on(2, operators=ULYSSES, shape=GPT, layers=1, vocab=256)
    equal(plan)
    kinds = {kind for kind, _, _, action in collectives(plan) if action == "F"}
    assert kinds == {"all_to_all", "all_reduce"}  # the sums are the loss's


def test_tokens_are_rotated_by_their_own_positions() -> None:
    gate = {"blocks.*.mlp.gate": TOKENS}
    equal(on(2, operators=ULYSSES | gate, shape=LLAMA, layers=1, changes=DROPOUT))


def test_sequences_and_tokens_and_widths_at_once() -> None:
    equal(on(4, operators=MIXED, shape=GPT, layers=2, vocab=256, changes=DROPOUT))


@pytest.mark.parametrize("embedding", ["((1,2),(2,1))", "((1,2),(1,2))"])
def test_learned_positions_follow_what_they_are_added_to(embedding: str) -> None:
    """Split by width, too, over which their gradient is gathered."""
    operators = {"embedding.tokens": embedding, "blocks.*.mlp.up": "((2,1),(1,2))"}
    equal(on(4, operators=operators, shape=GPT, layers=1, vocab=256))


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "recompute": ((2,), {"strategy.recompute": "full"}, LLAMA),
    "recompute by operator": ((2,), {"strategy.recompute": ["blocks.*.mlp"]}, GPT),
    "zero-1": ((2, 1, 2), {"strategy.data.zero": 1}, GPT),
    "zero-3": ((2, 1, 2), {"strategy.data.zero": 3} | DROPOUT, LLAMA),
    "tied": ((2,), {}, LLAMA | {"tied": True}),
    "pipeline": ((2, 2), {"strategy.pipeline.schedule": "1f1b"} | DROPOUT, GPT),
    "pipeline, tied": ((2, 2), {"strategy.pipeline.schedule": "zb-h1"}, LLAMA | {"tied": True}),
    "chunks": (
        (2, 2),
        {"strategy.pipeline": {"size": 2, "chunks": 2, "schedule": "interleaved"}},
        LLAMA,
    ),
    "context": ((2,), {"strategy.context.size": 2, "cluster.gpus": 4}, LLAMA),
    "kernels": ((2,), {"strategy.kernels": "fused"} | DROPOUT, LLAMA),
    "four ranks": ((4,), DROPOUT, GPT),
}


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CASES)
def test_sequence_parallelism_beside(name: str) -> None:
    mesh, changes, shape = CASES[name]
    changes = {"training.global_batch": 8} | changes
    equal(tokens_on(*mesh, shape=shape, layers=4, changes=changes))


def test_a_stage_sends_its_tokens() -> None:
    plan = tokens_on(2, 2, shape=LLAMA, layers=2)
    frame = rehearse(plan, ranks=[0]).collectives
    sent = frame[(frame["axis"] == "pipeline") & (frame["step"] == 1)]
    assert {*sent["bytes"]} == {2 * 16 * 32 * 4 / 2}


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(24))
def test_drawn_strategies(seed: int) -> None:
    """Any pieces of any dimension of any operator."""
    equal(drawn_plan(seed))


def drawn_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    ranks, shape = rng.choice([2, 4]), rng.choice([GPT, LLAMA]) | {"layers": 2, "vocab": 256}
    changes = {**rng.choice([{}, DROPOUT]), "strategy.recompute": rng.choice(["none", "full"])}
    while True:
        plan = on(ranks, operators={}, shape=shape, changes=changes)
        table = sites(plan.resolve().shape, 2, ranks, 16)
        forms = {n.replace(".0.", ".*."): site for n, site in table.items() if ".1." not in n}
        operators = {n: drawn_form(rng, site, ranks) for n, site in forms.items()}
        kept = {name: form for name, form in operators.items() if rng.random() < 0.7}
        plan = plan.replace(**{"strategy.operators": kept})
        if kept and not problems(plan.resolve()):
            return plan


def test_a_bias_summed_only_where_its_module_splits_tokens_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradient is partial where its output is split, too."""

    def axes(names: Any, placements: dict[str, Any], mesh: Any) -> Any:
        own = {name: where for name, where in placements.items() if not name.endswith(OUTPUT)}
        return operator_reduction_axes(names, own, mesh)

    monkeypatch.setattr(apply_strategy, "operator_reduction_axes", axes)
    failure(on(2, operators={"blocks.*.mlp.down": SCATTERED}, shape=GPT, layers=1))


def test_positions_of_another_ranks_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_forward, "joint_index", lambda axes: (0, 2))
    query = {"blocks.*.attention.[qk]": TOKENS}
    assert failure(on(2, operators=query, shape=LLAMA, layers=1))["tensor"]


SCATTERED = "((1,1,2),(2,1),(1,2,1))"


@pytest.mark.parametrize(
    ("operators", "said"),
    [
        (
            {"final_norm": "((1,3,1),(1,))"},
            "splits tokens into 3 pieces, but 3 does not divide its 16",
        ),
        (
            {"blocks.*.mlp.down": "((1,1,2),(2,1),(1,4,1))"},
            r"by tokens also as its sum over inner is; legal: .*\(1,2,1\)\) or .*\(1,1,1\)\)",
        ),
        ({"head": SCATTERED}, "but the inputs of a MatMul are"),
        ({"blocks.*.attention.attend": "((1,2,1,1,1),)"}, "the inputs of a FlashAttention are"),
    ],
)
def test_what_cannot_be_split_by_tokens_is_refused(operators: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        require(on(2, operators=operators, layers=2).resolve(), "run")


def test_two_dimensions_leave_tokens_unsplit() -> None:
    short = on(2, operators={"blocks.*.mlp.up": "((2,1),(1,1))"}).resolve()
    long = on(2, operators={"blocks.*.mlp.up": "((2,1,1),(1,1))"}).resolve()
    assert placements(short) == placements(long)
