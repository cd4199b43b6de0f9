"""Primitive operators of a kernel, and what three paths move in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import Ask
from workbench import verbs
from workbench.cli.operator_tables import fusion_tables
from workbench.cli.terminal import Grid
from workbench.plan.schema import Plan
from workbench.planner.explain.kernel_fusion import both_kernels, kernel_fusion
from workbench.rehearsal.operators.primitive_operators import (
    described,
    is_compound,
    plain_attention,
    primitives,
)

ATEN = torch.ops.aten
ROWS, WIDTH = 8, 32
X = torch.zeros(ROWS, WIDTH)
TENSOR, COLUMN = 4 * ROWS * WIDTH, 4 * ROWS


@pytest.mark.parametrize(
    ("func", "args", "count", "size"),
    [
        # sigmoid reads and writes, the product reads two
        (ATEN.silu.default, (X,), 2, 5 * TENSOR),
        # maximum, difference, exponentials, their sum, quotient; a maximum and a sum a row
        (ATEN._softmax.default, (X, 1, False), 5, 8 * TENSOR + 4 * COLUMN),
    ],
)
def test_primitive_operators_by_hand(func: Any, args: Any, count: int, size: int) -> None:
    assert primitives(described(func, args, {})) == (count, size)


def test_only_kernels_of_several_operators_are_compound() -> None:
    assert is_compound(ATEN.native_layer_norm.default)
    assert not is_compound(ATEN.add.Tensor) and not is_compound(ATEN.mm.default)


def test_scores_of_attention_move_with_the_square_of_the_length() -> None:
    def moved(length: int) -> int:
        q = torch.zeros(1, 2, length, 16)
        func = ATEN._scaled_dot_product_flash_attention_for_cpu.default
        return primitives(described(func, (q, q, q, 0.0, True), {})).bytes

    assert 3.8 < moved(4096) / moved(2048) < 4.1


@pytest.mark.parametrize("causal", [True, False])
def test_plain_attention_is_attention(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert torch.allclose(plain_attention(q, k, v, causal), expected, atol=1e-6)


def test_three_paths_of_a_step() -> None:
    small = {"model.layers": 2, "training.sequence_length": 128, "training.global_batch": 2}
    plan = Plan.of("tiny-gpt", gpu="h100-sxm-80gb", gpus=1, strategy="single", set=small)
    notes = [verbs.rehearse(own, operators=True).notes["operators"] for own in both_kernels(plan)]
    found = kernel_fusion(*notes)
    rows = {row["module"]: row for row in found["rows"]}
    eager = [row for row in notes[0]["rows"] if row["kind"] != "gemm"]
    assert sum(row["eager"]["bytes"] for row in rows.values()) == sum(
        row["bytes_read"] + row["bytes_written"] for row in eager
    )
    for name in ("AddNorm", "Activate", "Attend"):
        one = rows[name]
        assert one["primitive"]["bytes"] > one["eager"]["bytes"] >= one["fused"]["bytes"] > 0
    assert rows["AddNorm"]["eager"]["bytes"] > rows["AddNorm"]["fused"]["bytes"]
    outside = rows["sums of gradients"]
    assert outside["primitive"] == outside["eager"]
    assert found["seconds"]["primitive"] > found["seconds"]["eager"]
    assert found["saved"]["primitive"] > found["saved"]["primitive_without_scores"]
    table, seconds, saved = fusion_tables(found)
    assert isinstance(table, Grid) and len(table.rows) == len(rows)
    assert "estimated" in str(seconds) and f"{found['saved']['eager']:.1%} of eager" in str(saved)


@pytest.mark.parametrize("other", ["--check", "--operators"])
def test_fusion_is_no_option_beside_what_is_of_one_path(other: str, ask: Ask) -> None:
    words = "--model", "tiny", "--gpu", "local", "--gpus", "2", "--strategy", "ddp"
    code, _, err = ask("rehearse", *words, "--fusion", other)
    assert code == 2 and "--fusion" in err
