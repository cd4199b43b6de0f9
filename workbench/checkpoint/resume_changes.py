"""Comparison of a resuming plan with what a checkpoint was trained on, without torch.

The order of samples is a function of the corpus, the sequence length and the seed, and a
checkpoint holds only how many samples were consumed; the learning rate is one of the schedule.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.checkpoint.manifest import MANIFEST, read_manifest
from workbench.errors import PlanError, Problem
from workbench.fields.frozen import Frozen
from workbench.plan import schema
from workbench.plan.corpus_files import conversation_format, source_format, tokenizer_path
from workbench.plan.learning_rate import learning_rate
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.task.task_words import words_of_task
from workbench.plan.schema import Plan

TRAINED_ON = "trained_on"
"""Entry of a checkpoint's `meta`; older ones have none."""
TASK_FIELDS = ("sequence_length", "global_batch", "seed", "steps")
"""Fields of `training` that decide, beside the corpus, which samples a step takes and, beside the
optimizer, its learning rate."""
SHA256 = re.compile("[0-9a-f]{64}")
SHOWN_DIGITS = 12
"""Hexadecimal digits of a hash in a message."""


class TrainedOn(Frozen):
    """Inputs of a checkpoint's training: the corpus by its content, the batches, the schedule."""

    sources: list[dict[str, Any]]
    """Content hash, format, field, dtype and share of samples of each source with a weight."""
    corpus: dict[str, Any]
    """Other fields that decide its tokens and their order."""
    training: dict[str, int]
    optimizer: schema.Optimizer


def trained_on(plan: Plan) -> TrainedOn:
    """Inputs that `plan` trains on. Hashes are null where it is not pinned."""
    corpus, t = plan.corpus, plan.training
    return TrainedOn(
        sources=[found for _, found in _sources(corpus)],
        corpus={
            "tokenizer": corpus.tokenizer_sha256 or corpus.tokenizer,
            "end_of_text": corpus.end_of_text,
            "separate_documents": corpus.separate_documents,
            "template": _template_sha256(corpus),
            "loss_on": corpus.loss_on or "answers",
            "packing": bool(corpus.packing),
            "holdout": corpus.holdout,
        },
        training={name: getattr(t, name) for name in TASK_FIELDS},
        optimizer=t.optimizer,
    )


def _template_sha256(corpus: schema.Corpus) -> str | None:
    """Hash of the chat template of conversations: the plan's, or the tokenizer's own."""
    own = corpus.tokenizer not in ("bytes", "bpe") and corpus.template is None
    if not own or conversation_format(corpus) is None:
        return corpus.template_sha256
    from workbench.corpora.tokenizers.read_tokenizer import own_template

    with suppress(PlanError):  # reported where the corpus is read
        if (path := tokenizer_path(corpus)) and (text := own_template(path)[0]):
            return hashlib.sha256(text.encode()).hexdigest()
    return None


def _sources(corpus: schema.Corpus) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field of the plan, what is recorded) of each source that samples are taken of."""
    if corpus.mix is None:
        yield "corpus", _source(corpus, corpus.sha256, 1.0)
        return
    total = sum(part.weight for part in corpus.mix)
    for i, part in enumerate(corpus.mix):
        if part.weight > 0:
            yield f"corpus.mix.{i}", _source(part, part.sha256, round(part.weight / total, 12))


def _source(of: schema.TextSource, sha256: str | None, share: float) -> dict[str, Any]:
    found = {"source": sha256, "format": source_format(of), "field": of.field or "text"}
    return found | {"dtype": of.dtype, "weight": share}


def corpus_problems(folder: Path, meta: Mapping[str, Any], plan: Plan) -> list[Problem]:
    """Each field by which the corpus of `plan` is another than the checkpoint's; none where the
    plan allows it.
    """
    if plan.checkpoint.new_corpus:
        return []
    legal = (
        "legal: that corpus, or checkpoint.new_corpus: true (`--new-corpus`), which goes on at "
        f"sample {meta.get('sample_index')} of this one"
    )
    return [
        Problem(field, f"is {mine}, {folder} was trained with {theirs}; {legal}")
        for field, theirs, mine in _corpus_changes(_recorded(meta), plan)
    ]


def resume_notes(plan: ResolvedPlan) -> list[str]:
    """Differences, by field, from what the checkpoint that `plan` resumes from was trained with;
    none of weights alone.
    """
    folder = Path(plan.checkpoint.load or "")
    if plan.checkpoint.load is None or not (folder / MANIFEST).is_file():
        return []
    meta = read_manifest(folder)["meta"]
    then = _recorded(meta)
    if then is None:
        what = "corpus, its batches and its learning rate"
        return [f"{folder} does not say its {what}: whether they are the plan's is not checked"]
    changes = [*_corpus_changes(then, plan), *_task_changes(then, plan)]
    found = [
        f"{field} is {mine}, {folder} was trained with {theirs}" for field, theirs, mine in changes
    ]
    if not (_is_hashed(then) and _is_pinned(plan.corpus)):
        found.append(f"{folder} or the plan does not name its corpus by hash: it is not compared")
    done, steps = meta["sample_index"] // plan.training.global_batch, plan.training.steps
    if done >= steps:
        found.append(f"training.steps is {steps}, {folder} has done {done}: nothing is left")
    else:
        found += _rate_change(then, meta, plan)
    return [words_of_task(words, plan) for words in found]


def _recorded(meta: Mapping[str, Any]) -> TrainedOn | None:
    """Inputs that a checkpoint says it was trained on; None where it does not."""
    try:
        return TrainedOn.model_validate(meta.get(TRAINED_ON))
    except ValueError:
        return None


def _is_hashed(then: TrainedOn) -> bool:
    return all(source.get("source") for source in then.sources)


def _is_pinned(corpus: schema.Corpus) -> bool:
    """True where files of the corpus are named by hash, which is so once a plan is pinned."""
    named = [part.sha256 for part in corpus.mix] if corpus.mix else [corpus.sha256]
    named += [] if corpus.tokenizer in ("bytes", "bpe") else [corpus.tokenizer_sha256]
    named += [] if corpus.template is None else [corpus.template_sha256]
    return None not in named


def _corpus_changes(then: TrainedOn | None, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(field, the checkpoint's, the plan's) in words, of what differs; nothing where one of them is
    not named by hash.
    """
    if then is None or not (_is_hashed(then) and _is_pinned(plan.corpus)):
        return
    own, now = [*_sources(plan.corpus)], trained_on(plan)
    if len(own) != len(then.sources):
        yield "corpus.mix", f"sources: {len(then.sources)}", f"sources: {len(own)}"
    else:
        for (where, mine), theirs in zip(own, then.sources, strict=True):
            yield from _differences(where, theirs, mine)
    yield from _differences("corpus", then.corpus, now.corpus)


def _task_changes(then: TrainedOn, plan: Plan) -> Iterator[tuple[str, str, str]]:
    now = trained_on(plan)
    yield from _differences("training", then.training, now.training)
    theirs, mine = then.optimizer.model_dump(), now.optimizer.model_dump()
    yield from _differences("training.optimizer", theirs, mine)


def _differences(
    where: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    for name, own in mine.items():
        if own != (other := theirs.get(name)):
            yield f"{where}.{name}", shown(other), shown(own)


def shown(value: Any) -> str:
    """A value as a plan writes it; a hash by its first digits."""
    if isinstance(value, str) and SHA256.fullmatch(value):
        return f"content of sha256 {value[:SHOWN_DIGITS]}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _rate_change(then: TrainedOn, meta: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """The learning rate of the first step, where it is not the one that was planned."""
    t, scaler = plan.training, meta.get("loss_scaler")
    skipped = int(scaler["skipped"]) if scaler else 0
    last, first = meta["step"], meta["sample_index"] // t.global_batch
    planned = learning_rate(last - skipped, then.optimizer, then.training["steps"])
    taken = learning_rate(first - skipped, t.optimizer, t.steps)
    if planned != taken:
        at = f" at step {first}" if first != last else ""
        yield f"learning rate: {planned:.2e} planned at step {last}, {taken:.2e} taken{at}"
