"""Which corpora of conversations can be trained on."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.corpus_files import conversation_format, source_format
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.runtime_facts.conversation_fields import PREFERENCES


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """Fields of `corpus` that its rows do not have, and pairs that cannot stand together."""
    corpus, kind = plan.corpus, conversation_format(plan.corpus)
    if kind is None:
        for name in ("template", "loss_on", "packing"):
            if (value := getattr(corpus, name)) is not None:
                yield Problem(
                    f"corpus.{name}",
                    f"is {value}, and {corpus.source} holds no conversations; legal: null, or "
                    "corpus.format: messages, completions or preferences",
                )
    elif kind == PREFERENCES:
        yield from _preferences(plan)


def _preferences(plan: ResolvedPlan) -> Iterator[Problem]:
    corpus = plan.corpus
    for i, part in enumerate(corpus.mix or []):
        if (other := source_format(part)) != PREFERENCES:
            yield Problem(
                f"corpus.mix.{i}.format",
                f"is {other} beside preferences; legal: preferences alone, or none",
            )
    if corpus.packing:
        yield Problem(
            "corpus.packing", "is true, and answers of a pair are compared alone; legal: false"
        )
    if corpus.loss_on == "all":
        yield Problem(
            "corpus.loss_on", "is all, and of preferences answers are compared; legal: answers"
        )
    if plan.finetune is None or plan.finetune.preference is None:
        yield Problem(
            "corpus.format",
            f"is preferences, and {plan.task_section} has no preference to train on; legal: "
            "finetune.preference, or messages, completions",
        )
