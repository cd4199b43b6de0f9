"""The documents of a piece, in batches of bounded size; errors name the file and the row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from workbench.corpora.pieces import Piece, parquet_file
from workbench.runtime_facts.conversation_fields import rows_of_conversations
from workbench.untrusted_text import shown

BATCH_BYTES = 2**18
"""Bytes of text that the tokenizer is given at once: an encoding takes many times as many."""
BOM = b"\xef\xbb\xbf"


def documents(piece: Piece, column: str) -> Iterator[list[bytes]]:
    """Batches of the documents of `piece`, as UTF-8; an empty one is empty bytes.

    Args:
        piece: What to read.
        column: Field of a JSONL row, or column of a Parquet file.

    Raises:
        ValueError: A row is not what it should be; names the file and the row.
    """
    if piece.format == "text":
        yield [_read(piece)]
        return
    rows = _parquet_rows(piece, column) if piece.format == "parquet" else _json_rows(piece, column)
    batch: list[bytes] = []
    size = 0
    for text in rows:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def decoded(text: bytes, piece: Piece) -> str:
    """A document as text. Raises ValueError naming the file and the byte where it is no UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        at = piece.start + error.start
        raise ValueError(
            f"{piece.path}: byte {at} is {text[error.start]:#04x}, which is no UTF-8 text; convert "
            "the file to UTF-8, or leave corpus.tokenizer at bytes"
        ) from None


def _read(piece: Piece) -> bytes:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.stop - piece.start)


def _json_rows(piece: Piece, column: str) -> Iterator[bytes]:
    for i, row in json_objects(piece):
        yield _field(row, column, piece, i)


def json_objects(piece: Piece) -> Iterator[tuple[int, Any]]:
    """Rows of a piece of JSONL, each with its line in the piece, from 0.

    Raises:
        ValueError: A row is no JSON; names the file and the row.
    """
    block = _read(piece)
    if piece.start == 0:
        block = block.removeprefix(BOM)
    for i, line in enumerate(block.split(b"\n")):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except ValueError as error:
            why = str(error).partition(": line ")[0]
            raise ValueError(f"{row_name(piece, i)} is no JSON: {why}") from None
        yield i, row


def parquet_objects(piece: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a row group of Parquet with all their columns, each with its place in it, from 0."""
    file = parquet_file(Path(piece.path), "corpus")
    batches = file.iter_batches(batch_size=256, row_groups=[piece.start])
    yield from enumerate(row for batch in batches for row in batch.to_pylist())


def _field(row: Any, column: str, piece: Piece, i: int) -> bytes:
    if not isinstance(row, dict):
        raise ValueError(f"{row_name(piece, i)} is {shown(row)}; legal: an object with '{column}'")
    if column not in row:
        has = ", ".join(shown(name) for name in list(row)[:20]) or "none"
        raise ValueError(
            f"{row_name(piece, i)} has no field '{column}' (corpus.field); it has {has}; legal: "
            f"text there, or a conversation: {rows_of_conversations()}"
        )
    text = row[column]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ValueError(f"{row_name(piece, i)} has '{column}' = {shown(text)}; legal: text")
    return text.encode()


def row_name(piece: Piece, i: int) -> str:
    """The file and row `i` of a piece, counted from 1; the file is read again up to it."""
    if piece.format == "parquet":
        file = parquet_file(Path(piece.path), "corpus")
        before = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
        return f"{piece.path}: row {before + i + 1}"
    with open(piece.path, "rb") as file:
        before, left = 0, piece.start
        while left > 0 and (block := file.read(min(left, 2**24))):
            before, left = before + block.count(b"\n"), left - len(block)
    return f"{piece.path}: row {before + i + 1}"


def _parquet_rows(piece: Piece, column: str) -> Iterator[bytes]:
    file = parquet_file(Path(piece.path), "corpus")
    import pyarrow as pa

    row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
    batches = file.iter_batches(batch_size=256, row_groups=[piece.start], columns=[column])
    try:
        for batch in batches:
            for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                row += 1
                yield _utf8(value or b"", piece, row)
    except (OSError, pa.ArrowException) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{piece.path}: row group {piece.start} cannot be read: {why}") from None


def _utf8(text: bytes, piece: Piece, row: int) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{piece.path}: row {row} has byte {text[error.start]:#04x} at {error.start}, which is "
            "no UTF-8 text"
        ) from None
    return text
