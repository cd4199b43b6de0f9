"""Sources of every format that hold the same documents, and a small tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from workbench.corpora.megatron_files import IndexedWriter
from workbench.corpora.trained_bpe import train_bpe

DOCUMENTS = ["the quick brown fox", "", "jumps over\nthe lazy dog", "a", "häßliche Wörter " * 9]
"""One is empty, and one is a single token."""
VOCAB = 300


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, field: d}) + "\n" for i, d in enumerate(documents))
    )
    return path


def write_tokenizer(path: Path) -> Path:
    train_bpe(iter(DOCUMENTS * 3), VOCAB).save(str(path))
    return path


def byte_tokens(documents: list[str]) -> list[int]:
    """Byte-level tokens, byte 0 after each document that is not empty."""
    return list(b"".join(d.encode() + b"\0" for d in documents if d))


def write_megatron(prefix: Path, documents: list[list[int]]) -> Path:
    data = prefix.with_name(prefix.name + ".bin")
    writer = IndexedWriter(data, data.with_suffix(".idx"), np.dtype(np.uint16))
    for one in documents:
        writer.add(np.array(one, np.uint16), np.array([len(one)]))
    writer.finish()
    return data
