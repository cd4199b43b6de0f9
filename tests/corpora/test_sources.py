"""The same documents are the same tokens, whatever file and however many processes they come
from.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.corpora.written_sources import (
    DOCUMENTS,
    VOCAB,
    byte_tokens,
    write_jsonl,
    write_megatron,
    write_tokenizer,
)
from workbench.corpora import pieces as cutting
from workbench.corpora.encode_pool import encode_all
from workbench.corpora.encoder import Encoding
from workbench.corpora.megatron_files import read_indexed
from workbench.corpora.pieces import pieces
from workbench.corpora.tokenized_corpus import SourceTokens, load_corpus
from workbench.plan.corpus_files import source_files
from workbench.plan.schema import Corpus


def loaded(folder: Path, **fields: Any) -> SourceTokens:
    corpus = Corpus(**{"holdout": 0.0, **fields})
    (found,) = load_corpus(corpus, VOCAB, folder=folder / "cache").sources
    return found


def test_jsonl_and_parquet_are_documents(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    found = [loaded(tmp_path, source=str(rows))]
    found.append(
        loaded(tmp_path, source=str(write_jsonl(tmp_path / "b.ndjson", DOCUMENTS, "b")), field="b")
    )
    if pa := pytest.importorskip("pyarrow", reason="an extra"):
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
        found.append(loaded(tmp_path, source=str(tmp_path / "a.parquet")))
    for one in found:
        assert one.train.tolist() == byte_tokens(DOCUMENTS)
        assert (one.documents, one.skipped) == (4, 1)


def test_a_cache_entry_is_megatrons_format_with_its_documents(tmp_path: Path) -> None:
    found = loaded(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))
    assert found.path is not None
    tokens, documents, _ = read_indexed(found.path)
    written = [d.encode() for d in DOCUMENTS if d]
    assert [bytes(tokens[a:b].tolist()) for a, b in pairwise(documents)] == [
        d + b"\0" for d in written
    ]
    index = found.path.with_suffix(".idx").read_bytes()
    assert index[:34] == b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    lengths = [len(d) + 1 for d in written]
    assert struct.unpack("<4i", index[34:50]) == tuple(lengths)
    assert struct.unpack("<4q", index[50:82]) == tuple(2 * sum(lengths[:i]) for i in range(4))
    assert struct.unpack("<5q", index[82:]) == (0, 1, 2, 3, 4)


def test_a_tokenizer_of_ones_own_encodes_each_document(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    rows = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    found = loaded(tmp_path, source=str(rows), tokenizer=str(tmp_path))
    tokenizer = Tokenizer.from_file(str(path))
    expected = [i for d in DOCUMENTS if d for i in [*tokenizer.encode(d).ids, 0]]
    assert found.train.tolist() == expected
    other = loaded(tmp_path, source=str(rows), tokenizer=str(path), end_of_text="a")
    assert other.train[-1] == tokenizer.token_to_id("a") != 0


@pytest.mark.parametrize("suffix", ["npy", "u16", "bin", "idx", ""])
def test_files_of_tokens_are_mapped_where_they_are(tmp_path: Path, suffix: str) -> None:
    tokens = byte_tokens(DOCUMENTS)
    path = tmp_path / f"a.{suffix}" if suffix else tmp_path / "a"
    if suffix == "npy":
        np.save(path, np.array(tokens, np.int64))
    elif suffix == "u16":
        np.array(tokens, "<u2").tofile(path)
    else:
        write_megatron(tmp_path / "a", [tokens[:20], tokens[20:]])
    for _ in range(2):
        found = loaded(tmp_path, source=str(path))
        assert found.train.tolist() == tokens
        assert isinstance(found.train, np.memmap)
        assert found.documents == (1 if suffix in ("npy", "u16") else 2)
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_children_encode_the_same_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small pieces in two processes, and a long text file cut at line ends."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    rows = write_jsonl(tmp_path / "a.jsonl", [f"{d} {i}" for i in range(60) for d in DOCUMENTS])
    lines = [f"line {i}, quick fox\n" + " indented, \n" * (i % 3 == 0) for i in range(400)]
    text = tmp_path / "long.txt"
    text.write_text("".join(lines))
    for source in (rows, text):
        (files,) = source_files(Corpus(source=str(source)))
        encoding = Encoding(str(tokenizer), 0, VOCAB, "text")
        (whole, *_) = found = list(encode_all(encoding, pieces(files), 1))
        assert len(found) == 1
        with monkeypatch.context() as patch:
            patch.setattr(cutting, "JSONL_BYTES", 700)
            patch.setattr(cutting, "LONG_TEXT", 1000)
            patch.setattr(cutting, "TEXT_BYTES", 700)
            parts = list(encode_all(encoding, pieces(files), 1, processes=2))
        assert len(parts) > 10
        assert np.concatenate([one.tokens for one in parts]).tolist() == whole.tokens.tolist()
        if source == rows:
            assert np.concatenate([one.lengths for one in parts]).tolist() == whole.lengths.tolist()
        else:
            assert [one.ends for one in parts] == [False] * (len(parts) - 1) + [True]


def test_text_without_lines_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LONG_TEXT", 10), ("TEXT_BYTES", 7), ("LONG_LINE", 4)):
        monkeypatch.setattr(cutting, name, value)
    text = "aé漢😀" * 40
    (tmp_path / "a.txt").write_text(text)
    (files,) = source_files(Corpus(source=str(tmp_path / "a.txt")))
    found = list(pieces(files))
    content = text.encode()
    assert len(found) > 20
    assert "".join(content[p.start : p.stop].decode() for p in found) == text
    found_tokens = loaded(tmp_path, source=str(tmp_path / "a.txt"))
    assert found_tokens.documents == 1
    assert bytes(found_tokens.train.tolist()) == content + b"\0"
