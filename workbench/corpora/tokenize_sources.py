"""Tokenize a corpus before a run, and write it as one dataset of Megatron-LM's format."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.corpora.conversations.packed_conversations import PackedConversations
from workbench.corpora.encoder import BYTES
from workbench.corpora.megatron_files import IndexedTokens, IndexedWriter, read_indexed
from workbench.corpora.token_cache import draft_of
from workbench.corpora.token_files import CHUNK, open_tokens
from workbench.corpora.tokenized_corpus import Progress, SourceTokens, TokenizedCorpus, load_corpus
from workbench.corpora.tokenizers.text_tokenizer import load_tokenizer, vocabulary_size
from workbench.errors import refuse
from workbench.plan import schema
from workbench.plan.corpus_files import (
    SourceFiles,
    conversation_format,
    source_files,
    tokenizer_path,
)

MOST_SEQUENCE = 2**30
"""Tokens of one sequence of the written index, whose length is an int32."""


class SequencesOf(NamedTuple):
    """How a plan makes sequences of conversations."""

    length: int
    packing: bool
    seed: int


def tokenize(
    corpus: schema.Corpus,
    vocab: int | None,
    output: Path | None,
    processes: int | None,
    progress: Progress,
    sequences: SequencesOf | None = None,
) -> dict[str, Any]:
    """Encode every source of `corpus` into the cache.

    Args:
        corpus: What to read, and with which tokenizer.
        vocab: Vocabulary of the model; None: the tokenizer's own.
        output: Prefix of a .bin and .idx to write the tokens of all sources into, in order.
        processes: Processes that encode; by default one a core.
        progress: Called with the bytes that are encoded, those of the source, and the source.
        sequences: What conversations are packed into; None: nothing is said of it.

    Returns:
        Of each source its documents, tokens and time, and what they add up to. Of conversations
        also the tokens with loss, the first one with what has loss, and how they are packed.

    Raises:
        PlanError: A source or the tokenizer is unfit, or `output` cannot be written.
    """
    if processes is not None and processes < 1:
        raise refuse("--processes", f"is {processes}; legal: 1 or more")
    if output is not None and (kind := conversation_format(corpus)):
        why = "and Megatron-LM's files do not say which tokens have loss; legal: text, or none"
        raise refuse("--output", f"is '{output}' of {kind}, {why}")
    found = load_corpus(
        corpus, vocab or _vocabulary(corpus), progress=progress, processes=processes
    )
    files = source_files(corpus)
    rows = [
        {**_row(one, of), **_conversations(one, found.tokenizer_file, sequences)}
        for one, of in zip(found.sources, files, strict=True)
    ]
    answer: dict[str, Any] = {
        "sources": rows,
        "documents": sum(row["documents"] for row in rows),
        "skipped": sum(row["skipped"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "vocabulary": found.vocab,
        "tokenizer": str(found.tokenizer_file or found.tokenizer),
    }
    return answer | {"output": None if output is None else _write(found, files, output)}


def _vocabulary(corpus: schema.Corpus) -> int:
    """The tokenizer's own vocabulary."""
    path = tokenizer_path(corpus)
    if path is not None:
        return vocabulary_size(load_tokenizer(path))
    if corpus.tokenizer == "bpe":
        raise refuse("--vocab", "is needed to train a BPE; legal: ids of the model, 257 or more")
    return BYTES


def _row(found: SourceTokens, of: SourceFiles) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in of.paths)
    return {
        "source": found.source,
        "format": of.format,
        "bytes": size,
        "documents": found.documents,
        "skipped": found.skipped,
        "tokens": len(found.train) + len(found.holdout),
        "seconds": found.seconds,
        "path": str(found.path or of.paths[0]),
    }


def _conversations(
    one: SourceTokens, tokenizer: Path | None, sequences: SequencesOf | None
) -> dict[str, Any]:
    """What has loss, and how conversations are packed; nothing of text."""
    if one.conversations is None:
        return {}
    text = one.train if len(one.train) else one.holdout
    parts = (one.train, one.holdout)
    chunks = (part[i : i + CHUNK] for part in parts for i in range(0, len(part), CHUNK))
    first = text[: int(one.conversations[1])]
    found: dict[str, Any] = {
        "loss_tokens": sum(int((chunk >= 0).sum()) for chunk in chunks),
        "first": list(_segments(first, tokenizer)),
    }
    if sequences is not None:
        packed = PackedConversations(one, "train", *sequences).report
        found |= {"packed": {**packed._asdict(), "words": str(packed)}}
    return found


def _segments(tokens: np.ndarray, tokenizer: Path | None) -> Iterator[dict[str, Any]]:
    """The text of a conversation in parts with and without loss."""
    loss = tokens >= 0
    ids = np.where(loss, tokens, ~tokens)
    reader = None if tokenizer is None else load_tokenizer(tokenizer)
    for start, stop in pairwise([0, *np.flatnonzero(np.diff(loss)) + 1, len(ids)]):
        own = ids[start:stop].tolist()
        if reader is None:
            words = bytes(own).decode(errors="replace")
        else:
            words = reader.decode(own, skip_special_tokens=False)
        yield {"text": words, "loss": bool(loss[start])}


def _write(corpus: TokenizedCorpus, files: list[SourceFiles], output: Path) -> str:
    """Write all sources into OUTPUT.bin and OUTPUT.idx; returns the path of the .bin."""
    stem = output.with_suffix("") if output.suffix in (".bin", ".idx") else output
    data, index = stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")
    for path in {one for of in files for one in of.paths}:
        if path.absolute() in (data.absolute(), index.absolute()):
            raise refuse("--output", f"'{path}' is a source; legal: another prefix")
    dtype = np.dtype("<u2" if corpus.vocab <= 2**16 else "<i4")
    drafts = draft_of(data), draft_of(index)
    try:
        writer = IndexedWriter(*drafts, dtype)
        try:
            for one, of in zip(corpus.sources, files, strict=True):
                _copy(open_tokens(of) if one.path is None else read_indexed(one.path), writer)
            writer.finish()
        finally:
            writer.close()
        drafts[0].replace(data)
        drafts[1].replace(index)
    except OSError as error:
        raise refuse("--output", f"'{stem}' cannot be written: {error.strerror}") from None
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return str(data)


def _copy(found: IndexedTokens, writer: IndexedWriter) -> None:
    """Append documents, as many at a time as `CHUNK` tokens hold; a longer one in parts."""
    starts, first, count = found.documents, 0, len(found.documents) - 1
    while first < count:
        last = int(np.searchsorted(starts, starts[first] + CHUNK, side="right")) - 1
        last = min(max(last, first + 1), count)
        begin, end = int(starts[first]), int(starts[last])
        if last == first + 1:
            for at in range(begin, max(end, begin + 1), MOST_SEQUENCE):
                part = found.tokens[at : min(end, at + MOST_SEQUENCE)]
                writer.add(part, np.array([len(part)]), ends=at + MOST_SEQUENCE >= end)
        else:
            writer.add(found.tokens[begin:end], np.diff(starts[first : last + 1]))
        first = last
