"""Which files a corpus is made of, in a fixed order, and the hash that names their content."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from workbench.errors import refuse
from workbench.plan import schema
from workbench.runtime_facts.conversation_fields import FIELDS, row_format
from workbench.safe_io.files import read_some, unread

TEXT = frozenset(
    {
        ".txt",
        ".md",
        ".rst",
        ".py",
        ".json",
        ".jsonl",
        ".csv",
        ".tex",
        ".html",
        ".xml",
        ".c",
        ".h",
        ".cpp",
    }
)
"""Suffixes that count as text in a folder; a file named by itself is read whatever its suffix."""
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
)
"""Folders of the standard library that differ from machine to machine or are not always installed.
"""


SUFFIXES: dict[str, schema.CorpusFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "npy",
    ".idx": "megatron",
}
"""Suffix of a file that is named by itself -> its format, where that is not text."""
RAW: dict[str, schema.TokenDtype] = {
    ".u8": "uint8",
    ".u16": "uint16",
    ".u32": "uint32",
    ".i32": "int32",
    ".i64": "int64",
}
"""Suffix of a file of raw tokens -> their type."""
TOKENIZED = frozenset({"npy", "raw", "megatron"})
"""Formats that hold tokens, which no tokenizer reads."""
UNINDEXED = frozenset({"npy", "raw"})
"""Those of them that do not say where documents end."""
FOLDERS = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    **dict.fromkeys(FIELDS, (".jsonl", ".ndjson", ".parquet")),
}
"""Format -> suffixes that a folder is searched for; other folders hold text."""
MOST_TEMPLATE = 2**20
"""Bytes of the largest chat template that is read."""
MOST_FIRST_ROW = 2**24
"""Bytes of a first row that are looked at."""
ARRAY = re.compile(rb"\s*\[\s*\{")
"""How a file of one JSON array of rows begins."""


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source, and how they are read."""

    where: str
    """The plan's field that names the source's, in messages: corpus, or corpus.mix.N."""
    source: str
    format: schema.CorpusFormat
    column: str
    """Field of a JSONL row, or column of a Parquet file."""
    dtype: schema.TokenDtype | None
    """Type of raw tokens."""
    paths: tuple[Path, ...]
    """In a stable order; of Megatron's format the .bin and its .idx."""


def source_files(corpus: schema.Corpus) -> list[SourceFiles]:
    """The files of each source of `corpus`, in the order of `mix`.

    Raises:
        PlanError: A source does not exist, is empty or is of no known format; names the field.
    """
    if corpus.mix is None:
        found = [_source_files(corpus, "corpus")]
    else:
        found = [_source_files(part, f"corpus.mix.{i}") for i, part in enumerate(corpus.mix)]
    if corpus.separate_documents and corpus.tokenizer in ("bytes", "bpe"):
        for one in found:
            if one.format in UNINDEXED:
                raise refuse(
                    "corpus.separate_documents",
                    f"is true, and {one.source} does not say where documents end; legal: false, "
                    "corpus.tokenizer = the tokenizer.json of its tokens, or Megatron-LM's .bin",
                )
    return found


def _source_files(of: schema.TextSource, where: str) -> SourceFiles:
    path, kind = Path(of.source).expanduser(), source_format(of)
    if of.field is not None and (kind not in FOLDERS or kind in FIELDS):
        raise refuse(f"{where}.field", f"is '{of.field}', and {kind} has no fields; legal: none")
    if of.dtype is not None and kind != "raw":
        raise refuse(f"{where}.dtype", f"is {of.dtype}, and {kind} is not raw tokens; legal: none")
    dtype = of.dtype or RAW.get(path.suffix)
    if kind == "raw" and dtype is None:
        legal = ", ".join(RAW.values())
        raise refuse(f"{where}.dtype", f"is needed to read raw tokens; legal: {legal}")
    if kind in TOKENIZED:
        paths = _token_files(path, kind, f"{where}.source")
    else:
        paths = files(of.source, kind, f"{where}.source")
        if kind == "text" and of.format is None and of.source != "stdlib":
            _check_text(path, paths, where)
    return SourceFiles(where, of.source, kind, of.field or "text", dtype, tuple(paths))


def source_format(of: schema.TextSource) -> schema.CorpusFormat:
    """The format of a source: the plan's, else what the file's name says, else text. What a JSONL
    file holds its first row says, unless `field` names it; a .json of such rows is JSONL too.
    """
    if of.format is not None or of.source == "stdlib":
        return of.format or "text"
    path = Path(of.source).expanduser()
    if path.suffix in RAW:
        return "raw"
    if path.suffix == ".bin":
        return "megatron" if os.path.exists(path.with_suffix(".idx")) else "raw"
    if not os.path.exists(path) and os.path.exists(_megatron(path)[1]):
        return "megatron"
    found = "text" if os.path.isdir(path) else SUFFIXES.get(path.suffix, "text")
    if of.field is not None or (found != "jsonl" and path.suffix != ".json"):
        return found
    return _row_format(path) or found


def _row_format(path: Path) -> schema.CorpusFormat | None:
    """The format of conversations that the first row of a file is of; None where it is of none."""
    try:
        with path.open("rb") as file:  # of later rows not even the encoding counts
            lines = iter(lambda: file.readline(MOST_FIRST_ROW), b"")
            row = json.loads(next(filter(bytes.strip, lines), b"").decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None  # what is wrong with it is said where all of it is read
    kind = row_format(row) if isinstance(row, dict) else None
    return cast("schema.CorpusFormat | None", kind)


def _check_text(source: Path, paths: Sequence[Path], where: str) -> None:
    """Refuse rows that would be read as text, braces and names and all, where nobody asked it."""
    as_text = f"{where}.format: text, which reads files as they are"
    if source.suffix == ".json" and _is_array(source):
        legal = f"JSONL, a row a line, or {as_text}"
        raise refuse(f"{where}.source", f"{source} is one JSON array of rows; legal: {legal}")
    rows = next((path for path in paths if SUFFIXES.get(path.suffix) == "jsonl"), None)
    if rows is not None and (kind := _row_format(rows)):
        legal = f"{where}.format: {kind}, or {as_text}"
        raise refuse(f"{where}.source", f"'{source}' holds {kind} ({rows}); legal: {legal}")


def _is_array(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(ARRAY.match(file.read(2**10)))
    except OSError:
        return False


def conversation_format(corpus: schema.Corpus) -> str | None:
    """The format of conversations that a corpus has a source of; None where all are text."""
    parts: Sequence[schema.TextSource] = corpus.mix or [corpus]
    found = [source_format(part) for part in parts]
    return next((kind for kind in FIELDS if kind in found), None)


def _megatron(path: Path) -> tuple[Path, Path]:
    """The .bin and .idx that either of them, or their common prefix, names."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def _token_files(path: Path, kind: str, field: str) -> list[Path]:
    paths = list(_megatron(path)) if kind == "megatron" else [path]
    for one in paths:
        if not os.path.isfile(one):
            why = (
                "is a folder, and tokens are read from one file"
                if os.path.isdir(one)
                else "is missing"
            )
            raise refuse(field, f"{one} {why}; several sources are mixed by corpus.mix")
    return paths


def files(source: str, kind: str = "text", field: str = "corpus.source") -> list[Path]:
    """Files of text of `source` (`stdlib`, a file or a folder), in a stable order.

    Raises `PlanError` naming `field` where there is none.
    """
    if source == "stdlib":
        found = _python(Path(sysconfig.get_paths()["stdlib"]))
    else:
        path = Path(source).expanduser()
        if not os.path.exists(
            path
        ):  # unlike `Path.exists`, False also below a folder that may not be entered
            legal = "legal: stdlib, or a text file or folder"
            raise refuse(field, f"'{source}' does not exist, or may not be read; {legal}")
        suffixes = frozenset(FOLDERS.get(kind, TEXT))
        found = [path] if path.is_file() else _walk(path, suffixes, frozenset({"__pycache__"}))
    found = [path for path in found if path.stat().st_size > 0]
    if not found:
        kinds = " ".join(sorted(FOLDERS.get(kind, TEXT)))
        raise refuse(field, f"'{source}' holds no text; a folder is searched for {kinds}")
    return found


def corpus_sha256(of: SourceFiles) -> str:
    """Hash over the contents of a source, in order; names of files do not enter it."""
    total = hashlib.sha256()
    for path in of.paths:
        total.update(file_sha256(path, f"{of.where}.source"))
    return total.hexdigest()


def file_sha256(path: Path, field: str) -> bytes:
    """Hash of a file's content. Raises `PlanError` naming `field` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise refuse(field, f"{path} cannot be read: {unread(error)}") from None


def mixed_sha256(hashes: Sequence[str]) -> str:
    """Hash that names a mixture's sources, in order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def template_path(corpus: schema.Corpus) -> Path | None:
    """The file that `corpus.template` names. Raises `PlanError` where it is none."""
    if corpus.template is None:
        return None
    path = Path(corpus.template).expanduser()
    if not os.path.isfile(path):
        raise refuse(
            "corpus.template", f"'{corpus.template}' is no file; legal: one with a chat template"
        )
    return path


def template_text(corpus: schema.Corpus) -> str | None:
    """The chat template in that file. Raises `PlanError` where it cannot be read, or is empty."""
    path = template_path(corpus)
    if path is None:
        return None
    try:
        text = read_some(path, MOST_TEMPLATE)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("corpus.template", f"'{path}' cannot be read: {unread(error)}") from None
    if not text.strip():
        raise refuse("corpus.template", f"'{path}' is empty; legal: a file with a chat template")
    return text


def tokenizer_path(corpus: schema.Corpus) -> Path | None:
    """The tokenizer.json that `corpus.tokenizer` names, itself or by its folder, or the GGUF file;
    None for bytes and bpe.

    Raises:
        PlanError: There is no such file; names the field.
    """
    if corpus.tokenizer in ("bytes", "bpe"):
        return None
    path = Path(corpus.tokenizer).expanduser()
    path = path / "tokenizer.json" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        legal = "legal: bytes, bpe, a tokenizer.json, or a GGUF file"
        raise refuse("corpus.tokenizer", f"'{corpus.tokenizer}' is no file; {legal}")
    return path


def _python(root: Path) -> list[Path]:
    return _walk(root, frozenset({".py"}), SKIPPED)


def _walk(root: Path, suffixes: frozenset[str], skipped: frozenset[str]) -> list[Path]:
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(d for d in inner if d not in skipped and not d.startswith("."))
        found += [Path(folder, name) for name in names if Path(name).suffix in suffixes]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
