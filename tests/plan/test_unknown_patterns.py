"""What a refusal says of a pattern that names no operator."""

from __future__ import annotations

import pytest

from workbench.plan.catalog.catalog import models
from workbench.plan.operators.unknown_patterns import unknown_pattern
from workbench.plan.rules.strategy.operator_rules import sites

GPT = [*sites(models()["tiny"].shape, 1, 1, 8)]
HOLES = ["embedding", "layers.0.mlp", "layers.1.mlp", "layers.3.mlp", "layers.3.experts.0.up"]


@pytest.mark.parametrize(
    ("pattern", "names", "said"),
    [
        ("blocks.*.mlp.upp", GPT, "did you mean blocks.*.mlp.up"),
        ("blocks.1.attention.query", GPT, "did you mean blocks.*.attention.q"),
        ("heads", GPT, "did you mean head"),
        ("blocks.9.mlp.up", GPT, "9 is no layer of blocks.*.mlp.up, whose layers are 0-3"),
        ("blocks.9.*", GPT, "9 is no layer of blocks.*.*, whose layers are 0-3"),
        ("layers.2.mlp", HOLES, "2 is no layer of layers.*.mlp, whose layers are 0-1, 3"),
        ("layers.3.experts.7.up", HOLES, "7 is no layer of"),
        ("nothing.like.it.at.all", GPT, "legal: embedding.tokens, "),
        ("nothing.like.it.at.all", GPT, "final_norm, head, head.loss"),
        ("xyz", [f"module_{chr(97 + i)}" for i in range(25)], ", and 5 more"),
    ],
)
def test_a_refusal_says_the_layers_or_the_nearest_names(
    pattern: str, names: list[str], said: str
) -> None:
    problem = unknown_pattern(pattern, names)
    assert problem.field == f"strategy.operators.{pattern}" and said in problem.message, problem
