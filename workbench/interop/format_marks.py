"""Format of a text, by marks that only this format has; what is another framework's is refused by
its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workbench.data_files import read_data_file
from workbench.errors import PlanError, refuse
from workbench.interop.accelerate.fsdp_keys import PLUGINS
from workbench.interop.deepspeed import deepspeed_keys
from workbench.interop.foreign_keys import flat, is_below
from workbench.interop.foreign_text import begins_with_brace, from_hjson, from_toml, mapping
from workbench.interop.gpt_neox.gpt_neox_keys import MARKS as NEOX
from workbench.interop.megatron.functional_recipes import is_recipe
from workbench.interop.megatron.megatron_keys import DISTINCT, KNOWN, shows_megatron
from workbench.interop.torchtitan.registry import is_registry
from workbench.interop.translation import SOURCES, Source, legal_formats, nothing_read
from workbench.safe_io import yaml_files
from workbench.untrusted_text import shown

_ACCELERATE = ("distributed_type", "compute_environment")
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu")
_DEEPSPEED_TOGETHER = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
"""Keys of DeepSpeed that others have too."""
_DEEPSPEED_TOPS = {
    key.partition(".")[0] for key in (*deepspeed_keys.KNOWN, *deepspeed_keys.SECTIONS)
}
_SECTIONS = ("parallelism", "activation_checkpoint", "lr_scheduler", "job", "training")
_BARE_DEEPSPEED = re.compile(
    r"(?m)^[\"']?(?:zero_optimization|train_batch_size|train_micro_batch_size_per_gpu)[\"']?\s*:"
)
"""A ds_config.json without its outermost braces, and with comments that are not YAML's."""
_PAIR = re.compile(r"(?:\s|#.*\n|---\s)*[\"']?[A-Za-z_][\w.-]*[\"']?:(?:\s|$)")
"""The first key of a YAML mapping, behind what comments stand before it."""
_FLAG = re.compile(r"(?:^|[\s\[\"'(=])--([A-Za-z][\w-]*)")
_STATEMENT = re.compile(r"(?m)^(?:(?:import|def|class)\s+\w|from\s+[\w.]+\s+import\b)")
_COMMAND = r"(?m)(?:^|[\s;&|\"'(])"
_STARTS = (
    (
        _COMMAND + r"(?:bash|sh)\s+(?:-\w+\s+)*[\"']?([^\s\"']+\.(?:sh|slurm|sbatch))\b",
        "a script that starts another, {}",
        "give that one, and what it is started with by --set NAME=VALUE",
    ),
    (
        _COMMAND + r"((?:torchrun|accelerate\s+launch|deepspeed|srun|mpirun)\s[^\n]*|"
        r"python3?\s+(?:-\w+\s+)*(?:-m\s|\S+\.py)[^\n]*)",
        "a script that starts {}, of no framework whose arguments are known",
        "",
    ),
    (
        _COMMAND + r"(?:source|\.)\s+[\"']?([^\s\"']+\.sh)\b",
        "a script whose commands stand in another, {}",
        "give that one, and its variables by --set NAME=VALUE",
    ),
)
"""Commands that start a program, what a script is that has one, and what to give instead."""
_NAMED = re.compile(
    r"--(?:deepspeed|deepspeed[_-]config|deepspeed_config_file)[\s=\"']+([\w./${}-]+\.json)"
    r"|accelerate\s+launch[^\n]*--config[_-]file[\s=\"']+([\w./${}-]+\.ya?ml)"
)
"""A DeepSpeed JSON or an accelerate YAML that a script gives to its program."""

_KINDS = {
    "keys": "a configuration",
    "commands": "a script",
    "flags": "a script",
    "imports": "Python code",
}
"""Marks -> what shows them."""


@dataclass(frozen=True)
class Framework:
    """Marks of another framework's files, and what to give where they are not read."""

    name: str
    title: str
    version: str
    """Version of the software that the marks are of."""
    date: str
    nearest: str
    keys: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    """Kinds of marks that show a file that is read."""


@lru_cache(maxsize=1)
def frameworks() -> tuple[Framework, ...]:
    """Every framework of `data/foreign/formats.yaml`, in the order in which they are looked for."""
    return tuple(_framework(*row) for row in read_data_file("data/foreign/formats.yaml").items())


def _framework(name: str, entry: Mapping[str, Any]) -> Framework:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else str(value) for key, value in entry.items()
    }
    return Framework(name, **fields)


def detect(text: str) -> Source:
    """The format of a foreign file, by its content alone. Raises `PlanError` naming the formats and
    their marks, or the framework whose file it is.
    """
    if begins_with_brace(text):
        return _of_mapping(mapping(from_hjson(text, "file"), "file"))
    if _STATEMENT.search(text) and is_registry(text):
        return "torchtitan"
    if (modules := _imports(text)) is not None:
        return _of_python(modules)
    if re.search(r"(?m)^\s*\[+[A-Za-z_][\w.\-]*\]+\s*(?:#.*)?$", text) and any(
        re.search(rf"(?m)^\s*\[{section}[\].]", text) for section in _SECTIONS
    ):
        return _by_keys(from_toml(text, "file")) or "torchtitan"
    if re.search(r"(?m)^[\"']?distributed_type[\"']?\s*:", text):
        return "fsdp"
    if data := _yaml(text):
        return _of_mapping(data)
    if _BARE_DEEPSPEED.search(text):
        return "deepspeed"
    return _of_script(re.sub(r"(?m)(^|[ \t])#.*$", "", text))


def _of_script(text: str) -> Source:
    """The format of commands or arguments, their comments left out."""
    words = {word.replace("_", "-") for word in _FLAG.findall(text)}
    for framework in frameworks():
        if any(re.search(pattern, text) for pattern in framework.commands):
            return _known(framework, "commands", text)
        if any(words >= set(mark.split(" + ")) for mark in framework.flags):
            return _known(framework, "flags", text)
    alone = text.lstrip().startswith("--") and words & DISTINCT  # arguments, and no command
    if alone or shows_megatron(words):
        return "megatron"
    for pattern, what, nearest in _STARTS:
        if started := re.search(pattern, text):
            name = shown(started[1].strip()[:60])
            raise _refused(what.format(name), _named_file(text) or nearest.format(name))
    raise nothing_read([shown(line.strip()[:40]) for line in text.splitlines() if line.strip()])


def _of_python(modules: Collection[str]) -> Source:
    """The format of Python code that imports `modules`; nothing of it is run."""
    for framework in frameworks():
        if any(is_below(module, framework.imports) for module in modules):
            return _known(framework, "imports")
    raise _refused(
        "Python code of no framework that is known", "nothing of it is run; give its configuration"
    )


def _yaml(text: str) -> dict[str, Any]:
    """The mapping that YAML `text` is, empty where it is none: a script, or words. Raises
    `PlanError` where it begins as one and cannot be read.
    """
    try:
        found = yaml_files.parse(text, where="file")
    except PlanError:
        if _PAIR.match(text) and not _BARE_DEEPSPEED.search(text):
            raise
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _of_mapping(data: dict[str, Any]) -> Source:
    if found := _by_keys(data):
        return found
    tops = {str(key).replace("-", "_"): value for key, value in data.items()}
    processes = {"num_processes", "num_machines"} & set(data)
    if any(key in data for key in _ACCELERATE) or (processes and set(data) & set(PLUGINS)):
        return "fsdp"
    if tops.keys() & NEOX:
        return "gpt-neox"
    if _is_deepspeed(data):
        return "deepspeed"
    if {"model_type", "architectures"} & set(data):
        raise refuse(
            "file",
            "is a Hugging Face config.json, which describes a model and no training; legal: "
            "give it "
            "as the model (--model), to `workbench plan` or beside a configuration of training",
        )
    words = {str(key).rpartition(".")[2].lstrip("-").replace("_", "-") for key in flat(data)}
    if is_recipe(data) or (shows_megatron(words) and 2 * len(words & KNOWN) >= len(words)):
        return "megatron"
    raise nothing_read([str(key) for key in data])


def _is_deepspeed(data: Mapping[str, Any]) -> bool:
    """True where one key is DeepSpeed's alone, or a section has its form, or most keys together are
    DeepSpeed's.
    """
    forms = (("bf16", "enabled"), ("fp16", "enabled"), ("optimizer", "type"), ("scheduler", "type"))
    sections = [(data.get(section), key) for section, key in forms]
    if any(key in data for key in _DEEPSPEED):
        return True
    if any(isinstance(data.get(key), bool) for key in ("bf16", "fp16")):
        return False
    known = [key for key in data if str(key) in _DEEPSPEED_TOPS]
    if 2 * len(known) < len(data):
        return False
    shaped = any(isinstance(section, Mapping) and key in section for section, key in sections)
    return shaped or any(key in data for key in _DEEPSPEED_TOGETHER)


def _by_keys(data: Mapping[str, Any]) -> Source | None:
    """The first framework that a mark among `data`'s keys shows; None where none does."""
    rows = {f".{key}.": value for key, value in flat(data).items()}
    for framework in frameworks():
        for mark in framework.keys:
            if all(_has(rows, part) for part in mark.split(" + ")):
                return _known(framework, "keys")
    return None


def _has(rows: Mapping[str, Any], mark: str) -> bool:
    """True where `rows` have the key of `mark`, with the value that it may name."""
    key, _, value = mark.partition("=")
    where = f".{key.removeprefix('*.')}."
    return any(
        (where in row if key.startswith("*.") else row.startswith(where))
        and str(said).startswith(value)
        for row, said in rows.items()
    )


def _known(framework: Framework, mark: str, text: str = "") -> Source:
    """The format of a framework's file that is read. Raises `PlanError` for one that is not."""
    for source in SOURCES:
        if source == framework.name and mark in framework.read:
            return source
    raise _refused(f"{_KINDS[mark]} of {framework.title}", _named_file(text) or framework.nearest)


def _named_file(text: str) -> str:
    """Advice in place of a script that names a file which is read."""
    named = _NAMED.search(text)
    return f"give {shown(named[1] or named[2])}, which it names" if named else ""


def _refused(what: str, nearest: str = "") -> PlanError:
    legal = f"{nearest}; legal: {legal_formats()}" if nearest else f"legal: {legal_formats()}"
    return refuse("file", f"is {what}; not read. {legal[0].upper()}{legal[1:]}")


def _imports(text: str) -> set[str] | None:
    """The modules that a Python text imports; None where it is no Python code. It is parsed, never
    run.
    """
    if not _STATEMENT.search(text):
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    if not any(isinstance(node, kinds) for node in tree.body):
        return None
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported = [node.names for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return found | {name.name for names in imported for name in names}
