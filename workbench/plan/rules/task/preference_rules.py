"""Rules of direct preference optimization for a plan: pairs that stay together, a head that knows
each token's loss, and a policy that differs from its reference by what it learned alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.corpus_files import conversation_format
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.runtime_facts.conversation_fields import PREFERENCES


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """Why the plan's `finetune.preference` is not possible."""
    if plan.finetune is None or plan.finetune.preference is None:
        return
    s, batch = plan.strategy, plan.training.micro_batch
    if batch % 2:
        near = " or ".join(str(even) for even in (batch - 1, batch + 1) if even)
        yield Problem(
            "finetune.micro_batch",
            f"is {batch}, and finetune.preference has pairs, the chosen and the rejected answer in "
            f"one micro-batch; legal: even numbers, e.g. {near}",
        )
    if (kind := conversation_format(plan.corpus)) != PREFERENCES:
        yield Problem(
            "finetune.preference",
            f"needs pairs of answers, and {plan.corpus.source} holds {kind or 'text'}; legal: "
            f"corpus.format: {PREFERENCES}, or no finetune.preference",
        )
    alone = (
        ("strategy.tensor.algorithm", s.tensor.algorithm, "1d", _UNSPLIT),
        ("strategy.operators", "set" if s.operators else None, None, _UNSPLIT),
        ("strategy.pipeline.replicas", s.pipeline.replicas, None, _UNSPLIT),
        ("strategy.stack", s.stack, "workbench", _UNSPLIT),
        ("finetune.dropout", plan.training.dropout, 0, _NOISE),
        ("finetune.lora.dropout", plan.lora.dropout if plan.lora else 0, 0, _NOISE),
    )
    for field, value, legal, why in alone:
        if value != legal:
            only = "only without it" if legal is None else repr(legal)
            yield Problem(
                field, f"is {value!r} beside finetune.preference, whose {why}; legal: {only}"
            )


_UNSPLIT = "loss is of unsplit answers, one a sequence"
_NOISE = (
    "reference has none: masks would move the margin as much as learning does (DPO's authors and "
    "TRL train without)"
)
