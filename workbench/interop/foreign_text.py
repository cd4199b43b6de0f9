"""Foreign text to plain data and back, and which format a text is in, by its content."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.interop.foreign_keys import flat
from workbench.interop.gpt_neox.gpt_neox_keys import MARKS as NEOX
from workbench.interop.megatron.megatron_keys import DISTINCT, KNOWN
from workbench.interop.translation import Source, nothing_read
from workbench.safe_io import json_files, yaml_files
from workbench.untrusted_text import shown

Parsed = Mapping[str, Any] | list[Any]
_DEEPSPEED = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_SECTIONS = ("parallelism", "activation_checkpoint", "lr_scheduler", "job", "training", "model")
_FLAG = re.compile(r"(?:^|[\s\[\"'(=])--([A-Za-z][\w-]*)")


def from_braces(text: str, where: str) -> Any:
    """The value of `text`, which is JSON, or YAML that may begin with a brace. Raises
    `PlanError`.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return yaml_files.parse(text, where=where)
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            return yaml_files.parse(text, where=where)
        except PlanError as error:
            if "not valid YAML" not in str(error):
                raise
    except ValueError:
        pass
    return json_files.parse(text, where)


def from_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of TOML `text`. Raises `PlanError` naming line and column, or what is written
    twice and where.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise refuse(where, "not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise _twice(text, str(error)) or refuse(
            where, f"not valid TOML: {str(error)[:200]}"
        ) from None


def _twice(text: str, message: str) -> PlanError | None:
    """The refusal of a key or table that TOML `text` has twice; None where `message` is about
    anything else.
    """
    at = re.search(r"^Cannot (?:overwrite|declare).*\(at line (\d+)", message)
    last = int(at[1]) if at else 0
    table, seen = "", dict[str, int]()
    for number, line in enumerate(text.splitlines()[:last], start=1):
        header, pair = re.match(r"\s*\[([\w.-]+)\]", line), re.match(r"\s*([\w.-]+)\s*=", line)
        table = header[1] if header else table
        name = table if header else f"{table}.{pair[1]}".lstrip(".") if pair else ""
        if number == last and name in seen:
            return refuse(
                name, f"is written twice (lines {seen[name]} and {last}); keep one of them"
            )
        seen.setdefault(name, number)
    return None


def to_toml(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML: numbers, text, true and false, and lists of them."""
    parts = [
        f"[{table}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in rows.items())
        for table, rows in data.items()
    ]
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def mapping(value: Any, where: str) -> dict[str, Any]:
    """`value` if it is a mapping. Raises `PlanError`."""
    if not isinstance(value, Mapping):
        raise refuse(where, f"is {shown(value)}; must be a mapping of keys to values")
    return dict(value)


def detect(text: str) -> Source:
    """The format of a foreign file, by its content alone. Raises `PlanError` naming the formats and
    their marks.
    """
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return _of_mapping(mapping(from_braces(start, "file"), "file"))
    if re.search(r"(?m)^\s*\[+[A-Za-z_][\w.\-]*\]+\s*(?:#.*)?$", text) and any(
        re.search(rf"(?m)^\s*\[{section}[\].]", text) for section in _SECTIONS
    ):
        return "torchtitan"
    if re.search(r"(?m)^\s*[\"']?distributed_type[\"']?\s*:", text):
        return "fsdp"
    if _has_arguments(text):
        return "megatron"
    try:
        data = mapping(yaml_files.parse(text, where="file"), "file")
    except PlanError:
        raise nothing_read(_lines(text)) from None
    return _of_mapping(data)


def _has_arguments(text: str) -> bool:
    """Whether `text` has Megatron's arguments outside comments: one that only Megatron has, or
    three in all.
    """
    bare = re.sub(r"(?m)(^|[ \t])#.*$", "", text)
    words = {word.replace("_", "-") for word in _FLAG.findall(bare)}
    return bool(words & DISTINCT) or len(words & KNOWN) >= 3


def _lines(text: str) -> list[str]:
    """The beginnings of a text's lines, to say what it holds."""
    return [shown(line.strip()[:40]) for line in text.splitlines() if line.strip()]


def _of_mapping(data: dict[str, Any]) -> Source:
    if "distributed_type" in data or "fsdp_config" in data:
        return "fsdp"
    if {str(key).replace("-", "_") for key in data} & NEOX:
        return "gpt-neox"
    if any(key in data for key in _DEEPSPEED):
        return "deepspeed"
    if {"model_type", "architectures"} & set(data):
        raise refuse(
            "file",
            "is a Hugging Face config.json, which describes a model and no training; legal: "
            "give it "
            "as the model (--model), to `workbench plan` or beside a configuration of training",
        )
    words = {str(key).rpartition(".")[2].lstrip("-").replace("_", "-") for key in flat(data)}
    if words & DISTINCT:
        return "megatron"
    if words & {"bf16", "fp16", "optimizer", "scheduler", "gradient-clipping"}:
        return "deepspeed"
    raise nothing_read([str(key) for key in data])
