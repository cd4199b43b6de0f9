"""Conversations about Python's own docstrings: data for fine-tuning that every machine has.

What does `json.dumps` do? The answer is the first paragraph of its docstring; of a preference pair,
the rejected one is another docstring's of the same module. Sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Row = dict[str, list[dict[str, str]]]
LEAST = 20
"""Characters of the shortest answer."""


class Docstring(NamedTuple):
    """The first paragraph of a docstring, and the dotted name it documents."""

    name: str
    summary: str


def docstring_rows(path: Path, source: str, kind: str) -> list[Row]:
    """Rows of one module of the standard library, in the order of its text.

    Args:
        path: Of the module; below the standard library it gives the module's name.
        source: Its text.
        kind: `messages`, `completions` or `preferences`.
    """
    found = list(docstrings(_module(path), source))
    if kind == "preferences":
        pairs = zip(found, found[1:] + found[:1])
        return [
            {"prompt": [_asked(one)], "chosen": [_said(one)], "rejected": [_said(other)]}
            for one, other in pairs
            if one.summary != other.summary
        ]
    if kind == "completions":
        return [{"prompt": [_asked(one)], "completion": [_said(one)]} for one in found]
    return [{"messages": [_asked(one), _said(one)]} for one in found]


def docstrings(module: str, source: str) -> Iterator[Docstring]:
    """First paragraphs of the docstrings of public functions, classes and methods."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file kept to show an error
        return
    yield from _inside(tree, module)


def _inside(node: ast.Module | ast.ClassDef, name: str) -> Iterator[Docstring]:
    for each in node.body:
        if not isinstance(each, Definition) or each.name.startswith("_"):
            continue
        dotted = f"{name}.{each.name}"
        summary = " ".join(inspect.cleandoc(ast.get_docstring(each) or "").split("\n\n")[0].split())
        if len(summary) >= LEAST:
            yield Docstring(dotted, summary)
        if isinstance(each, ast.ClassDef):
            yield from _inside(each, dotted)


def _module(path: Path) -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    inner = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    parts = inner.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _asked(one: Docstring) -> dict[str, str]:
    return {"role": "user", "content": f"What does {one.name} do?"}


def _said(one: Docstring) -> dict[str, str]:
    return {"role": "assistant", "content": one.summary}
