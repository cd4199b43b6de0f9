"""Damaged and unfit sources are refused in one sentence that names the field and the place, and
leave nothing in the cache.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora.written_sources import (
    DOCUMENTS,
    VOCAB,
    byte_tokens,
    write_jsonl,
    write_megatron,
    write_tokenizer,
)
from workbench.corpora.tokenized_corpus import load_corpus
from workbench.errors import PlanError
from workbench.plan.corpus_files import source_format
from workbench.plan.schema import Corpus

TAKES = "bytes, 2 sequences and 3 document boundaries take 82"
GOOD = json.dumps({"text": "some text"}).encode() + b"\n"
JSONL: dict[str, tuple[bytes, str]] = {
    "truncated": (GOOD * 3 + GOOD[:9], r"a\.jsonl: row 4 is no JSON"),
    "not UTF-8": (GOOD + b'{"text": "\xe9t\xe9"}\n', r"row 2 is no JSON: .*UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "row 1 is no JSON"),
    "half a character": (GOOD + b'{"text": "\\ud800"}\n', "row 2 is no JSON"),
    "no object": (GOOD + b"[1, 2]\n", r"row 2 is \[1, 2\]; legal: an object with 'text'"),
    "no field": (GOOD + b'{"body": "x"}\n', r"row 2 has no field 'text' .*it has 'body'"),
    "rows of another kind": (
        b'{"instruction": "a", "output": "b"}\n',
        "it has 'instruction', 'output'; legal: text there, or a conversation: 'messages', or "
        "'prompt' and 'completion', or 'chosen' and 'rejected'",
    ),
    "a number": (GOOD + b'{"text": 12}\n', "row 2 has 'text' = 12; legal: text"),
    "binary": (bytes(range(256)) * 9, "row 1 is no JSON"),
    "all empty": (b'{"text": ""}\n{"text": null}\n', "no text: all 2 documents are empty"),
    "no rows": (b"\n\n", "has no text"),
}


def refused(folder: Path, match: str, **fields: Any) -> None:
    cache = folder / "cache"
    with pytest.raises(PlanError, match=match) as raised:
        load_corpus(Corpus(**fields), VOCAB, folder=cache)
    assert raised.value.problems[0].field.startswith("corpus.")
    assert "\n" not in str(raised.value)
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}


@pytest.mark.parametrize("damage", JSONL)
def test_damaged_jsonl(tmp_path: Path, damage: str) -> None:
    content, match = JSONL[damage]
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    refused(tmp_path, match, source=str(path))


CHAT = json.dumps({"prompt": "a", "completion": "b"}).encode() + b"\n"


def test_conversations_are_not_read_as_text(tmp_path: Path) -> None:
    """What says that a file holds rows is its first row, whatever its name and its later rows."""
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(CHAT)
    held = r"holds completions \(.*a\.jsonl\); legal: corpus\.format: completions, or .*text"
    refused(tmp_path, held, source=str(folder))
    assert load_corpus(Corpus(source=str(folder), format="text"), VOCAB, folder=tmp_path / "text")
    array = tmp_path / "a.json"
    array.write_bytes(b" [\n" + CHAT + b"]")
    refused(tmp_path, "is one JSON array of rows; legal: JSONL", source=str(array))
    array.write_bytes(CHAT)
    assert source_format(Corpus(source=str(array))) == "completions"
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(CHAT + b'{"prompt": "\xe9"}\n')
    refused(tmp_path, "row 2 is no JSON: .*UTF-8", source=str(latin))


def test_rows_are_counted_over_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.corpora.pieces.JSONL_BYTES", 50)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 40 + b'{"text": 1}\n' + GOOD * 40)
    refused(tmp_path, "row 41 has 'text' = 1", source=str(path))


def overwritten(at: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:at] + content + old[at + len(content) :]


INDEX: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda old: b"", "is no index of Megatron-LM's format"),
    "truncated head": (lambda old: old[:20], "is no index of Megatron-LM's format"),
    "truncated": (lambda old: old[:-5], f"has 77 {TAKES}"),
    "longer": (lambda old: old + b"\0", f"has 83 {TAKES}"),
    "other magic": (overwritten(0, b"TNTIDX"), "is no index of Megatron-LM's format"),
    "other version": (overwritten(9, struct.pack("<Q", 2)), "is of version 2; legal: 1"),
    "floats": (overwritten(17, b"\x06"), "names dtype 6; legal: 1, 2"),
    "other dtype": (overwritten(17, b"\x04"), "sequence 1 is at byte 40"),
    "many sequences": (overwritten(18, struct.pack("<Q", 2**60)), "sequences and 3 document"),
    "negative length": (overwritten(34, struct.pack("<i", -1)), "sequence 0 has -1 tokens"),
    "other length": (overwritten(34, struct.pack("<i", 19)), "sequence 1 is at byte 40"),
    "pointer": (overwritten(50, struct.pack("<q", 2)), "sequence 1 is at byte 2, .* at 40"),
    "documents": (overwritten(58, struct.pack("<3q", 0, 9, 2)), "do not go from sequence 0 to 2"),
}


@pytest.mark.parametrize("damage", INDEX)
def test_damaged_index(tmp_path: Path, damage: str) -> None:
    change, match = INDEX[damage]
    tokens = byte_tokens(DOCUMENTS)
    data = write_megatron(tmp_path / "a", [tokens[:20], tokens[20:]])
    index = data.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    refused(tmp_path, match, source=str(data))


TOKENS: dict[str, tuple[str, bytes, str]] = {
    "odd bytes": ("a.u16", b"\0" * 7, "has 7 bytes, which 2 does not divide"),
    "no tokens": ("a.u16", b"\1\0", "has no tokens"),
    "other vocabulary": ("a.u16", struct.pack("<3H", 1, 2, 301), "token 2 is 301, .* of 300"),
    "negative": ("a.i32", struct.pack("<3i", 1, -5, 3), "token 1 is -5, the model"),
    "no .npy": ("a.npy", b"hello" * 20, "is no intact .npy file"),
    "no dtype": ("a.bin", b"\0\0", "is needed to read raw tokens; legal: uint8"),
}


@pytest.mark.parametrize("damage", TOKENS)
def test_damaged_tokens(tmp_path: Path, damage: str) -> None:
    name, content, match = TOKENS[damage]
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, match, source=str(tmp_path / name))


def test_arrays_that_are_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 3), np.int64))
    refused(tmp_path, r"holds int64 \[2, 3\]; legal: one", source=str(tmp_path / "a.npy"))
    np.save(tmp_path / "b.npy", np.ones(9))
    refused(tmp_path, r"holds float64 \[9\]; legal: one", source=str(tmp_path / "b.npy"))
    np.save(tmp_path / "c.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    refused(tmp_path, "c.npy is no intact", source=str(tmp_path / "c.npy"))
    np.save(tmp_path / "d.npy", np.ones(999, np.int32))
    content = (tmp_path / "d.npy").read_bytes()
    (tmp_path / "d.npy").write_bytes(content[: len(content) // 2])
    refused(tmp_path, "d.npy is no intact", source=str(tmp_path / "d.npy"))


def test_a_bin_that_does_not_match_its_index(tmp_path: Path) -> None:
    data = write_megatron(tmp_path / "a", [byte_tokens(DOCUMENTS)])
    data.write_bytes(data.read_bytes()[:-2])
    refused(tmp_path, "a.bin has .* its index says", source=str(data))
    data.unlink()
    refused(tmp_path, "a.bin is missing", source=str(tmp_path / "a.idx"))


def test_text_that_is_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff" * 9)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    match = "a.txt: byte 3 is 0xff, which is no UTF-8 text"
    refused(tmp_path, match, source=str(path), tokenizer=tokenizer)
    refused(tmp_path, match, source=str(path), tokenizer="bpe")


def test_tokenizers_that_do_not_fit(tmp_path: Path) -> None:
    rows = str(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    path = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(PlanError, match=r"tokenizer: .* ids, the model a vocabulary of 256"):
        load_corpus(Corpus(source=rows, tokenizer=str(path)), 256, folder=tmp_path / "cache")
    match = "end_of_text: is '<eos>', which .* does not have"
    refused(tmp_path, match, source=rows, tokenizer=str(path), end_of_text="<eos>")
    path.write_text(path.read_text()[:100])
    refused(tmp_path, "is no tokenizer of the", source=rows, tokenizer=str(path))
    refused(tmp_path, "is no file; legal: bytes, bpe", source=rows, tokenizer="no/such.json")


def test_damaged_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": DOCUMENTS * 50, "id": range(250)}), path)
    good = path.read_bytes()
    refused(tmp_path, "is 'body', which .* legal: 'text', 'id'", source=str(path), field="body")
    refused(tmp_path, "is 'id', which holds int64", source=str(path), field="id")
    for content in (good[: len(good) // 2], b"hello", good[:-4] + b"PAR2"):
        path.write_bytes(content)
        refused(tmp_path, "a.parquet is no intact Parquet file", source=str(path))
    parquet.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), path)
    legal = "legal: 'prompt', 'completion', or corpus.format: completions"
    refused(tmp_path, legal, source=str(path))
    path.write_bytes(good[:4] + b"\xff" * 60 + good[64:])
    refused(tmp_path, "a.parquet", source=str(path))
    latin = pa.array([b"abc", b"\xe9t\xe9"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": latin}), path)
    refused(tmp_path, "row 2 has byte 0xe9 at 0", source=str(path))


def test_mixtures_that_are_none(tmp_path: Path) -> None:
    rows = str(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    bad = tmp_path / "b.jsonl"
    bad.write_bytes(b"nonsense")
    part = {"source": rows, "weight": 1.0}
    with pytest.raises(ValueError, match="weights sum to 0; legal: a weight above 0"):
        Corpus.model_validate({"mix": [{**part, "weight": 0.0}]})
    with pytest.raises(ValueError, match="has mix and source; legal: mix, or one source"):
        Corpus.model_validate({"source": rows, "mix": [part]})
    mix = [part, {"source": str(bad), "weight": 1.0}]
    with pytest.raises(PlanError, match=r"corpus\.mix\.1\.source: .*b.jsonl: row 1 is no JSON"):
        corpus = Corpus.model_validate({"mix": mix})
        load_corpus(corpus, VOCAB, folder=tmp_path / "cache")
