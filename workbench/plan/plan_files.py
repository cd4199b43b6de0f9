"""Plans in and out: from four words, from a file, with fields changed, and back to YAML."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import refuse
from workbench.plan.catalog import catalog
from workbench.plan.model_shape import Shape
from workbench.plan.schema import Plan
from workbench.plan.validation_messages import plan_error
from workbench.safe_io import yaml_files
from workbench.safe_io.files import read_some, unread
from workbench.safe_io.untrusted_text import shown


def plan_of(model: str, *, gpu: str, gpus: int, strategy: str, changes: Mapping[str, Any]) -> Plan:
    """A plan from the four choices a person makes, with `changes` by dotted path; completed once to
    prove it legal.
    """
    written = {
        "model": model,
        "cluster": {"gpu": gpu, "gpus": gpus},
        "strategy": {"preset": strategy},
    }
    plan = build(changed(written, changes))
    plan.complete()
    return plan


MOST_BYTES = 16 * 2**20
"""Of a plan file: no plan is near it."""


def load(path: str | Path) -> Plan:
    """The plan in the YAML file `path`. Raises `PlanError` if it cannot be read or says something
    illegal.
    """
    path = Path(path)
    try:
        text = read_some(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(str(path), f"cannot be read: {unread(error)}") from None
    return parse(text, where=str(path))


def parse(text: str, where: str = "plan") -> Plan:
    """The plan that YAML `text` says; `where` names it in errors."""
    written = yaml_files.parse(text, where=where)
    if not isinstance(written, dict):
        this = "the file is empty" if written is None else f"this is {shown(written)}"
        raise refuse(where, f"a plan is a mapping with `model:` and `cluster:`; {this}")
    return build(written)


def build(written: Mapping[str, Any]) -> Plan:
    """A plan from plain data. Raises `PlanError` naming each wrong field, its value and what is
    legal.
    """
    try:
        return Plan.model_validate(dict(written))
    except ValidationError as error:
        raise plan_error(error, written, Plan) from None


def replace(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """`plan` with fields changed by dotted path; a path below a catalog name first writes that
    entry out.
    """
    return build(changed(plain(plan), changes))


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: only what was written."""
    return plan.model_dump(exclude_unset=True)


def to_yaml(plan: Plan) -> str:
    """The plan as YAML, only what was written; `parse` gives an equal plan back."""
    return yaml_files.dump(plain(plan))


def assignments(items: list[str]) -> dict[str, Any]:
    """`key=value` words of a command line as changes; values are YAML, so `3e-4` is a number and
    `[2, 2]` a list.
    """
    changes = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise refuse(
                "--set", f"'{item}' is not of the form key=value, e.g. strategy.tensor.size=2"
            )
        changes[key.strip()] = yaml_files.parse(value, where=key.strip())
    return changes


def changed(written: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a plan with fields changed by dotted path; `written` stays. Raises
    `PlanError`.
    """
    result = copy.deepcopy(dict(written))
    for path, value in changes.items():
        _assign(result, path.split("."), value)
    return result


def _assign(target: dict[str, Any], path: list[str], value: Any) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        inner = target.get(key)
        if inner is None:
            inner = {}
        elif isinstance(inner, str):
            inner = _written_out(".".join(path[:depth]), inner, ".".join(path))
        elif not isinstance(inner, dict):
            raise refuse(
                ".".join(path), f"{'.'.join(path[:depth])} is {shown(inner)} and has no fields"
            )
        target[key] = inner
        target = inner
    target[path[-1]] = value


def _written_out(field: str, name: str, path: str) -> dict[str, Any]:
    """The entry that a catalog name stands for, as data, so that one of its fields can be
    changed.
    """
    if field == "corpus":
        return {"source": name}
    if field == "model" and name in catalog.models():
        return _underived(catalog.models()[name].shape)
    if field == "cluster.gpu" and name in catalog.gpus():
        return catalog.gpus()[name].card.model_dump(exclude_unset=True)
    if field == "cluster.fabric" and name in catalog.clusters():
        return catalog.clusters()[name].model_dump(exclude_unset=True)
    raise refuse(path, f"{field} is '{name}', which has no fields to change")


def _underived(shape: Shape) -> dict[str, Any]:
    """The shape as data without widths that follow from others, so that they follow a change."""
    data = shape.model_dump(exclude_unset=True)
    if shape.kv_heads == shape.heads:
        data.pop("kv_heads", None)
    if shape.mla is None and shape.heads * int(shape.head_dim or 0) == shape.hidden:
        data.pop("head_dim", None)
    return data
