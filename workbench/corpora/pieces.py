"""Parts of a source that one process encodes at once, so that memory does not grow with the text.

A text file is one document, and is cut only beyond `LONG_TEXT`. Rows of JSONL and row groups of
Parquet are documents; a piece holds many of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import refuse
from workbench.runtime_facts.conversation_fields import FIELDS, row_format

if TYPE_CHECKING:  # the children that encode pieces start faster without the plan's schema
    from workbench.plan.corpus_files import SourceFiles

JSONL_BYTES = 2**20
"""Bytes of a piece of JSONL, up to the end of its last row."""
LONG_TEXT = 2**24
"""Bytes of a text file that is encoded in one go; a longer one is cut at line ends."""
TEXT_BYTES = 2**20
"""Bytes of a piece of a long text file, up to its next line end between two written lines."""
LOOK_BYTES = 2**16
"""Bytes in which such a line end is looked for; without one the text is cut at the next line end,
and the tokens at the cut may be others."""
LONG_LINE = 2**24
"""Bytes after which a line is cut at the end of a character."""
LONG_ROW = 2**30
"""Bytes of one row of JSONL; longer ones are refused."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of a file; of Parquet, row group `start`."""

    format: str
    path: str
    start: int
    stop: int
    size: int
    """Bytes that progress counts."""
    ends: bool = True
    """Whether its last document ends with it."""


def pieces(of: SourceFiles) -> Iterator[Piece]:
    """The pieces of a source of text, in order; reads only where they are cut.

    Raises:
        PlanError: A file cannot be read, or is no Parquet file with the column.
    """
    for path in of.paths:
        try:
            kind = row_file(path) if of.format in FIELDS else of.format
            if kind == "python":
                size = path.stat().st_size
                yield Piece(kind, str(path), 0, size, size)
            elif kind == "parquet":
                yield from _row_groups(path, of)
            elif kind == "jsonl":
                yield from _rows(path, of)
            else:
                yield from _text(path)
        except OSError as error:
            raise refuse(f"{of.where}.source", f"{path} cannot be read: {error}") from None


def row_file(path: Path) -> str:
    """How a file of conversations is read: a module's docstrings, Parquet, else JSONL."""
    return {".py": "python", ".parquet": "parquet"}.get(path.suffix, "jsonl")


def total_bytes(of: SourceFiles) -> int:
    """What the sizes of all pieces add up to; of Parquet the compressed bytes, which are less."""
    return sum(path.stat().st_size for path in of.paths)


def _rows(path: Path, of: SourceFiles) -> Iterator[Piece]:
    with path.open("rb") as file:
        size, start = path.stat().st_size, 0
        while start < size:
            file.seek(start + JSONL_BYTES - 1)
            rest = file.readline(LONG_ROW)
            if len(rest) == LONG_ROW:
                raise refuse(
                    f"{of.where}.source",
                    f"{path} has a row of more than {LONG_ROW:,} bytes after byte {start}; is it "
                    "JSONL, one object a line?",
                )
            stop = min(size, file.tell())
            yield Piece("jsonl", str(path), start, stop, stop - start)
            start = stop


def _text(path: Path) -> Iterator[Piece]:
    size = path.stat().st_size
    if size <= LONG_TEXT:
        yield Piece("text", str(path), 0, size, size)
        return
    with path.open("rb") as file:
        start = 0
        while start < size:
            stop = _cut(file, start + TEXT_BYTES, size)
            yield Piece("text", str(path), start, stop, stop - start, ends=stop == size)
            start = stop


def _cut(file: Any, after: int, size: int) -> int:
    """Where a text may be cut: between lines of which neither ends or begins with white space, so
    that a tokenizer that splits at line ends makes the same tokens; else after a line, else after a
    character.
    """
    if after >= size:
        return size
    file.seek(after)
    if clean := re.search(rb"[^\s]\n(?=[^\s])", file.read(LOOK_BYTES)):
        return after + clean.end()
    file.seek(after)
    line = file.readline(LONG_LINE)
    stop = after + len(line)
    return stop if line.endswith(b"\n") else _character_end(file, stop, size)


def _character_end(file: Any, here: int, size: int) -> int:
    file.seek(here)
    following = file.read(3)
    extra = next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))
    return min(here + extra, size)


def _row_groups(path: Path, of: SourceFiles) -> Iterator[Piece]:
    file = parquet_file(path, of.where)
    if of.format not in FIELDS:
        _check_column(path, file.schema_arrow, of)
    groups = file.num_row_groups
    share = path.stat().st_size // max(1, groups)
    for group in range(groups):
        yield Piece("parquet", str(path), group, group + 1, share)


def _check_column(path: Path, schema: Any, of: SourceFiles) -> None:
    if of.column not in schema.names:
        has = ", ".join(f"'{name}'" for name in schema.names[:20])
        if kind := row_format(dict.fromkeys(schema.names)):
            has += f", or {of.where}.format: {kind}"
        raise refuse(
            f"{of.where}.field", f"is '{of.column}', which {path} does not have; legal: {has}"
        )
    kind = str(schema.field(of.column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise refuse(
            f"{of.where}.field", f"is '{of.column}', which holds {kind} in {path}; legal: text"
        )


def parquet_file(path: Path, where: str) -> Any:
    """The opened Parquet file. Raises `PlanError` where it is none, or pyarrow is missing."""
    try:
        return parquet(where).ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of either kind
        why = " ".join(str(error).split())
        raise refuse(f"{where}.source", f"{path} is no intact Parquet file: {why}") from None


def parquet(where: str) -> ModuleType:
    """`pyarrow.parquet`. Raises `PlanError` where it is not installed."""
    try:
        from pyarrow import parquet as module
    except ImportError:
        raise refuse(
            f"{where}.format", "parquet needs pyarrow; install it: pip install 'workbench[parquet]'"
        ) from None
    return cast(ModuleType, module)
