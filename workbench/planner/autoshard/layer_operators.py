"""The operators of a transformer, from its shape and the tokens of one microbatch: a layer, or the
whole model.

Query, key and value are one product, and so are gate and up: they read the same input, whose
gradient is summed once. Biases and learned positions are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
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

Rows = tuple[OperatorDim, OperatorDim]
"""Sequences, and the tokens of each."""
BRANCHES = (
    ("attention_norm", "attention.qkv", 0),
    ("attention.o", "mlp_norm", 0),
    ("attention_norm", "mlp_norm", 1),
    ("mlp_norm", "mlp.up", 0),
    ("mlp.activate", "mlp.down", 0),
)
"""Inside a block: (from, to, which input); attention and activation come beside."""
EXITS = (("mlp.down", 0), ("mlp_norm", 1))
"""What leaves a block for the next norm: a branch that it adds, and the residual stream."""


def layer_graph(shape: Shape, sequences: int, length: int, fused: bool = False) -> OperatorGraph:
    """One block among many: what leaves it enters the next, split in the same way. Raises
    `PlanError`.
    """
    operators = _block(shape, sequences, length, fused)
    return OperatorGraph(
        operators, _edges(operators, [*_inside(operators), *_leaving("", "attention_norm")])
    )


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


def model_graph(
    shape: Shape,
    sequences: int,
    length: int,
    fused: bool = False,
    runs: Sequence[int] | None = None,
) -> OperatorGraph:
    """The whole model: embedding, blocks, norm, head, loss.

    Args:
        shape: The model.
        sequences: Of one microbatch over all ranks.
        length: Tokens of a sequence.
        fused: Whether attention is one operator that keeps no scores.
        runs: Numbers of consecutive layers that share one choice; default: all layers.

    Raises:
        PlanError: The shape has layers without operator strategies.
    """
    runs = tuple(runs or (shape.layers,))
    first, final = _ends(shape, _rows(sequences, length))
    blocks = [
        _layers(_block(shape, sequences, length, fused), start, count, len(runs) > 1)
        for start, count in zip(accumulate(runs, initial=0), runs)
    ]
    operators = (first, *(op for block in blocks for op in block), *final)
    edges = [("embedding", f"{_prefix(blocks[0])}attention_norm", 0, 1)]
    for block, after in zip(blocks, [*map(_prefix, blocks[1:]), None]):
        own = _prefix(block)
        edges += [(own + a, own + b, place, block[0].num_layers) for a, b, place in _inside(block)]
        entry = f"{own}attention_norm"
        edges += [(*pair, block[0].num_layers - 1) for pair in _leaving(own, entry)]
        entry = "final_norm" if after is None else f"{after}attention_norm"
        edges += [(*pair, 1) for pair in _leaving(own, entry)]
    found = _counted_edges(operators, edges)
    head = len(operators) - 2
    logits = operators[-1].inputs[0]
    found += _counted_edges(operators, [("final_norm", "head", 0, 1)])
    found += (TensorEdge(head, operators[head].output, head + 1, logits, unpadded=shape.vocab),)
    if shape.tied:
        weight = operators[head].inputs[1]
        weight = replace(weight, dims=weight.dims[::-1])
        found += (TensorEdge(0, first.inputs[0], head, weight),)
    return OperatorGraph(operators, found)


def _layers(
    block: tuple[Operator, ...], start: int, count: int, named: bool
) -> tuple[Operator, ...]:
    """A block that stands for `count` layers from `start`, which its names say where `named`."""
    if not named:
        return tuple(replace(op, num_layers=count) for op in block)
    layers = f"{start}" if count == 1 else f"{start}-{start + count - 1}"
    return tuple(
        replace(
            op,
            name=f"blocks.{layers}.{op.name}",
            num_layers=count,
            modules=tuple(
                module.replace("*", str(layer))
                for layer in range(start, start + count)
                for module in op.modules
            ),
        )
        for op in block
    )


def _prefix(block: Sequence[Operator]) -> str:
    return block[0].name.removesuffix("attention_norm")


def _leaving(prefix: str, entry: str) -> list[tuple[str, str, int]]:
    return [(prefix + name, entry, place) for name, place in EXITS]


def _inside(block: Sequence[Operator]) -> list[tuple[str, str, int]]:
    """What passes within a block, by the operators' own names."""
    prefix = _prefix(block)
    activate = next(op for op in block if op.name == f"{prefix}mlp.activate")
    own = [replace(op, name=op.name.removeprefix(prefix)) for op in block]
    return [
        *BRANCHES,
        *attention_edges(own),
        *(("mlp.up", "mlp.activate", i) for i in range(len(activate.inputs))),
    ]


def _edges(
    operators: Sequence[Operator], pairs: Iterable[tuple[str, str, int]]
) -> tuple[TensorEdge, ...]:
    return _counted_edges(operators, [(*pair, 1) for pair in pairs])


def _counted_edges(
    operators: Sequence[Operator], edges: Iterable[tuple[str, str, int, int]]
) -> tuple[TensorEdge, ...]:
    """Edges of (from, to, which input, layers that have it)."""
    at = {op.name: i for i, op in enumerate(operators)}
    return tuple(
        TensorEdge(
            at[a],
            _by_tokens(operators[at[a]].output),
            at[b],
            _by_tokens(operators[at[b]].inputs[place]),
            count,
        )
        for a, b, place, count in edges
        if count
    )


def _by_tokens(tensor: OperatorTensor) -> OperatorTensor:
    """A tensor of attention with its tokens second, as those of its neighbors have them."""
    tokens = [name for name in tensor.dims if name in ("query", "key")]
    if len(tokens) != 1:
        return tensor
    others = [name for name in tensor.dims if name not in ("rows", *tokens)]
    return replace(tensor, dims=("rows", *tokens, *others))


def _rows(sequences: int, length: int) -> Rows:
    return OperatorDim("rows", sequences, sequences), OperatorDim("tokens", length, length)


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
    rows = _rows(sequences, length)
    hidden, ffn = (shape.hidden, shape.hidden), (shape.ffn, shape.ffn)
    groups = math.gcd(shape.heads, int(shape.kv_heads or shape.heads))
    qkv = (shape.q_width, shape.kv_width, shape.kv_width)
    ups = ("mlp.gate", "mlp.up") if shape.gated else ("mlp.up",)
    return (
        _add_norm("attention_norm", rows, shape.hidden, "blocks.*.attention_norm"),
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
        _add_norm("mlp_norm", rows, shape.hidden, "blocks.*.mlp_norm"),
        _matmul(
            "mlp.up",
            rows,
            hidden,
            (shape.ffn,) * len(ups),
            shape.ffn,
            *(f"blocks.*.{name}" for name in ups),
        ),
        _activation("mlp.activate", rows, shape.ffn, len(ups), "blocks.*.mlp.activate"),
        _matmul("mlp.down", rows, ffn, hidden[:1], shape.hidden, "blocks.*.mlp.down"),
    )


def _ends(shape: Shape, rows: Rows) -> tuple[Operator, tuple[Operator, ...]]:
    """The embedding, and what follows the last block."""
    # A table that the head shares is split by its entries alone.
    hidden = OperatorDim("hidden", shape.hidden, 1 if shape.tied else shape.hidden)
    padded = -(-shape.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    vocabulary = OperatorDim("vocabulary", padded, padded)
    table, ids = (
        OperatorTensor("table", ("vocabulary", "hidden"), "parameter"),
        OperatorTensor("tokens", ("rows", "tokens"), "index"),
    )
    embedded = OperatorTensor("output", ("rows", "tokens", "hidden"))
    embedding = Operator(
        "embedding",
        "Embedding",
        (*rows, vocabulary, hidden),
        (table, ids),
        embedded,
        scatters=True,
        modules=("embedding.tokens",),
    )
    head = _matmul("head", rows, (shape.hidden, hidden.units), (padded,), padded, "head")
    head = replace(head, fp8=False, scatters=False)
    if shape.tied:
        head = replace(head, inputs=(head.inputs[0], replace(head.inputs[1], kind="tied")))
    logits, targets = (
        OperatorTensor("logits", ("rows", "tokens", "vocabulary")),
        OperatorTensor("targets", ("rows", "tokens"), "index"),
    )
    # A vocabulary in pieces makes partial sums of three numbers a token: the maximum, the sum, the
    # target's logit.
    statistics = OperatorTensor("statistics", ("rows", "tokens", "three"))
    loss = Operator(
        "loss",
        "CrossEntropy",
        (*rows, vocabulary, OperatorDim("three", 3)),
        (logits, targets),
        statistics,
        modules=("head.loss",),
    )
    return embedding, (_add_norm("final_norm", rows, shape.hidden, "final_norm"), head, loss)


def _matmul(
    name: str,
    rows: Rows,
    inner: tuple[int, int],
    widths: tuple[int, ...],
    units: int,
    *modules: str,
) -> Operator:
    """GEMMs on one input: rows x tokens x inner times inner x width, for each of `widths`.

    `inner` is (size, units); `units` divide the columns of all widths together.
    """
    dims = (*rows, OperatorDim("inner", *inner), OperatorDim("columns", sum(widths), units))
    inputs = (
        OperatorTensor("input", ("rows", "tokens", "inner")),
        OperatorTensor("weight", ("inner", "columns"), "parameter"),
    )
    output = OperatorTensor("output", ("rows", "tokens", "columns"))
    return Operator(
        name,
        "MatMul",
        dims,
        inputs,
        output,
        gemm_widths=widths,
        fp8=True,
        scatters=True,
        modules=modules,
    )


def _add_norm(name: str, rows: Rows, hidden: int, module: str) -> Operator:
    """The residual addition and the norm after it, which are one module: its sequences and their
    tokens alone are split.
    """
    inputs = (
        OperatorTensor("input", ("rows", "tokens", "hidden")),
        OperatorTensor("residual", ("rows", "tokens", "hidden"), "residual"),
        OperatorTensor("weight", ("hidden",), "parameter"),
    )
    dims = (*rows, OperatorDim("hidden", hidden))
    output = OperatorTensor("output", ("rows", "tokens", "hidden"))
    return Operator(name, "Norm", dims, inputs, output, modules=(module,))


def _activation(name: str, rows: Rows, width: int, count: int, module: str) -> Operator:
    own = "rows", "tokens", "width"
    inputs = tuple(OperatorTensor(f"input {i + 1}", own) for i in range(count))
    dims, output = (*rows, OperatorDim("width", width, width)), OperatorTensor("output", own)
    return Operator(name, "Activation", dims, inputs, output, modules=(module,))
