"""Why a user's module does not equal one device on several ranks: what it computes of a sequence
depends on the other sequences of the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import PlanError, refuse
from workbench.models.counter_dropout import SampleIndices
from workbench.models.python_model import add_loss, build_python_model, returns_loss
from workbench.models.traced.export_trace import trace_module
from workbench.parallel.operators.factor_redistribution import FactorGrid
from workbench.parallel.operators.local_operators import LocalCall, run_locally
from workbench.plan.operators.traced.graph_placement import node_shards
from workbench.plan.operators.traced.node_factors import FactoredGraph, factor_graph
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode
from workbench.plan.resolved_plan import ResolvedPlan

TOLERANCE = 1e-9
"""Relative, in fp64."""
LEGAL = (
    "a forward that computes each sequence by itself, as LayerNorm and GroupNorm do, and sums "
    "their losses"
)


def explained(answer: dict[str, Any], plan: ResolvedPlan) -> dict[str, Any]:
    """The answer of a verification.

    Args:
        answer: Of `summarize`.
        plan: The plan that was verified; its code, if it has some, has run already.

    Raises:
        PlanError: It failed, and the plan's module mixes sequences; names the operator.
    """
    if not answer["passed"] and plan.code is not None:
        refuse_mixed_sequences(build_python_model(plan.code, plan.training.seed), plan)
    return answer


def refuse_mixed_sequences(model: nn.Module, plan: ResolvedPlan) -> None:
    """Refuse a module whose loss of two sequences is no sum of a term of each: with other sequences
    in one place, the other place's term changes. The module is not usable afterwards.

    Raises:
        PlanError: It is such a module.
    """
    model._apply(lambda t: t.double() if t.is_floating_point() else t).eval()
    batches = [*_batches(plan)]
    with torch.no_grad():
        try:
            node = _first_mixed(model, batches[:3])
            add_loss(model, plan.vocab)
            first, second, third, fourth = (float(model(*batch)) for batch in batches)
        except Exception:  # a user's forward may raise any, as where it asks for more sequences
            return
    if abs(first + fourth - second - third) > TOLERANCE * abs(first):
        where = f" in {node.name} ({node.op}, {node.line})" if node is not None else ""
        raise refuse(
            "model.python",
            f"its forward mixes the sequences of a microbatch{where}, and every rank has others; "
            f"legal: {LEGAL}",
        )


def _batches(plan: ResolvedPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of two sequences, [2, T] each; the same with another second sequence, with
    another first one, and with both.
    """
    generator = torch.Generator().manual_seed(plan.training.seed)
    size = (4, plan.training.sequence_length + 1)
    text = torch.randint(plan.vocab, size, generator=generator)
    for rows in ([0, 1], [0, 3], [2, 1], [2, 3]):
        yield text[rows, :-1].contiguous(), text[rows, 1:].contiguous()


def _first_mixed(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> TracedNode | None:
    """The first operator of which an entry changes with either sequence; None where the module
    cannot be traced.
    """
    length = batches[0][0].shape[1]
    try:
        graph, constants = trace_module(model, 2, length, torch.float64, returns_loss(model))
    except PlanError:
        return None
    assert graph.targets is not None
    known = {TensorRef(key): value for key, value in constants.items()}
    known |= {TensorRef(key): model.get_parameter(n) for key, n in graph.parameters.items()}
    known |= {TensorRef(key): model.get_buffer(n) for key, n in graph.buffers.items()}
    given = TensorRef(graph.tokens), TensorRef(graph.targets)
    runs = [known | dict(zip(given, batch)) for batch in batches]
    factored = factor_graph(graph)
    for node in graph.nodes:
        made, *others = (_computed(factored, node, values) for values in runs)
        for y, of_second, of_first in zip(made, *others):
            if bool(((y != of_second) & (y != of_first)).any()):
                return node
    return None


def _computed(
    factored: FactoredGraph, node: TracedNode, values: dict[TensorRef, Tensor]
) -> list[Tensor]:
    """Results of an operator on one device, which `values` gain."""
    refs = [TensorRef(node.id, i) for i in range(len(node.outputs))]
    call = LocalCall(
        node,
        node_shards(factored.nodes[node.id], ()),
        factored.nodes[node.id],
        [factored.tensors[ref] for ref in node.inputs],
        [factored.tensors[ref] for ref in refs],
        FactorGrid(),
        torch.device("cpu"),
        SampleIndices(),
        0,
        factored.batch,
        lambda y, *_: y,
    )
    results = run_locally(call, [values[ref] for ref in node.inputs])
    values |= dict(zip(refs, results))
    return results
