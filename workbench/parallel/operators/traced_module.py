"""Whether a plan's module must run as a traced graph, and how the plan shards that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workbench.errors import PlanError, refuse
from workbench.models.python_model import dropout_modules, other_output, returns_loss
from workbench.models.traced.export_trace import trace_module
from workbench.plan.operators.traced.node_factors import FactoredGraph, factor_graph
from workbench.plan.operators.traced.planned_graph import PlannedGraph, planned_graph
from workbench.plan.operators.traced.traced_graph import LOSS, TensorRef, TracedGraph, drop_rate
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.operator_rules import sides


@dataclass(frozen=True)
class TracedModule(PlannedGraph):
    """A module's graph, how a plan shards it, and its tensors.

    Attributes:
        constants: Tensors that the module's code makes of numbers, by id.
    """

    constants: Mapping[str, Tensor]


def trace_for_plan(
    model: nn.Module,
    plan: ResolvedPlan,
    dtype: torch.dtype,
    sequences: int | None = None,
    sharded: bool = True,
) -> TracedModule | None:
    """Trace a plan's module if it must run as a graph; None if it runs as it is: it has no dropout,
    and the plan no operator strategies.

    Args:
        model: Not changed, but for its training mode.
        plan: Resolved.
        dtype: Of parameters.
        sequences: Of a forward; default: the plan's micro-batch.
        sharded: Whether by the plan's strategies; else it runs on one device.

    Raises:
        PlanError: It cannot be traced though it must be, or a strategy is not legal for it.
    """
    model.train()
    operators = plan.strategy.operators if sharded else {}
    pipeline = plan.strategy.pipeline
    stages = pipeline.size * pipeline.chunks if sharded else 1
    needed = bool(operators) or stages > 1 or next(dropout_modules(model), None) is not None
    count = plan.training.micro_batch if sequences is None else sequences
    try:
        graph, constants = trace_module(
            model, count, plan.training.sequence_length, dtype, returns_loss(model)
        )
    except PlanError:
        if needed:
            raise
        return None
    if not needed and not _drops(graph):
        return None
    factored = checked_graph(graph, model, plan, dtype)
    shape = sides(plan) if sharded else ()
    own = planned_graph(factored, operators, shape, stages, str(dtype))
    return TracedModule(own.factored, own.shards, own.stored, own.stages, constants)


def checked_graph(
    graph: TracedGraph, model: nn.Module, plan: ResolvedPlan, dtype: torch.dtype
) -> FactoredGraph:
    """The factors of a module's graph, whose output and dropout are such that it trains alike on
    any mesh.

    Raises:
        PlanError: They are not, or it cannot be traced with two sequences.
    """
    _check_output(graph, plan.vocab)
    factored = factor_graph(_with_larger(graph, model, plan, dtype))
    _check_dropout(factored)
    if factored.larger is not None:
        _check_dropout(factored.larger)
    return factored


def _with_larger(
    graph: TracedGraph, model: nn.Module, plan: ResolvedPlan, dtype: torch.dtype
) -> TracedGraph:
    """The graph; where it has one sequence, or one token of each, with the one of two."""
    sequences, length = graph.inputs[graph.tokens].shape
    if min(sequences, length) > 1:
        return graph
    for tokens in dict.fromkeys((max(2, length), length)):  # some modules branch on one token
        try:
            shape = max(2, sequences), tokens
            larger, _ = trace_module(model, *shape, dtype, returns_loss(model))
        except PlanError:
            if tokens == length and _drops(graph):
                raise
        else:
            return replace(graph, larger=larger)
    return graph


def _drops(graph: TracedGraph) -> bool:
    return any(drop_rate(node) for node in graph.nodes)


def _check_output(graph: TracedGraph, vocab: int) -> None:
    """Refuse a module that returns neither logits nor a loss."""
    last, tensors = graph.nodes[-1], graph.tensors()
    shape = tensors[graph.output].shape
    if last.id != LOSS:
        if shape != ():
            raise other_output(f"a tensor {[*shape]}", "the summed loss, one number")
        return
    logits, tokens = tensors[last.inputs[0]].shape, tensors[last.inputs[1]].shape
    if logits[:-1] != tokens or logits[-1] < vocab:
        wanted = f"logits {[*tokens, vocab]}"
        raise other_output(
            f"a tensor {[*logits]}", f"{wanted}, or of forward(tokens, targets) the summed loss"
        )


def _check_dropout(factored: FactoredGraph) -> None:
    """Refuse dropout that all sequences of a microbatch share: its mask would depend on how many
    there are.
    """
    for node in factored.graph.nodes:
        factors = factored.tensors[TensorRef(node.id)].factors
        if drop_rate(node) and factored.batch is not None and factored.batch not in factors:
            raise refuse(
                "model.python",
                f"{node.name} ({node.line}) drops elements of a tensor that has no dimension of "
                "sequences; legal: dropout of [B, ..]",
            )
