"""Tokenized corpus: encoded once per machine, cached, and memory-mapped by every rank.

The cache is keyed by the text's sha256, the tokenizer and the vocabulary. `KEY.bin` holds the raw
tokens, `KEY.json` their number and checksum. The second is written last, so an entry without it, or
with another content, does not count. Content is compared by the file's inode and mtime, and by
sha256 where those differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.plan.corpus_files import corpus_sha256, files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenizers import Tokenizer

    from workbench.plan import schema

BYTES = 256
END = "<|end|>"
"""End-of-text token: token 0 of a BPE, byte 0 of byte-level tokens; separates files."""
TRAIN_BYTES = 16 * 2**20
"""Text that a BPE is trained on, sampled evenly over the files."""


@dataclass(frozen=True)
class Tokens:
    """Memory-mapped token ids (uint16, or uint32 beyond 65,536 ids), all below `vocab`."""

    train: np.ndarray
    holdout: np.ndarray
    vocab: int
    sha256: str
    tokenizer: str
    tokenizer_file: Path | None
    """The trained BPE, in the `tokenizers` library's JSON; None for bytes."""


def cache_folder() -> Path:
    """The token cache: `workbench/tokens` under the user's XDG cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench" / "tokens"


def load_corpus(
    corpus: schema.Corpus, vocab: int, *, folder: Path | None = None, deadline: float = 900.0
) -> Tokens:
    """Tokens of a corpus; the first rank of a host encodes them while the others wait.

    A cached entry is used without reading the text.

    Args:
        corpus: The plan's corpus.
        vocab: Vocabulary of the model.
        folder: The cache; `cache_folder()` by default.
        deadline: Seconds to wait for another process that encodes the same corpus.

    Returns:
        Training and held-out tokens.

    Raises:
        ValueError: The vocabulary is too small, the text is not the one that the plan was resolved
            with, or another process holds the cache past `deadline`; names the field.
    """
    _check_vocab(corpus, vocab)
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = corpus.sha256 or corpus_sha256(corpus.source)
    size = BYTES if corpus.tokenizer == "bytes" else vocab
    key = f"{sha256[:32]}-{corpus.tokenizer}-{size}"
    if not _complete(folder, key):
        with _only_one(folder / f"{key}.lock", deadline):
            if not _complete(folder, key):
                _build(corpus, sha256, size, folder, key)
    return _open(corpus, sha256, folder, key)


def _check_vocab(corpus: schema.Corpus, vocab: int) -> None:
    least = BYTES + (corpus.tokenizer == "bpe")
    if vocab < least:
        raise ValueError(
            f"corpus.tokenizer: {corpus.tokenizer} needs a model vocabulary of at least {least}, "
            f"the model has {vocab}"
        )


def _dtype(size: int) -> np.dtype:
    return np.dtype(np.uint16 if size <= 2**16 else np.uint32)


def _complete(folder: Path, key: str, report: bool = True) -> bool:
    """Whether the entry exists and is intact; prints that it is damaged where `report`."""
    path = folder / f"{key}.bin"
    try:
        meta = json.loads((folder / f"{key}.json").read_text())
        if path.stat().st_size != meta["count"] * np.dtype(meta["dtype"]).itemsize:
            return False
        if meta["stamp"] == _stamp(path) or meta["tokens_sha256"] == _sha256(path):
            return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if report:
        print(
            f"corpus: the tokens in {path} are damaged; encoding the corpus again", file=sys.stderr
        )
    return False


def _stamp(path: Path) -> list[int]:
    """Inode, mtime and size: they change when a file is replaced or written to."""
    seen = path.stat()
    return [seen.st_ino, seen.st_mtime_ns, seen.st_size]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _only_one(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock file, which the kernel releases when its holder dies.

    A file system without locks (Lustre without `-o flock`) lets everybody in: entries are replaced
    whole, so that several may be made at once.

    Raises:
        ValueError: Another process holds it past `deadline` seconds.
    """
    until = time.monotonic() + deadline
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ValueError(
                        f"corpus: another process has been encoding it for {deadline:.0f} s "
                        f"(lock {path}); end it, or choose a smaller corpus.source"
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                words = (
                    f"corpus: no lock on {path} ({error.strerror}): every rank encodes it itself"
                )
                print(words, file=sys.stderr)
                break
        yield


def _build(corpus: schema.Corpus, sha256: str, size: int, folder: Path, key: str) -> None:
    now = corpus_sha256(corpus.source)
    if now != sha256:
        raise ValueError(
            f"corpus.sha256: the plan was resolved with {sha256[:12]}…, {corpus.source} now has "
            f"{now[:12]}…; restore the text, or remove corpus.sha256 to train on the present one"
        )
    paths = files(corpus.source)
    encode = _bytes_of if corpus.tokenizer == "bytes" else _bpe(paths, size, folder, key)
    count = 0
    path = folder / f"{key}.bin"
    temporary = _draft(path)
    try:
        with temporary.open("wb") as out:
            for file in paths:
                ids = np.asarray(encode(file), dtype=_dtype(size))
                out.write(ids.tobytes())
                count += len(ids)
        if _complete(
            folder, key, report=False
        ):  # another node was faster, and ranks map its file already
            return
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    meta = {"count": count, "dtype": _dtype(size).name, "sha256": sha256}
    _write(
        folder / f"{key}.json",
        json.dumps({**meta, "stamp": _stamp(path), "tokens_sha256": _sha256(path)}),
    )


def _write(path: Path, text: str) -> None:
    temporary = _draft(path)
    temporary.write_text(text)
    temporary.replace(path)


def _draft(path: Path) -> Path:
    """Where this process writes what is to become `path`; nodes that share it have equal process
    numbers.
    """
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")


def _bytes_of(path: Path) -> np.ndarray:
    """The file's bytes and the end byte."""
    return np.frombuffer(path.read_bytes() + b"\0", dtype=np.uint8)


def _bpe(paths: list[Path], size: int, folder: Path, key: str) -> Callable[[Path], list[int]]:
    """Train a byte-level BPE, which has no out-of-vocabulary text, save it, return its encoder."""
    tokenizer = train_bpe(_sample(paths), size)
    _write(folder / f"{key}.tokenizer.json", tokenizer.to_str())
    return lambda path: [*tokenizer.encode(_text(path)).ids, 0]


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def _sample(paths: list[Path]) -> Iterator[str]:
    """Texts of every n-th file, about `TRAIN_BYTES` in all."""
    total = sum(path.stat().st_size for path in paths)
    return (_text(path) for path in paths[:: max(1, round(total / TRAIN_BYTES))])


def train_bpe(texts: Iterator[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens; deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _open(corpus: schema.Corpus, sha256: str, folder: Path, key: str) -> Tokens:
    meta = json.loads((folder / f"{key}.json").read_text())
    if meta["count"] < 2:
        raise ValueError(f"corpus.source: {corpus.source} has no text")
    tokens = np.memmap(folder / f"{key}.bin", dtype=meta["dtype"], mode="r")
    split = len(tokens) - int(len(tokens) * corpus.holdout)
    bpe = folder / f"{key}.tokenizer.json"
    return Tokens(
        train=tokens[:split],
        holdout=tokens[split:],
        vocab=BYTES if corpus.tokenizer == "bytes" else int(key.rsplit("-", 1)[1]),
        sha256=sha256,
        tokenizer=corpus.tokenizer,
        tokenizer_file=bpe if corpus.tokenizer == "bpe" else None,
    )
