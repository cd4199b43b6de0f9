"""Format of a text, by marks that only this format has; what is another framework's is refused by
its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

from workbench.errors import PlanError, refuse
from workbench.interop.accelerate.fsdp_keys import PLUGINS
from workbench.interop.deepspeed import deepspeed_keys
from workbench.interop.foreign_keys import flat
from workbench.interop.foreign_text import begins_with_brace, from_hjson, from_toml, mapping
from workbench.interop.gpt_neox.gpt_neox_keys import MARKS as NEOX
from workbench.interop.megatron.functional_recipes import is_recipe
from workbench.interop.megatron.megatron_keys import DISTINCT, KNOWN, shows_megatron
from workbench.interop.translation import Source, nothing_read
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
_FLAG = re.compile(r"(?:^|[\s\[\"'(=])--([A-Za-z][\w-]*)")
_STATEMENT = re.compile(r"(?m)^(?:import|from|def|class)\s+\w")
_OTHERS = {
    "a recipe of torchtune": ("_component_",),
    "a configuration of NeMo Automodel, or another of Hydra's": ("_target_",),
    "a configuration of nanotron": ("tokens.micro_batch_size", "tokens.train_steps"),
    "a configuration of LLaMA-Factory": ("finetuning_type",),
    "a configuration of axolotl": ("base_model", "sequence_len"),
    "Hugging Face TrainingArguments (Trainer, TRL)": (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "model_name_or_path",
    ),
    "an experiment of Primus": ("modules.pre_trainer",),
    "overrides of Megatron-Bridge": ("train.train_iters", "train.global_batch_size"),
    "a configuration of MindFormers": ("runner_config", "parallel_config"),
    "a configuration of verl": ("actor_rollout_ref",),
    "a job of torchtitan's flux, which trains on images": ("encoder.t5_encoder", "encoder.clip"),
}
"""Framework -> keys, from the beginning or from a dot on, each of which only its files have."""
_COMMANDS = {
    "a script of OpenRLHF": r"\bopenrlhf\b",
    "a script of Colossal-AI": r"\bcolossalai\s+run\b|--plugin\s+\"?(?:gemini|low_level_zero)",
    "a script of LLaMA-Factory": r"\bllamafactory-cli\b",
    "a script of torchtune": r"\btune\s+run\b",
    "a script of axolotl": r"\baxolotl\b",
    "a script of verl": r"\bverl\.trainer\b",
}
"""Framework -> the command that starts it."""


def detect(text: str) -> Source:
    """The format of a foreign file, by its content alone. Raises `PlanError` naming the formats and
    their marks, or the framework whose file it is.
    """
    if begins_with_brace(text):
        return _of_mapping(mapping(from_hjson(text, "file"), "file"))
    if _is_python(text):
        raise _refused("Python code, of which nothing is run or read")
    if re.search(r"(?m)^\s*\[+[A-Za-z_][\w.\-]*\]+\s*(?:#.*)?$", text) and any(
        re.search(rf"(?m)^\s*\[{section}[\].]", text) for section in _SECTIONS
    ):
        _refuse_others(from_toml(text, "file"))
        return "torchtitan"
    if re.search(r"(?m)^[\"']?distributed_type[\"']?\s*:", text):
        return "fsdp"
    if data := _yaml(text):
        return _of_mapping(data)
    if _BARE_DEEPSPEED.search(text):
        return "deepspeed"
    bare = re.sub(r"(?m)(^|[ \t])#.*$", "", text)
    _refuse_commands(bare)
    words = {word.replace("_", "-") for word in _FLAG.findall(bare)}
    alone = bare.lstrip().startswith("--") and words & DISTINCT  # arguments, and no command
    if alone or shows_megatron(words):
        return "megatron"
    raise nothing_read([shown(line.strip()[:40]) for line in text.splitlines() if line.strip()])


def _yaml(text: str) -> dict[str, Any]:
    """The mapping that YAML `text` is, empty where it is none: a script, or words."""
    try:
        found = yaml_files.parse(text, where="file")
    except PlanError:
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _of_mapping(data: dict[str, Any]) -> Source:
    _refuse_others(data)
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


def _refuse_others(data: Mapping[str, Any]) -> None:
    """Refuse a file of a framework whose files are not read, by its name."""
    paths = [f".{path}." for path in flat(data)]
    for name, marks in _OTHERS.items():
        if any(f".{mark}." in path for mark in marks for path in paths):
            raise _refused(name)


def _refuse_commands(text: str) -> None:
    for name, pattern in _COMMANDS.items():
        if re.search(pattern, text):
            raise _refused(name)


def _refused(name: str) -> PlanError:
    return refuse("file", f"is {name}; not read. {nothing_read([]).problems[0].message}")


def _is_python(text: str) -> bool:
    """True where a text is a module with imports or definitions; it is parsed, never run."""
    if not _STATEMENT.search(text):
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    kinds: Collection[type] = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, tuple(kinds)) for node in tree.body)
