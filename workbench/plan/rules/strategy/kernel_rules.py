"""Kernels of attention, memory-bound operators and the loss, of this engine or another stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from workbench.errors import Problem
from workbench.plan.model.attention_kernel import framework_attention, is_aligned, kernels_of_shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import FrameworkAttention, Loss

OWN_KERNELS = ("eager", "compiled", "fused")
"""Kernels of this engine."""


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """Kernels that the plan's stack does not run on its GPU."""
    s, legal = plan.strategy, legal_kernels(plan)
    if s.attention not in legal["attention"]:
        yield _attention_problem(plan, legal["attention"])
    if s.kernels not in legal["kernels"]:
        what = f"is {s.kernels}, which the stacks of other frameworks run (strategy.stack)"
        yield Problem("strategy.kernels", f"{what}; legal: {', '.join(legal['kernels'])}")
    elif s.loss not in legal["loss"]:
        how = f"{s.kernels} kernels on {s.tensor.ranks} tensor rank(s) compute it otherwise"
        yield Problem("strategy.loss", f"is {s.loss}, but {how}; legal: {', '.join(legal['loss'])}")


def legal_kernels(plan: ResolvedPlan) -> dict[str, tuple[str, ...]]:
    """Legal values of `attention`, `kernels` and `loss` of a plan's strategy.

    This engine's kernels choose its loss, over the logits of all tokens where ranks share the
    vocabulary; other stacks run any.
    """
    s = plan.strategy
    if s.stack != "workbench":
        return {
            "attention": ("auto", *framework_attention(plan.gpu)),
            "kernels": (*OWN_KERNELS, "liger"),
            "loss": ("auto", *get_args(Loss)),
        }
    own = "fused_linear" if s.kernels != "eager" and s.tensor.ranks == 1 else "whole"
    return {
        "attention": ("auto", *_own_attention(plan)),
        "kernels": OWN_KERNELS,
        "loss": ("auto", own),
    }


def _own_attention(plan: ResolvedPlan) -> tuple[str, ...]:
    """Attention that this engine runs, best first; ring attention merges blocks by their
    log-sum-exp, which math lacks.
    """
    s, runs = plan.strategy, _kernels_of(plan)
    if s.context.size <= s.context.num_ulysses_ranks:
        return runs
    head_dim = int(plan.shape.head_dim or 0)
    aligned = plan.gpu.device == "cpu" or is_aligned(s.precision, head_dim)
    return tuple(k for k in runs if k != "math" and (aligned or k == "blockwise"))


def _kernels_of(plan: ResolvedPlan) -> tuple[str, ...]:
    length, documents = plan.task.sequence_length, plan.corpus.separate_documents
    return kernels_of_shape(plan.gpu, plan.strategy.precision, plan.shape, length, documents)


def _attention_problem(plan: ResolvedPlan, legal: tuple[str, ...]) -> Problem:
    s, head_dim = plan.strategy, int(plan.shape.head_dim or 0)
    if s.stack != "workbench":
        what = f"is {s.attention}, which {s.stack} does not run on {plan.gpu.name}"
        return Problem("strategy.attention", f"{what}; legal: {', '.join(legal)}")
    documents = plan.corpus.separate_documents
    why = f"{plan.gpu.name} does not have for {s.precision} and head_dim {head_dim}"
    if documents or plan.shape.changes_scores(plan.task.sequence_length):
        why += f" with {_changed_scores(plan)}"
    elif s.attention in get_args(FrameworkAttention):
        why = "the stacks of other frameworks run (strategy.stack)"
    elif s.attention == "blockwise":
        why = "is for a window shorter than the sequence, ALiBi, a soft-cap or documents"
    if s.attention == "math":
        why = "ring attention cannot use: blocks are merged by their log-sum-exp"
    elif s.attention in _kernels_of(plan):
        why = f"ring attention cannot use with {s.precision} and head_dim {head_dim}"
    fit = ", ".join(legal) if legal[1:] else "none; a head_dim that 8 divides has flash"
    return Problem("strategy.attention", f"is {s.attention}, which {why}; legal: {fit}")


def _changed_scores(plan: ResolvedPlan) -> str:
    """Fields by which attention changes scores, in words."""
    fields, shape = ("window", "attention_softcap"), plan.shape
    found = [f"model.{name} {value}" for name in fields if (value := getattr(shape, name))]
    found += ["corpus.separate_documents"] if plan.corpus.separate_documents else []
    alibi = ["model.positions 'alibi'"] if shape.positions == "alibi" else []
    return " and ".join(alibi + found)
