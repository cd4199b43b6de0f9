"""Tokenized corpus: encoded once per machine, cached, and memory-mapped by every rank.

An entry of the cache is keyed by the sha256 of the source's content, the tokenizer and what else
decides its tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from workbench.corpora.bounded_child import StrangerError
from workbench.corpora.conversations.chat_encoder import (
    PLAIN_TEMPLATE,
    ChatEncoding,
    refuse_first_messages,
)
from workbench.corpora.encode_pool import encode_all
from workbench.corpora.encoder import BYTES, Encoding
from workbench.corpora.megatron_files import IndexedWriter, read_indexed
from workbench.corpora.pieces import pieces, total_bytes
from workbench.corpora.token_cache import (
    cache_folder,
    draft_of,
    locked,
    made_private,
    read_entry,
    remove_abandoned,
    write_entry,
    write_whole,
)
from workbench.corpora.token_files import check_tokens, ended_by, open_tokens
from workbench.corpora.tokenizers.model_tokenizer import tokens_around
from workbench.corpora.tokenizers.read_tokenizer import own_template
from workbench.corpora.tokenizers.text_tokenizer import (
    control_tokens,
    end_token,
    load_tokenizer,
    vocabulary_size,
)
from workbench.corpora.trained_bpe import sample_texts, train_bpe
from workbench.errors import PlanError, refuse
from workbench.plan import corpus_files, schema
from workbench.plan.corpus_files import TOKENIZED, UNINDEXED, SourceFiles, source_files
from workbench.runtime_facts.conversation_fields import FIELDS, PREFERENCES

FORMAT = 1
"""Changes when the same text is to become other tokens."""
Progress = Callable[[int, int, str], None]
"""Called with the bytes that are encoded, those of the source, and the source."""


def _silent(done: int, of: int, what: str) -> None:
    pass


@dataclass(frozen=True)
class SourceTokens:
    """Memory-mapped token ids of one source, all below the model's vocabulary."""

    source: str
    train: np.ndarray
    holdout: np.ndarray
    weight: float
    """Share of the samples, relative to the other sources."""
    documents: int
    """Of conversations how many there are, or pairs."""
    skipped: int
    """Documents without a token, which were left out."""
    sha256: str
    seconds: float | None = None
    """Time of encoding; None where the cache had the tokens."""
    path: Path | None = None
    """The .bin of the cache; None where the source holds the tokens itself."""
    boundaries: np.ndarray | None = None
    """int64: the first token of each document, ascending, counted from the first of `train`, after
    whose last the tokens of `holdout` go on; None where documents are not separated."""
    kind: str = "text"
    """Format of conversations, of which ids without loss are stored as their complement; else
    text."""
    conversations: np.ndarray | None = None
    """int64 [conversations + 1]: the first token of each, as in `boundaries`, and the number of
    tokens; None of text. Of preferences a pair is two: the chosen and the rejected one."""


@dataclass(frozen=True)
class TokenizedCorpus:
    """The sources of a corpus."""

    sources: tuple[SourceTokens, ...]
    tokenizer: str
    tokenizer_file: Path | None
    """tokenizer.json, trained or given; None for bytes."""
    vocab: int
    """Ids of the tokenizer are below it."""


def load_corpus(
    corpus: schema.Corpus,
    vocab: int,
    *,
    folder: Path | None = None,
    deadline: float = 900.0,
    progress: Progress = _silent,
    processes: int | None = None,
) -> TokenizedCorpus:
    """Tokens of a corpus; the first rank of a host encodes them while the others wait.

    A cached entry is used without reading the text.

    Args:
        corpus: The plan's corpus.
        vocab: Vocabulary of the model.
        folder: The cache; `cache_folder()` by default.
        deadline: Seconds to wait for another process that encodes the same corpus.
        progress: Called while text is encoded.
        processes: Processes that encode; by default one a core, and none for little text.

    Returns:
        Training and held-out tokens of each source.

    Raises:
        ValueError: The vocabulary is too small, the text is not the one that the plan was resolved
            with, a source is damaged or has no text, or another process holds the cache past
            `deadline`; names the field, the file and the row.
    """
    folder = made_private(folder or cache_folder())
    work = _Work(corpus, vocab, folder, deadline, progress, processes)
    encoding = work.encoding()
    found = [work.source_tokens(part, i, encoding) for i, part in enumerate(work.parts())]
    tokenizer = Path(encoding.tokenizer) if encoding and encoding.tokenizer else None
    size = encoding.vocab if encoding else vocab
    return TokenizedCorpus(tuple(found), corpus.tokenizer, tokenizer, size)


def check_encoding(corpus: schema.Corpus, vocab: int) -> None:
    """Check, before a rank starts, what every rank would refuse before it encodes: the tokenizer,
    and that messages have a chat template.

    Raises:
        PlanError: Naming the field, and the first row.
    """
    if corpus.tokenizer in ("bytes", "bpe"):
        return
    work = _Work(corpus, vocab, cache_folder(), 0.0, _silent, None)
    encoding = work.encoding()
    for files in work.files():
        if files.format in FIELDS and work._chat(files.format, encoding).template is None:
            try:
                refuse_first_messages(pieces(files), files.format)
            except PlanError:
                raise
            except ValueError as error:
                raise refuse(f"{files.where}.source", str(error)) from None


@dataclass
class _Work:
    corpus: schema.Corpus
    vocab: int
    folder: Path
    deadline: float
    progress: Progress
    processes: int | None
    _files: list[SourceFiles] | None = None

    def files(self) -> list[SourceFiles]:
        """Files of every source, looked for once: a cached entry is used without them."""
        if self._files is None:
            self._files = source_files(self.corpus)
        return self._files

    def parts(self) -> Sequence[schema.TextSource]:
        """The sources of the corpus."""
        return self.corpus.mix or [self.corpus]

    def encoding(self) -> Encoding:
        """How text becomes tokens; trains the BPE where there is none in the cache."""
        asked = self.corpus.tokenizer
        if asked == "bytes":
            self._check_vocab(BYTES)
            return Encoding(None, 0, BYTES, "text")
        if asked == "bpe":
            self._check_vocab(BYTES + 1)
            return Encoding(str(self._bpe()), 0, self.vocab, "text")
        path = corpus_files.tokenizer_path(self.corpus)
        assert path is not None
        tokenizer = load_tokenizer(path)
        size = vocabulary_size(tokenizer)
        if size > self.vocab:
            raise refuse(
                "corpus.tokenizer",
                f"{path} has {size} ids, the model a vocabulary of {self.vocab}; legal: the "
                f"model's own tokenizer, or model.vocab of at least {size}",
            )
        end = end_token(path, tokenizer, self.corpus.end_of_text)
        before, after = tokens_around(tokenizer, path, "corpus.tokenizer")
        after = after[:-1] if after[-1:] == [end] else after
        found = Encoding(str(path.absolute()), end, size, "text")
        return replace(found, before=before, after=after)

    def source_tokens(
        self, part: schema.TextSource, index: int, encoding: Encoding
    ) -> SourceTokens:
        """The tokens of one source, from the cache or encoded now."""
        sha256 = _pinned(part) or corpus_files.corpus_sha256(self.files()[index])
        kind = corpus_files.source_format(part)
        tokenized = kind in TOKENIZED
        if kind in FIELDS:
            encoding = replace(encoding, chat=self._chat(kind, encoding))
        key = _key(sha256, kind, part, None if tokenized else encoding, self.vocab)
        began, encoded = time.monotonic(), False
        entry = read_entry(self.folder, key)
        if entry is None:
            with locked(self.folder / f"{key}.lock", self.deadline):
                entry = read_entry(self.folder, key)
                if entry is None:
                    encoded = True
                    files = self._unchanged(index, sha256)
                    entry = self._list(files, sha256, key) if tokenized else None
                    entry = entry or self._encode(files, encoding, key)
        if tokenized:
            indexed = open_tokens(self.files()[index])
        else:
            indexed = read_indexed(self.folder / f"{key}.bin")
        boundaries, tokens, documents = None, indexed.tokens, entry["documents"]
        if kind not in FIELDS and self.corpus.separate_documents:
            marked = kind in UNINDEXED
            boundaries = ended_by(tokens, encoding.end) if marked else indexed.documents[:-1]
            if len(boundaries) >= len(tokens) == len(np.unique(boundaries)):
                raise refuse(
                    "corpus.separate_documents",
                    f"is true, and all {len(tokens):,} documents of {part.source} have one token, "
                    f"which predicts none; legal: false, or longer documents",
                )
        split = len(tokens) - int(len(tokens) * self.corpus.holdout)
        if kind in FIELDS:
            groups = len(indexed.documents) - 1
            split = int(indexed.documents[groups - int(groups * self.corpus.holdout)])
            documents = (len(indexed.sequences) - 1) // (1 + (kind == PREFERENCES))
        return SourceTokens(
            source=part.source,
            train=tokens[:split],
            holdout=tokens[split:],
            weight=part.weight if isinstance(part, schema.WeightedSource) else 1.0,
            documents=documents,
            skipped=entry["skipped"],
            sha256=sha256,
            seconds=time.monotonic() - began if encoded else None,
            path=None if tokenized else self.folder / f"{key}.bin",
            boundaries=boundaries,
            kind=kind if kind in FIELDS else "text",
            conversations=indexed.sequences if kind in FIELDS else None,
        )

    def _chat(self, kind: str, encoding: Encoding) -> ChatEncoding:
        """How conversations become tokens: the chat template is the plan's, or the tokenizer's."""
        template, path = corpus_files.template_text(self.corpus), encoding.tokenizer
        special, controls = {"eos_token": "\0"}, []
        if path is not None:
            tokenizer = load_tokenizer(Path(path))
            own, special = own_template(Path(path))
            template, controls = template or own, control_tokens(tokenizer)
            special.setdefault("eos_token", str(tokenizer.id_to_token(encoding.end)))
        if self.corpus.tokenizer in ("bytes", "bpe"):
            template = template or PLAIN_TEMPLATE
        return ChatEncoding(kind, template, special, controls, self.corpus.loss_on == "all")

    def _check_vocab(self, least: int) -> None:
        if self.vocab < least:
            raise refuse(
                "corpus.tokenizer",
                f"{self.corpus.tokenizer} needs a model vocabulary of at least {least}, the model "
                f"has {self.vocab}",
            )

    def _unchanged(self, index: int, sha256: str) -> SourceFiles:
        """The files of a source, which must be what the plan was resolved with."""
        files = self.files()[index]
        now = corpus_files.corpus_sha256(files)
        if now != sha256:
            raise refuse(
                f"{files.where}.sha256",
                f"the plan was resolved with {sha256[:12]}…, {files.source} now has {now[:12]}…; "
                f"restore the text, or remove {files.where}.sha256 to train on the present one",
            )
        return files

    def _list(self, files: SourceFiles, sha256: str, key: str) -> dict[str, Any]:
        """Check a file that holds tokens, and note that it is checked."""
        found = open_tokens(files)
        if len(found.tokens) < 2:
            raise refuse(f"{files.where}.source", f"{files.source} has no tokens")
        check_tokens(found, self.vocab, files)
        facts = {"documents": len(found.documents) - 1, "skipped": 0}
        hashes = {p.absolute(): corpus_files.file_sha256(p, "corpus").hex() for p in files.paths}
        write_entry(self.folder, key, facts, hashes)
        return facts

    def _encode(self, files: SourceFiles, encoding: Encoding, key: str) -> dict[str, Any]:
        data, index = self.folder / f"{key}.bin", self.folder / f"{key}.idx"
        drafts = draft_of(data), draft_of(index)
        remove_abandoned(self.folder, key)
        for draft in drafts:
            draft.touch(0o600)
        encoding = replace(encoding, column=files.column)
        try:
            writer = IndexedWriter(*drafts, encoding.dtype)
            try:
                skipped = self._write(files, encoding, writer)
                documents, sha256 = writer.finish()
            finally:
                writer.close()
            if writer.count < 2:
                empty = f": all {skipped} documents are empty" if skipped else ""
                what = "conversations" if encoding.chat else "text"
                raise refuse(f"{files.where}.source", f"{files.source} has no {what}{empty}")
            if entry := read_entry(self.folder, key, report=False):
                return entry  # another node was faster, and ranks map its file already
            drafts[0].replace(data)
            drafts[1].replace(index)
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)
        facts = {"documents": documents, "skipped": skipped}
        hashes = {data: sha256, index: corpus_files.file_sha256(index, "corpus").hex()}
        write_entry(self.folder, key, facts, hashes)
        return facts

    def _write(self, files: SourceFiles, encoding: Encoding, writer: IndexedWriter) -> int:
        """Encode a source into `writer`; returns how many documents were skipped."""
        total, done, skipped = total_bytes(files), 0, 0
        each = 2 if files.format == PREFERENCES else 1
        if files.source == "stdlib" and encoding.chat is not None:
            each = 0  # docstrings of a module are alike: none is held out from its others
        try:
            for part in encode_all(encoding, pieces(files), total, self.processes):
                writer.add(part.tokens, part.lengths, part.ends, each)
                skipped += part.skipped
                done += part.size
                self.progress(done, total, files.source)
        except PlanError:
            raise
        except StrangerError as error:
            given = self.corpus.template if error.what == "chat template" else None
            where, name = ("template", given) if given else ("tokenizer", self.corpus.tokenizer)
            words = f"the {error.what} of '{name}' {error}; get the file again"
            raise refuse(f"corpus.{where}", words) from None
        except ValueError as error:
            raise refuse(f"{files.where}.source", str(error)) from None
        return skipped

    def _bpe(self) -> Path:
        """A BPE of the model's vocabulary, trained on all sources of text together."""
        for at, part in enumerate(self.parts()):
            if corpus_files.source_format(part) in TOKENIZED:
                where = f"corpus.mix.{at}" if self.corpus.mix else "corpus"
                raise refuse(
                    f"{where}.source",
                    f"{part.source} holds tokens, on which corpus.tokenizer = bpe cannot be "
                    "trained; legal: bytes, or the tokenizer.json that they are of",
                )
        path = self.bpe_path()
        if not path.exists():
            with locked(path.with_suffix(".lock"), self.deadline):
                if not path.exists():
                    for index, part in enumerate(self.parts()):
                        if pinned := _pinned(part):
                            self._unchanged(index, pinned)
                    try:
                        trained = train_bpe(sample_texts(self.files()), self.vocab)
                    except PlanError:
                        raise
                    except ValueError as error:
                        raise refuse("corpus.source", str(error)) from None
                    write_whole(path, trained.to_str())
        return path

    def bpe_path(self) -> Path:
        """Path in the cache of the BPE that is trained on the corpus."""
        sha256 = self.corpus.sha256
        if sha256 is None:
            hashes = [corpus_files.corpus_sha256(one) for one in self.files()]
            sha256 = corpus_files.mixed_sha256(hashes) if self.corpus.mix else hashes[0]
        kinds = sorted({corpus_files.source_format(p) for p in self.parts()} & set(FIELDS))
        name = "-".join([sha256[:32], *kinds, "bpe", str(self.vocab)])
        return self.folder / f"{name}.tokenizer.json"


def _pinned(part: schema.TextSource) -> str | None:
    """The hash of a source that the plan was resolved with."""
    return part.sha256 if isinstance(part, schema.Corpus | schema.WeightedSource) else None


def tokenizer_file(corpus: schema.Corpus, vocab: int) -> Path | None:
    """The tokenizer.json or GGUF file that a corpus was encoded with; None for bytes, and for a BPE
    that the cache no longer has.

    Raises:
        PlanError: A file is gone.
    """
    if corpus.tokenizer != "bpe":
        return corpus_files.tokenizer_path(corpus)
    path = _Work(corpus, vocab, cache_folder(), 0.0, _silent, None).bpe_path()
    return path if path.is_file() else None


def _key(
    sha256: str, kind: str, part: schema.TextSource, encoding: Encoding | None, vocab: int
) -> str:
    """Name of the entry that holds these tokens."""
    how: dict[str, Any] = {"format": FORMAT, "kind": kind, "field": part.field, "dtype": part.dtype}
    if encoding is None:
        how |= {"vocab": vocab, "path": str(Path(part.source).expanduser().absolute())}
    else:
        tokenizer = encoding.tokenizer
        how |= {"before": [*encoding.before], "after": [*encoding.after, encoding.end]}
        how["vocab"] = encoding.vocab
        if encoding.chat is not None:
            how["chat"] = asdict(encoding.chat)
        how["tokenizer"] = (
            tokenizer and corpus_files.file_sha256(Path(tokenizer), "corpus.tokenizer").hex()
        )
    words = json.dumps(how, sort_keys=True).encode()
    return f"{sha256[:32]}-{hashlib.sha256(words).hexdigest()[:16]}"
