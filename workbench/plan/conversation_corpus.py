"""A corpus of conversations with every default filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.plan import schema
from workbench.plan.corpus_files import conversation_format, source_format
from workbench.runtime_facts.conversation_fields import FIELDS, PREFERENCES


def resolved_corpus(corpus: schema.Corpus) -> dict[str, Any]:
    """`corpus` as data; of conversations with the format that the first row of each source is of,
    what has loss, and whether several share a sequence: these are separate documents.
    """
    written = corpus.model_dump(exclude_unset=True)
    kind = conversation_format(corpus)
    if kind is None:
        return written
    parts: Sequence[schema.TextSource] = corpus.mix or [corpus]
    rows = written["mix"] if corpus.mix else [written]
    formats = [source_format(part) for part in parts]
    for row, found in zip(rows, formats, strict=True):
        row |= {"format": found} if found in FIELDS else {}
    packing = kind != PREFERENCES if corpus.packing is None else corpus.packing
    alone = set(formats) <= set(FIELDS)
    return {
        **written,
        "loss_on": corpus.loss_on or "answers",
        "packing": packing,
        "separate_documents": packing or (corpus.separate_documents and not alone),
    }
