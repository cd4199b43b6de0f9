"""Each rule of the table: an operator on shards of its inputs makes shards of its outputs, or terms
of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.counter_dropout import SampleIndices
from workbench.models.traced.export_trace import trace_module
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.parallel.operators.local_operators import LocalCall, run_locally
from workbench.plan.operators.traced.dim_rules import COMPUTING, ELEMENTWISE
from workbench.plan.operators.traced.graph_placement import FactorLayout, NodeShards, node_shards
from workbench.plan.operators.traced.moving_rules import MOVING
from workbench.plan.operators.traced.node_factors import (
    FactoredGraph,
    Local,
    TensorFactors,
    factor_graph,
)
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode

SEQUENCES, LENGTH, WIDTH, HEADS = 4, 6, 8, 2
Expression = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.view(SEQUENCES, LENGTH, HEADS, -1).transpose(1, 2)


def attention(x: Tensor, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **more)


ROWS = {"rows"}
CASES: dict[str, tuple[Expression, set[str]]] = {
    "linear": (lambda x, w, i: F.linear(x, w, w[0]), {"rows", "inner", "columns"}),
    "addmm": (lambda x, w, i: torch.addmm(w[0], x.flatten(0, 1), w), {"rows", "inner", "columns"}),
    "mm": (lambda x, w, i: torch.mm(x[0], w), {"rows", "inner", "columns"}),
    "matmul": (
        lambda x, w, i: heads(x) @ heads(x).transpose(2, 3),
        {"dim0", "dim1", "left", "inner", "right"},
    ),
    "bmm": (lambda x, w, i: torch.bmm(x, x.mT), {"dim0", "left", "inner", "right"}),
    "einsum": (lambda x, w, i: torch.einsum("btd,de->bet", x, w), {*"btde"}),
    "conv1d": (
        lambda x, w, i: F.conv1d(x.mT, w[:, :4, None], w[0], groups=2),
        {"rows", "groups", "columns"},
    ),
    "embedding": (lambda x, w, i: F.embedding(i, w), {"vocabulary", "rows", "hidden"}),
    "layer_norm": (lambda x, w, i: F.layer_norm(x, (WIDTH,), w[0], w[1]), ROWS),
    "rms_norm": (lambda x, w, i: F.rms_norm(x, (WIDTH,), w[0]), ROWS),
    "scaled_dot_product_attention": (
        lambda x, w, i: attention(x, attn_mask=w[:LENGTH, :LENGTH]),
        {"rows", "heads", "query"},
    ),
    "softmax": (lambda x, w, i: x.softmax(1), {"dim0", "dim2"}),
    "log_softmax": (lambda x, w, i: x.log_softmax(-1), {"dim0", "dim1"}),
    "cumsum": (lambda x, w, i: x.cumsum(1), {"dim0", "dim2"}),
    "cumprod": (lambda x, w, i: x.cumprod(0), {"dim1", "dim2"}),
    "argmax": (lambda x, w, i: x.argmax(-1), {"dim0", "dim1"}),
    "argmin": (lambda x, w, i: x.argmin(1, keepdim=True), {"dim0", "dim2"}),
    "topk": (lambda x, w, i: x.topk(2, dim=1)[0], {"dim0", "dim2"}),
    "sort": (lambda x, w, i: x.sort(-1)[1], {"dim0", "dim1"}),
    "argsort": (lambda x, w, i: x.argsort(0), {"dim1", "dim2"}),
    "logsumexp": (lambda x, w, i: x.logsumexp((0,)), {"dim1", "dim2"}),
    "sum": (lambda x, w, i: x.sum((0, -1)), {"dim0", "dim1", "dim2"}),
    "mean": (lambda x, w, i: x.mean(-1, keepdim=True), {"dim0", "dim1"}),
    "amax": (lambda x, w, i: x.amax(1), {"dim0", "dim2"}),
    "amin": (lambda x, w, i: x.amin((0, 1)), {"dim2"}),
    "max": (lambda x, w, i: x.max(-1)[0], {"dim0", "dim1"}),
    "min": (lambda x, w, i: torch.min(x, w[:LENGTH]), {"dim0", "dim1", "dim2"}),
    "one_hot": (lambda x, w, i: F.one_hot(i, 8), {"dim0", "dim1"}),
    "triu": (lambda x, w, i: x.triu(1), {"dim0"}),
    "tril": (lambda x, w, i: x.tril(), {"dim0"}),
    "cross_entropy_loss": (
        lambda x, w, i: F.cross_entropy(x.flatten(0, 1), i.flatten(), reduction="sum"),
        ROWS,
    ),
    "view": (lambda x, w, i: x.view(-1, 2, 4), {"dim0", "dim1"}),
    "reshape": (lambda x, w, i: x.mT.reshape(SEQUENCES, -1), {"dim0", "dim1"}),
    "flatten": (lambda x, w, i: x.flatten(1), {"dim0", "dim1"}),
    "unflatten": (lambda x, w, i: x.unflatten(-1, (2, 4)), {"dim0", "dim1", "dim2"}),
    "unsqueeze": (lambda x, w, i: x.unsqueeze(1), {"dim0", "dim1", "dim2"}),
    "squeeze": (lambda x, w, i: x.unsqueeze(1).squeeze(1), {"dim0", "dim1", "dim2"}),
    "transpose": (lambda x, w, i: x.transpose(0, 2), {"dim0", "dim1", "dim2"}),
    "permute": (lambda x, w, i: x.permute(2, 0, 1), {"dim0", "dim1", "dim2"}),
    "t": (lambda x, w, i: w.t(), {"dim0", "dim1"}),
    "numpy_T": (lambda x, w, i: w.T, {"dim0", "dim1"}),
    "mT": (lambda x, w, i: x.mT, {"dim0", "dim1", "dim2"}),
    "view_as_complex": (
        lambda x, w, i: torch.view_as_complex(x.unflatten(-1, (4, 2))),
        {"dim0", "dim1", "dim2"},
    ),
    "view_as_real": (
        lambda x, w, i: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2)))),
        {"dim0", "dim1", "dim2"},
    ),
    "pad": (lambda x, w, i: F.pad(x, (0, 0, 1, -1)), {"dim0", "dim2"}),
    "expand": (lambda x, w, i: x[:, :1].expand(-1, 4, -1), {"dim0", "dim1", "dim2"}),
    "contiguous": (lambda x, w, i: x.mT.contiguous(), {"dim0", "dim1", "dim2"}),
    "clone": (lambda x, w, i: x.clone(), {"dim0", "dim1", "dim2"}),
    "to": (lambda x, w, i: x.to(torch.float32), {"dim0", "dim1", "dim2"}),
    "zeros_like": (lambda x, w, i: torch.zeros_like(x), {"dim0", "dim1", "dim2"}),
    "ones_like": (lambda x, w, i: torch.ones_like(x), {"dim0", "dim1", "dim2"}),
    "full_like": (lambda x, w, i: torch.full_like(x, 3.0), {"dim0", "dim1", "dim2"}),
    "type_as": (lambda x, w, i: i.type_as(x), {"dim0", "dim1"}),
    "select": (lambda x, w, i: x.select(1, 2), {"dim0", "dim2"}),
    "unbind": (lambda x, w, i: x.unbind(1)[3], {"dim0", "dim2"}),
    "slice": (lambda x, w, i: x[:, :, 4:], {"dim0", "dim1", "kept"}),
    "split": (lambda x, w, i: x.split(4, 2)[1], {"dim0", "dim1", "kept"}),
    "split_with_sizes": (lambda x, w, i: x.split([3, 3], 1)[1], {"dim0", "dim2"}),
    "chunk": (lambda x, w, i: x.chunk(2, -1)[1], {"dim0", "dim1", "kept"}),
    "cat": (lambda x, w, i: torch.cat((x, -x), -1), {"dim0", "dim1", "kept"}),
    "stack": (lambda x, w, i: torch.stack((x, -x), 1), {"dim0", "dim1", "dim2"}),
    "add": (lambda x, w, i: x + w[:LENGTH], {"dim0", "dim1", "dim2"}),
    "where": (lambda x, w, i: torch.where(x > 0, x, w[0]), {"dim0", "dim1", "dim2"}),
}
"""Operator -> (an expression of x [4, 6, 8], a weight [8, 8] and indices [4, 6], the dimensions
that may be sharded).
"""
ALIASES = {
    *("_softmax", "_log_softmax", "_unsafe_view", "_to_copy", "alias", "lift_fresh_copy", "concat"),
    *("empty_like", "var", "head_loss"),
}
"""Operators that have the rule of another, or are tested where ranks communicate."""
CONSTANTS = {"full", "zeros", "ones", "arange", "empty", "scalar_tensor", "eye", "linspace"}


class Expressed(nn.Module):
    """A module of one expression."""

    def __init__(self, expression: Expression) -> None:
        super().__init__()
        self.expression = expression
        self.table, self.weight = nn.Embedding(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.expression(self.table(tokens), self.weight, targets)


def test_every_rule_has_a_case() -> None:
    assert {*COMPUTING, *MOVING} - {*ELEMENTWISE} == ({*CASES} | ALIASES | CONSTANTS) - {
        *ELEMENTWISE
    }


@pytest.mark.parametrize("op", [*CASES])
def test_shards_of_inputs_make_shards_of_outputs(op: str) -> None:
    torch.manual_seed(0)
    module = Expressed(CASES[op][0]).double()
    graph, constants = trace_module(module, SEQUENCES, LENGTH, torch.float64, with_loss=True)
    factored = factor_graph(graph)
    values = _computed(factored, module, constants)
    node = next(node for node in reversed(graph.nodes) if node.op == op)
    own, sharded = factored.nodes[node.id], set()
    for local, size in own.sizes.items():
        if local not in own.fixed and size % 2 == 0:
            _check(factored, node, values, local)
            sharded.add(local[0])
    assert sharded == CASES[op][1]


@pytest.mark.parametrize("name", ["max", "argmax"])
def test_an_extreme_of_all_entries_shards_nothing(name: str) -> None:
    module = Expressed(lambda x, w, i: getattr(x, name)())
    graph, _ = trace_module(module, SEQUENCES, LENGTH, torch.float32, with_loss=True)
    (own,) = (n for node, n in factor_graph(graph).nodes.items() if node.startswith(name))
    assert {*own.sizes} == {*own.fixed}


def test_a_shape_of_another_tensor_is_a_shape() -> None:
    module = Expressed(lambda x, w, i: x.flatten().view_as(x) * w.sum().expand_as(x))
    graph, _ = trace_module(module, SEQUENCES, LENGTH, torch.float32, with_loss=True)
    given = {node.op: node.args[1] for node in graph.nodes if node.op in ("view", "expand")}
    assert given == dict.fromkeys(("view", "expand"), (SEQUENCES, LENGTH, WIDTH))


def _call(
    factored: FactoredGraph,
    node: TracedNode,
    shards: NodeShards,
    grid: FactorGrid,
    reduce: Callable[..., Tensor],
) -> LocalCall:
    return LocalCall(
        node,
        shards,
        factored.nodes[node.id],
        [factored.tensors[ref] for ref in node.inputs],
        [factored.tensors[TensorRef(node.id, i)] for i in range(len(node.outputs))],
        grid,
        torch.device("cpu"),
        SampleIndices(),
        0,
        factored.batch,
        reduce,
    )


def _computed(
    factored: FactoredGraph, module: nn.Module, constants: dict[str, Tensor]
) -> dict[TensorRef, Tensor]:
    """Every tensor of the graph, unsharded."""
    graph = factored.graph
    tokens = torch.randint(8, (SEQUENCES, LENGTH))
    values: dict[TensorRef, Tensor] = {}
    values |= {TensorRef(key): module.get_parameter(name) for key, name in graph.parameters.items()}
    values |= {TensorRef(key): value for key, value in constants.items()}
    values |= {TensorRef(graph.tokens): tokens, TensorRef(str(graph.targets)): tokens.flip(0)}
    for node in graph.nodes:
        shards = node_shards(factored.nodes[node.id], ())
        call = _call(factored, node, shards, FactorGrid(), lambda y: y)
        results = run_locally(call, [values[ref] for ref in node.inputs])
        values |= {TensorRef(node.id, i): result for i, result in enumerate(results)}
    return values


def _check(
    factored: FactoredGraph, node: TracedNode, values: dict[TensorRef, Tensor], local: Local
) -> None:
    """Two ranks that shard one factor have a part of the results each, or terms of them."""
    shards = node_shards(factored.nodes[node.id], (local,))
    terms: list[Tensor] = []

    def rank(index: int, reduce: Callable[..., Tensor]) -> list[Tensor]:
        grid = FactorGrid((MeshAxis("operators.0", 2, index, (0, 1), None),))
        inputs = [
            _part(values[ref], factored.tensors[ref], layout, index)
            for ref, layout in zip(node.inputs, shards.inputs)
        ]
        return run_locally(_call(factored, node, shards, grid, reduce), inputs)

    def collected(y: Tensor, *_: Any) -> Tensor:
        terms.append(y)
        return y

    for index in (0, 1):
        rank(index, collected)
    for index in (0, 1):
        found = rank(index, lambda y, *_: terms[0] + terms[1] if shards.partial else y)
        for i, (result, layout) in enumerate(zip(found, shards.outputs)):
            ref = TensorRef(node.id, i)
            wanted = _part(values[ref], factored.tensors[ref], layout, index)
            torch.testing.assert_close(result, wanted, msg=lambda text: f"{local}: {text}")


def _part(whole: Tensor, factors: TensorFactors, layout: FactorLayout, index: int) -> Tensor:
    """A rank's half of a tensor."""
    if layout[0] is None:
        return whole
    half = whole.reshape(factors.sizes).chunk(2, layout[0])[index]
    shape = FactorGrid((MeshAxis("operators.0", 2, index, (0, 1), None),))
    return half.reshape(shape.local_shape(factors, layout))


def test_a_rule_that_shards_what_it_must_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPUTING, "cumsum", COMPUTING["relu"])
    with pytest.raises(AssertionError, match=r"\('dim1', 0\)"):
        test_shards_of_inputs_make_shards_of_outputs("cumsum")
