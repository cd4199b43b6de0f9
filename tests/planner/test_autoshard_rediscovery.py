"""What the exact choice finds by itself on a transformer: Megatron's pairing, data parallel, and
the mix of both.
"""

from typing import Any

import pytest

from workbench.plan.model.model_shape import Shape
from workbench.planner.autoshard import choose_strategies, ideal_machine
from workbench.planner.autoshard.choice_result import OperatorPlan

H100 = ideal_machine(flops=400e12, bandwidth=300e9, latency=6e-6, memory_bandwidth=2.5e12)
GPT = Shape(layers=24, hidden=4096, heads=32, ffn=16384, vocab=50257, mlp="gelu", norm="layernorm")
LLAMA = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)


def forms(found: OperatorPlan) -> dict[str, Any]:
    return {row.operator: row.strategy for row in found.rows}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("ranks, n", [(2, 2), (4, 4), ((4,), 4), ((8,), 8)])
def test_one_sequence_rediscovers_megatron(
    shape: Shape, ranks: int | tuple[int], n: int, fused: bool
) -> None:
    found = choose_strategies(shape, 2048, ranks, H100, part="layer", fused=fused)
    chosen = forms(found)
    column, row = f"((1,1),(1,{n}))", f"((1,{n}),({n},1))"
    assert chosen["attention.qkv"] == chosen["mlp.up"] == column
    if (
        ranks == 4
    ):  # the prime factors of plain ranks: a part of the sum is gathered in smaller rings
        grid = choose_strategies(shape, 2048, (4,), H100, part="layer", fused=fused)
        assert found.seconds < grid.seconds and forms(grid)["attention.o"] == row
        return
    assert chosen["attention.o"] == chosen["mlp.down"] == row
    assert found.redistributions == ()
    assert (found.count("all_reduce", "forward"), found.count("all_reduce", "backward")) == (2, 2)
    reduced = {
        row.operator: [(m.when, m.tensor) for m in row.moves] for row in found.rows if row.moves
    }
    assert reduced == {
        "attention.qkv": [("backward", "input")],
        "attention.o": [("forward", "output")],
        "mlp.up": [("backward", "input")],
        "mlp.down": [("forward", "output")],
    }
    assert "attention.qkv by columns and attention.o by its inner dimension" in found.reason
    assert all(f"blocks.*.attention.{name}" in found.forms for name in "qkvo")


def test_the_pair_moves_what_megatron_moves() -> None:
    found = choose_strategies(GPT, 2048, (4,), H100, part="layer")
    moved = [move.bytes for row in found.rows for move in row.moves]
    assert moved == [2048 * 4096 * 2] * 4


def test_plain_ranks_are_never_worse_than_whole_axes() -> None:
    for n in (2, 4, 8):
        plain, whole = (
            choose_strategies(LLAMA, 8192, ranks, H100, part="layer").seconds for ranks in (n, (n,))
        )
        assert plain <= whole * (1 + 1e-12)


@pytest.mark.parametrize("ranks", [4, (4,), (2, 2)])
def test_many_sequences_and_small_weights_are_data_parallel(ranks: Any) -> None:
    small = Shape(layers=4, hidden=256, heads=4, ffn=1024, vocab=1000, mlp="gelu")
    found = choose_strategies(small, 512 * 1024, ranks, H100, sequence_length=1024)
    assert {row.strategy.split(",")[0] for row in found.rows if row.kind != "Embedding"} == {"((4"}
    assert (
        forms(found)["attention.qkv"] == "((4,1),(1,1))"
        and forms(found)["embedding"] == "((1,1),(4,))"
    )
    assert found.redistributions == ()
    assert all(
        m.when == "backward" and m.tensor in ("weight", "table")
        for row in found.rows
        for m in row.moves
    )


def test_a_limit_that_forbids_whole_weights_turns_data_into_tensor_parallel() -> None:
    free = choose_strategies(
        GPT, 8 * 512, (8,), H100, sequence_length=512, part="layer", microbatches=64
    )
    assert forms(free)["mlp.up"] == "((8,1),(1,1))"
    weights = 16 * 12 * 4096**2  # bytes of a block with states
    tight = choose_strategies(
        GPT,
        8 * 512,
        (8,),
        H100,
        sequence_length=512,
        part="layer",
        microbatches=64,
        memory=weights / 4,
    )
    assert free.bytes > weights > weights / 4 >= tight.bytes
    assert tight.seconds >= free.seconds
    chosen = forms(tight)
    assert chosen["mlp.up"] == "((1,1),(1,8))" and chosen["mlp.down"] == "((1,1,8),(8,1),(1,8,1))"
    assert (
        "Without the limit the best choice would take" in tight.reason
        and "more than the limit" in tight.reason
    )
    assert (
        f"{free.bytes / 2**30:.3g} GiB" in tight.reason and "Without the limit" not in free.reason
    )


def test_a_limit_that_forbids_nothing_changes_nothing() -> None:
    free, roomy = (
        choose_strategies(LLAMA, 4096, (4,), H100, part="layer", memory=limit)
        for limit in (None, 2.0**40)
    )
    assert roomy.seconds == pytest.approx(free.seconds, rel=1e-12)
    assert roomy.reason == free.reason


def test_a_grid_of_slow_and_fast_links_mixes_rows_outside_with_columns_inside() -> None:
    cluster = ideal_machine(
        flops=400e12, bandwidth=(40e9, 300e9), latency=(10e-6, 6e-6), memory_bandwidth=2.5e12
    )
    found = choose_strategies(
        GPT, 2 * 2048, (2, 4), cluster, sequence_length=2048, part="layer", microbatches=4
    )
    chosen = forms(found)
    assert chosen["attention.qkv"] == chosen["mlp.up"] == "((2,1),(1,4))"
    assert chosen["attention.o"] == chosen["mlp.down"] == "((2,4),(4,1))"
    words = {row.operator: row.splits for row in found.rows}
    assert words["mlp.up"] == "rows 2 ways (axis 0), columns 4 ways (axis 1)"
    assert found.redistributions == ()


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_little_memory_rediscovers_sequence_parallelism(shape: Shape) -> None:
    """All that Megatron-LM replicates is split by tokens (2205.05198), where that has to fit."""
    free = choose_strategies(shape, 4096, (8,), H100, part="layer", fused=True)
    assert forms(free)["mlp_norm"] == "((1,1),(1,))"
    column, row = ((1, 1), (1, 8)), ((1, 1, 8), (8, 1), (1, 8, 1))
    norm = ((1, 8, 1), (1,))
    pairs: dict[str, Any] = {f"blocks.*.attention.{name}": column for name in "qkv"}
    pairs |= {f"blocks.*.mlp.{name}": column for name in ("gate", "up")[not shape.gated :]}
    pairs |= dict.fromkeys(("blocks.*.attention.o", "blocks.*.mlp.down"), row)
    pairs |= dict.fromkeys(("blocks.*.attention_norm", "blocks.*.mlp_norm"), norm)
    megatron = choose_strategies(shape, 4096, (8,), H100, part="layer", fused=True, fixed=pairs)
    tight = choose_strategies(
        shape, 4096, (8,), H100, part="layer", fused=True, memory=megatron.bytes
    )
    assert free.bytes > tight.bytes == megatron.bytes
    assert forms(tight) == forms(megatron) and tight.seconds == pytest.approx(megatron.seconds)
    assert (tight.count("reduce_scatter", "forward"), tight.count("all_gather", "forward")) == (
        2,
        2,
    )
    assert tight.count("all_gather", "backward") == 4  # two of them of what is not kept
    assert "is reduce-scattered by tokens" in tight.reason


def test_tokens_are_exchanged_for_heads_where_weights_are_small() -> None:
    """Their gradients, once in many microbatches, move less than activations in each."""
    found = choose_strategies(LLAMA, 32768, (8,), H100, part="layer", fused=True, microbatches=16)
    chosen = forms(found)
    assert chosen["attention.qkv"] == chosen["mlp.down"] == "((1,8,1),(1,1))"
    assert chosen["attention.attend"].startswith("((1,8,1,1)")
    assert {move.kind for one in found.redistributions for move in one.moves} == {"all_to_all"}
    assert "Tokens of a sequence are split 8 ways in attention_norm, " in found.reason


def test_fixed_strategies_are_kept_and_cost_no_less() -> None:
    free = choose_strategies(GPT, 2048, 4, H100, part="layer")
    fixed = choose_strategies(
        GPT, 2048, 4, H100, part="layer", fixed={"blocks.*.mlp.up": ((1, 4), (4, 1))}
    )
    assert forms(fixed)["mlp.up"] == "((1,4),(4,1))" and fixed.seconds > free.seconds


def test_a_tied_table_lies_as_the_head_wants_it() -> None:
    found = choose_strategies(GPT.model_copy(update={"tied": True}), 2048, (4,), H100, fused=True)
    untied = choose_strategies(GPT, 2048, (4,), H100, fused=True)
    assert found.bytes < untied.bytes
    assert forms(found)["embedding"] == "((4,1),(1,))" and forms(found)["head"] == "((1,1),(1,4))"
