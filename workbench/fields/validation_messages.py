"""pydantic's errors in words: the dotted field, its value, what is legal, and the key that was
probably meant.
"""

from __future__ import annotations

import bisect
import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from workbench.errors import MOST_FIELD, PlanError, Problem
from workbench.fields.bounds import bounds
from workbench.untrusted_text import shown

_SAYS = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "string_unicode": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
    "invalid_key": "text, as every key is",
}

MODELS = {"PythonModel": "python", "ProfiledModel": "layer_profile", "Shape": "hidden"}
"""What a plan's `model` may be -> the field by which it is known; a shape where it has none."""


def plan_error(
    error: ValidationError, written: Mapping[str, Any], root: type[BaseModel]
) -> PlanError:
    """The `PlanError` that says what `error` means for the data `written`, which is no `root`."""
    wanted: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    other: list[Problem] = []
    for path, detail in _told(error.errors(include_url=False), written):
        field = ".".join(path)
        if detail["type"] in ("extra_forbidden", "missing", "value_error"):
            other.append(Problem(field, _structure(detail, path, root)))
        else:
            wanted.setdefault(field, []).append(_wish(detail, path, root))
            values[field] = detail["input"]
    wrong = [
        Problem(f, f"is {shown(values[f])}; must be {' or '.join(dict.fromkeys(w))}")
        for f, w in wanted.items()
    ]
    return PlanError(_without_parents(other + wrong))


def _told(details: list[ErrorDetails], data: Any) -> Iterator[tuple[list[str], ErrorDetails]]:
    """Each error with its dotted path; of a union, the branches that the data means, or all where
    it means none.
    """
    found = [(*_path(detail["loc"], data, detail["type"]), detail) for detail in details]
    meant = [path for path, union, _ in found if union is None]
    for path, union, detail in found:
        if union is None or not any(other[: len(union)] == union for other in meant):
            yield path, detail


def _path(loc: tuple[int | str, ...], data: Any, kind: str) -> tuple[list[str], list[str] | None]:
    """`loc` without the branches of unions, and the path of the union of which it is a branch not
    meant, else None.
    """
    path: list[str] = []
    union: list[str] | None = None
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(data, Mapping) and (part in data or (last and kind == "missing")):
            path.append(str(part))
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            path.append(str(part))
            data = data[part]
        elif union is None and not _meant(str(part), data):
            union = list(path)
    return path, union


def _meant(branch: str, data: Any) -> bool:
    """Whether the branch of a union is the one that `data` was written for."""
    if not isinstance(data, Mapping):
        return branch not in (*MODELS, "GPU", "Fabric")
    if branch in MODELS:
        named = [name for name, field in MODELS.items() if field in data]
        return branch == (named or ["Shape"])[0]
    return branch in ("GPU", "Fabric", "Mla", "Moe")


def _structure(detail: ErrorDetails, path: list[str], root: type[BaseModel]) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    legal = _fields_at(path[:-1], root)
    close = difflib.get_close_matches(path[-1][:MOST_FIELD], legal, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {hint}legal: {', '.join(legal)}"


def _wish(detail: ErrorDetails, path: list[str], root: type[BaseModel]) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        return f"one of {context['expected']}"
    if detail["type"] == "too_short":
        return f"a list of at least {context['min_length']}"
    if detail["type"] == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    for bound, words in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        if bound in context:
            number = context[bound]
            limit = int(number) if float(number).is_integer() else number
            return f"{words} {limit}{_reason(path, number, root) if bound == 'le' else ''}"
    return _SAYS.get(detail["type"], detail["msg"].removeprefix("Input should be "))


def _reason(path: list[str], most: Any, root: type[BaseModel]) -> str:
    """Why the field at `path`, or an entry of it, takes no more than `most`."""
    for field in _along(path, root):
        for bound in bounds(field.annotation, field.metadata):
            if bound.most == most:
                return f" ({bound.why})"
    return ""


def _without_parents(problems: list[Problem]) -> list[Problem]:
    """A union also reports its own field when a field inside is wrong: keep the innermost."""
    fields = sorted(
        p.field for p in problems
    )  # so that what begins as a field does stands in one place

    def holds_another(field: str) -> bool:
        inside = f"{field}."
        at = bisect.bisect_left(fields, inside)
        return bool(field) and at < len(fields) and fields[at].startswith(inside)

    return [p for p in problems if not holds_another(p.field)]


def _fields_at(path: list[str], root: type[BaseModel]) -> list[str]:
    fields = list(_along(path, root))
    model = _model_of(fields[-1].annotation) if fields else None if path else root
    return list(model.model_fields) if model else []


def _along(path: list[str], root: type[BaseModel]) -> Iterator[FieldInfo]:
    """The fields that `path` leads through from `root`, as far as it names any; entries of a list
    have no own.
    """
    model: type[BaseModel] | None = root
    for part in path:
        if part.isdigit() and model is not root:
            continue
        field = model.model_fields.get(part) if model else None
        if field is None:
            return
        yield field
        model = _model_of(field.annotation)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The first model within an annotation: of a union, or of the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (
        _model_of(part)
        for part in typing.get_args(annotation)
        if typing.get_origin(annotation) is not dict
    )
    return next((model for model in found if model), None)
