"""Plans as plain data: read from YAML, changed by dotted path. Nothing here knows the schema."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import refuse
from workbench.machine import gpu_catalog
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape
from workbench.safe_io import yaml_files
from workbench.safe_io.files import read_some, unread
from workbench.untrusted_text import shown

MOST_BYTES = 16 * 2**20
"""Bytes of the largest plan file that is read."""
PATTERNS = "strategy.operators."
"""What patterns of operators stand behind in a dotted path."""


def load_data(path: str | Path) -> dict[str, Any]:
    """The mapping in the YAML file `path`. Raises `PlanError` if it cannot be read or is none."""
    path = Path(path)
    try:
        text = read_some(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        named = str(path) in catalog.models() and f"; the model of that name is --model {path}"
        raise refuse(str(path), f"cannot be read: {unread(error)}{named or ''}") from None
    return parse_data(text, where=str(path))


def parse_data(text: str, where: str = "plan") -> dict[str, Any]:
    """The mapping that YAML `text` says; `where` names it in errors."""
    written = yaml_files.parse(text, where=where)
    if not isinstance(written, dict):
        this = "the file is empty" if written is None else f"this is {shown(written)}"
        raise refuse(where, f"a plan is a mapping with `model:` and `cluster:`; {this}")
    return written


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

    A plan has one task: a field of `finetune` makes it that, with all that `training` said.
    """
    result = copy.deepcopy(dict(written))
    for path, value in changes.items():
        keys = _keys(path)
        if keys[0] == "finetune" and (value is not None or len(keys) > 1):
            _make_finetune(result)
        elif keys[0] == "training" and isinstance(result.get("finetune"), dict):
            keys[0] = "finetune"  # which has the fields of training, and more
        _assign(result, keys, copy.deepcopy(value))  # a later change may be of its fields
    return result


def _make_finetune(written: dict[str, Any]) -> None:
    """Fine-tuning becomes the task, with the batch, the steps and the optimizer of training."""
    training = written.pop("training", None)
    if training is not None and written.get("finetune") is None:
        written["finetune"] = training


def _keys(path: str) -> list[str]:
    """The keys of a dotted path, of which a pattern of operators is one, dots and all."""
    if path.startswith(PATTERNS):
        return [*PATTERNS.split(".")[:-1], path.removeprefix(PATTERNS)]
    return path.split(".")


def _assign(target: dict[str, Any], path: list[str], value: Any) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        inner = target.get(key)
        if inner is None:
            inner = _usual_fabric(target) if path[:depth] == ["cluster", "fabric"] else {}
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
    if field == "cluster.gpu" and name in gpu_catalog.gpus():
        return gpu_catalog.gpus()[name].gpu.model_dump(exclude_unset=True)
    if field == "cluster.fabric" and name in gpu_catalog.clusters():
        return gpu_catalog.clusters()[name].model_dump(exclude_unset=True)
    raise refuse(path, f"{field} is '{name}', which has no fields to change")


def _usual_fabric(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The fabric of the cluster's GPU as data; nothing where the catalog does not know the GPU."""
    entry = gpu_catalog.gpus().get(str(cluster.get("gpu")))
    return _written_out("cluster.fabric", entry.fabric, "cluster.fabric") if entry else {}


def _underived(shape: Shape) -> dict[str, Any]:
    """The shape as data without widths that follow from others, so that they follow a change."""
    data = shape.model_dump(exclude_unset=True)
    if shape.kv_heads == shape.heads:
        data.pop("kv_heads", None)
    if shape.mla is None and shape.heads * int(shape.head_dim or 0) == shape.hidden:
        data.pop("head_dim", None)
    return data
