"""The operators of a transformer, from its shape and the tokens of one microbatch: a layer, or the
whole model.

Query, key and value are one product, and so are gate and up: they read the same input, whose
gradient is summed once. Biases and learned positions are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from workbench.errors import refuse
from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorDim,
    OperatorGraph,
    OperatorTensor,
    TensorEdge,
)
from workbench.planner.autoshard.attention_operators import attention_edges, attention_operators

VOCABULARY_MULTIPLE = 128
"""Vocabularies are padded to a multiple of it, so that they can be split (1909.08053)."""


BRANCHES = (
    ("attention_norm", "attention.qkv", 0),
    ("attention.o", "attention.add", 1),
    ("attention.add", "mlp_norm", 0),
    ("mlp_norm", "mlp.up", 0),
    ("mlp.activate", "mlp.down", 0),
    ("mlp.down", "mlp.add", 1),
    ("attention.add", "mlp.add", 0),
)
"""Inside a block: (from, to, which input); attention and activation come beside."""
ENTRIES = (("attention_norm", 0), ("attention.add", 0))
"""Where the residual stream enters a block."""


def layer_graph(shape: Shape, sequences: int, length: int, fused: bool = False) -> OperatorGraph:
    """One block among many: what leaves it enters the next, split in the same way. Raises
    `PlanError`.
    """
    operators = _block(shape, sequences, length, fused)
    wrap = [("mlp.add", entry, place) for entry, place in ENTRIES]
    return OperatorGraph(operators, _edges(operators, [*_inside(operators), *wrap]))


def branch_graph(
    shape: Shape, sequences: int, length: int, fused: bool, name: Literal["attention", "mlp"]
) -> OperatorGraph:
    """A block's attention or feed-forward branch, from its norm to its last product: a chain, if
    attention is fused.
    """
    block = _block(shape, sequences, length, fused)
    operators = tuple(op for op in block if op.name.startswith(name) and op.kind != "Add")
    inside = {op.name for op in operators}
    return OperatorGraph(
        operators,
        _edges(operators, [edge for edge in _inside(block) if {edge[0], edge[1]} <= inside]),
    )


def model_graph(shape: Shape, sequences: int, length: int, fused: bool = False) -> OperatorGraph:
    """The whole model: embedding, all blocks with one choice for all, norm, head, loss. Raises
    `PlanError`.
    """
    block = tuple(
        replace(op, num_layers=shape.layers) for op in _block(shape, sequences, length, fused)
    )
    first, final = _ends(shape, sequences * length, sequences)
    operators = (first, *block, *final)
    once = [("embedding", entry, place) for entry, place in ENTRIES]
    once += [("mlp.add", "final_norm", 0), ("final_norm", "head", 0), ("head", "loss", 0)]
    wrap = [("mlp.add", entry, place) for entry, place in ENTRIES if shape.layers > 1]
    edges = _edges(operators, once) + _edges(operators, _inside(block), shape.layers)
    edges += _edges(operators, wrap, shape.layers - 1)
    if shape.tied:
        head = len(operators) - 2
        edges += (TensorEdge(0, first.inputs[0], head, operators[head].inputs[1], transposed=True),)
    return OperatorGraph(operators, edges)


def _inside(block: Sequence[Operator]) -> list[tuple[str, str, int]]:
    activate = next(op for op in block if op.name == "mlp.activate")
    return [
        *BRANCHES,
        *attention_edges(block),
        *(("mlp.up", activate.name, i) for i in range(len(activate.inputs))),
    ]


def _edges(
    operators: Sequence[Operator], pairs: Iterable[tuple[str, str, int]], num_layers: int = 1
) -> tuple[TensorEdge, ...]:
    at = {op.name: i for i, op in enumerate(operators)}
    return tuple(
        TensorEdge(
            at[a], operators[at[a]].output, at[b], operators[at[b]].inputs[place], num_layers
        )
        for a, b, place in pairs
    )


def _block(shape: Shape, sequences: int, length: int, fused: bool) -> tuple[Operator, ...]:
    for field in ("moe", "mla"):
        if getattr(shape, field) is not None:
            what = (
                "dense feed-forward layers"
                if field == "moe"
                else "multi-head or grouped-query attention"
            )
            raise refuse(
                f"model.{field}", f"{shape.name} has it; legal for operator strategies: {what}"
            )
    rows = OperatorDim("rows", sequences * length, sequences)
    hidden, ffn = (shape.hidden, shape.hidden), (shape.ffn, shape.ffn)
    groups = math.gcd(shape.heads, int(shape.kv_heads or shape.heads))
    qkv = (shape.q_width, shape.kv_width, shape.kv_width)
    ups = ("mlp.gate", "mlp.up") if shape.gated else ("mlp.up",)
    return (
        _norm("attention_norm", rows, shape.hidden, "blocks.*.attention_norm"),
        _matmul(
            "attention.qkv",
            rows,
            hidden,
            qkv,
            groups,
            *(f"blocks.*.attention.{name}" for name in "qkv"),
        ),
        *attention_operators(shape, sequences, length, fused),
        _matmul(
            "attention.o",
            rows,
            (shape.q_width, groups),
            hidden[:1],
            shape.hidden,
            "blocks.*.attention.o",
        ),
        _elementwise("attention.add", "Add", rows, shape.hidden, 2),
        _norm("mlp_norm", rows, shape.hidden, "blocks.*.mlp_norm"),
        _matmul(
            "mlp.up",
            rows,
            hidden,
            (shape.ffn,) * len(ups),
            shape.ffn,
            *(f"blocks.*.{name}" for name in ups),
        ),
        _elementwise(
            "mlp.activate", "Activation", rows, shape.ffn, len(ups), "blocks.*.mlp.activate"
        ),
        _matmul("mlp.down", rows, ffn, hidden[:1], shape.hidden, "blocks.*.mlp.down"),
        _elementwise("mlp.add", "Add", rows, shape.hidden, 2),
    )


def _ends(shape: Shape, tokens: int, sequences: int) -> tuple[Operator, tuple[Operator, ...]]:
    """The embedding, and what follows the last block."""
    rows, hidden = (
        OperatorDim("rows", tokens, sequences),
        OperatorDim("hidden", shape.hidden, shape.hidden),
    )
    padded = -(-shape.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    vocabulary = OperatorDim("vocabulary", padded, padded)
    table, ids = (
        OperatorTensor("table", ("vocabulary", "hidden"), "parameter"),
        OperatorTensor("tokens", ("rows",), "index"),
    )
    embedded = OperatorTensor("output", ("rows", "hidden"))
    embedding = Operator(
        "embedding",
        "Embedding",
        (rows, vocabulary, hidden),
        (table, ids),
        embedded,
        modules=("embedding.tokens",),
    )
    head = _matmul("head", rows, (shape.hidden, shape.hidden), (padded,), padded, "head")
    head = replace(head, fp8=False)
    if shape.tied:
        head = replace(head, inputs=(head.inputs[0], replace(head.inputs[1], kind="tied")))
    logits, targets = (
        OperatorTensor("logits", ("rows", "vocabulary")),
        OperatorTensor("targets", ("rows",), "index"),
    )
    # A vocabulary in pieces makes partial sums of three numbers a token: the maximum, the sum, the
    # target's logit.
    statistics = OperatorTensor("statistics", ("rows", "three"))
    loss = Operator(
        "loss",
        "CrossEntropy",
        (rows, vocabulary, OperatorDim("three", 3)),
        (logits, targets),
        statistics,
        modules=("head.loss",),
    )
    return embedding, (_norm("final_norm", rows, shape.hidden, "final_norm"), head, loss)


def _matmul(
    name: str,
    rows: OperatorDim,
    inner: tuple[int, int],
    widths: tuple[int, ...],
    units: int,
    *modules: str,
) -> Operator:
    """GEMMs on one input: rows x inner times inner x width, for each of `widths`.

    `inner` is (size, units); `units` divide the columns of all widths together.
    """
    dims = (rows, OperatorDim("inner", *inner), OperatorDim("columns", sum(widths), units))
    inputs = (
        OperatorTensor("input", ("rows", "inner")),
        OperatorTensor("weight", ("inner", "columns"), "parameter"),
    )
    output = OperatorTensor("output", ("rows", "columns"))
    return Operator(
        name, "MatMul", dims, inputs, output, gemm_widths=widths, fp8=True, modules=modules
    )


def _norm(name: str, rows: OperatorDim, hidden: int, module: str) -> Operator:
    inputs = (
        OperatorTensor("input", ("rows", "hidden")),
        OperatorTensor("weight", ("hidden",), "parameter"),
    )
    output = OperatorTensor("output", ("rows", "hidden"))
    return Operator(
        name, "Norm", (rows, OperatorDim("hidden", hidden)), inputs, output, modules=(module,)
    )


def _elementwise(
    name: str, kind: str, rows: OperatorDim, width: int, count: int, *modules: str
) -> Operator:
    inputs = tuple(OperatorTensor(f"input {i + 1}", ("rows", "width")) for i in range(count))
    dims, output = (
        (rows, OperatorDim("width", width, width)),
        OperatorTensor("output", ("rows", "width")),
    )
    return Operator(name, kind, dims, inputs, output, modules=modules)
