"""The operators at the ends of a transformer: embedding, final norm, head and loss."""

from __future__ import annotations

from dataclasses import replace

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import Operator, OperatorDim, OperatorTensor
from workbench.planner.autoshard.layers.common_operators import Rows, linear_operator, norm_operator

VOCABULARY_MULTIPLE = 128
"""Vocabularies are padded to a multiple of it, so that they can be split (1909.08053)."""


def end_operators(shape: Shape, rows: Rows) -> tuple[Operator, tuple[Operator, ...]]:
    """The embedding, and what follows the last block."""
    # A table that the head shares is split by its entries alone.
    hidden = OperatorDim("hidden", shape.hidden, 1 if shape.tied else shape.hidden)
    padded = -(-shape.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    vocabulary = OperatorDim("vocabulary", padded, padded)
    norm = norm_operator("final_norm", rows, shape.hidden, "final_norm")
    head = _head(shape, rows, hidden.units, padded)
    return _embedding(rows, vocabulary, hidden), (norm, head, _loss(rows, vocabulary))


def _embedding(rows: Rows, vocabulary: OperatorDim, hidden: OperatorDim) -> Operator:
    table, ids = (
        OperatorTensor("table", ("vocabulary", "hidden"), "parameter"),
        OperatorTensor("tokens", ("rows", "tokens"), "index"),
    )
    return Operator(
        "embedding",
        "Embedding",
        (*rows, vocabulary, hidden),
        (table, ids),
        OperatorTensor("output", ("rows", "tokens", "hidden")),
        scatters=True,
        modules=("embedding.tokens",),
    )


def _head(shape: Shape, rows: Rows, units: int, padded: int) -> Operator:
    head = linear_operator("head", rows, (shape.hidden, units), (padded,), padded, "head")
    head = replace(head, fp8=False, scatters=False)
    if not shape.tied:
        return head
    return replace(head, inputs=(head.inputs[0], replace(head.inputs[1], kind="tied")))


def _loss(rows: Rows, vocabulary: OperatorDim) -> Operator:
    logits, targets = (
        OperatorTensor("logits", ("rows", "tokens", "vocabulary")),
        OperatorTensor("targets", ("rows", "tokens"), "index"),
    )
    # A vocabulary in pieces makes partial sums of three numbers a token: the maximum, the sum, the
    # target's logit.
    return Operator(
        "loss",
        "CrossEntropy",
        (*rows, vocabulary, OperatorDim("three", 3)),
        (logits, targets),
        OperatorTensor("statistics", ("rows", "tokens", "three")),
        modules=("head.loss",),
    )
