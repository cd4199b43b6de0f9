"""torchtitan's Python configurations, from 0.3.0 on (`--module`, `--config`): such a file as the
tables of a job, and tables as such a file. It is read by its syntax; nothing of it is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import UndecidedValue
from workbench.interop.torchtitan.python_configs import (
    Call,
    PythonConfigs,
    chosen,
    left_open,
    parse,
)
from workbench.interop.torchtitan.torchtitan_keys import MODELS, OPEN
from workbench.untrusted_text import shown

_ROOT = "Trainer.Config"
_CLASSES = {
    "training": ("config", "TrainingConfig"),
    "parallelism": ("config", "ParallelismConfig"),
    "compile": ("config", "CompileConfig"),
    "comm": ("config", "CommConfig"),
    "debug": ("config", "DebugConfig"),
    "checkpoint": ("components.checkpoint", "CheckpointManager.Config"),
    "lr_scheduler": ("components.optimizer", "LRSchedulersContainer.Config"),
    "metrics": ("components.metrics", "MetricsProcessor.Config"),
    "validation": ("components.validate", "Validator.Config"),
}
"""Table of a job -> module and class that hold it; the fields have the names of the keys."""
_RENAMED = {"validator": "validation", "profiler": "profiling"}
_RECOMPUTE = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
_CONVERTERS = {
    "Float8LinearConverter": "float8",
    "MXFP8LinearConverter": "mx",
    "NVFP4LinearConverter": "nvfp4",
}


def is_registry(text: str) -> bool:
    """True where a text is Python with configurations of torchtitan's trainer."""
    return _ROOT in text and "torchtitan" in text and "def " in text


def tables_of(text: str, wanted: str | None, folder: Path | None) -> dict[str, Any]:
    """Table -> keys and values of the configuration `wanted`, or of the only one. `folder` is where
    the file stands: a model's own registry is in a folder of its name. Raises `PlanError`.
    """
    found = PythonConfigs(parse(text))
    names = [name for name in found.functions if _returns(found, name)]
    if not names:
        raise refuse("file", f"is Python, in which no function is said to return {_ROOT}")
    name = chosen(names, wanted)
    config = found.returned(name)
    if not isinstance(config, Call) or not _is_root(found, config.name):
        said = config if isinstance(config, UndecidedValue) else getattr(config, "name", config)
        raise refuse(
            name,
            f"returns {str(said)[:80]}, which is not known here; legal: {_ROOT}(...), or what "
            "another function of the file returns",
        )
    tables = {key: _table(key, value) for key, value in config.arguments.items()}
    model = tables.pop("model_spec", None)
    tables |= _conversion(model)
    tables |= _model(model, name, found.imported.get("model_registry", ""), folder)
    if isinstance(checking := tables.get("validation"), dict) and "steps" in checking:
        # Batches of an evaluation are as large as those of training.
        size = _of(tables.get("training"), "local_batch_size")
        checking |= {} if size is None else {"local_batch_size": size}
    return {_RENAMED.get(key, key): value for key, value in tables.items() if value is not None}


def _returns(found: PythonConfigs, name: str) -> bool:
    noted = found.functions[name].returns
    said = ast.unparse(noted) if noted is not None else ""
    last = found.functions[name].body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    direct = isinstance(value, ast.Call) and ast.unparse(value.func).endswith(_ROOT)
    arguments = found.functions[name].args
    return (said.strip("'\"").endswith(_ROOT) or direct) and not arguments.args


def _is_root(found: PythonConfigs, name: str) -> bool:
    """True for the trainer's configuration, and for a class of the file that adds to it."""
    return any(base.endswith(_ROOT) for base in (name, *found.bases.get(name, ())))


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Call) and value.name.endswith(name)


def _of(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _table(key: str, value: Any) -> Any:
    """Meaning of one argument of the trainer: a table, or a value that the file leaves open."""
    if key == "optimizer" and isinstance(value, Call):
        return _optimizer(value)
    if key == "activation_checkpoint":
        return _recompute(value)
    if not isinstance(value, Call) or key == "model_spec":
        return value
    return {inner: _plain(given) for inner, given in value.arguments.items()}


def _plain(value: Any) -> Any:
    """A value without calls, which are left open."""
    if isinstance(value, Call):
        return left_open(f"{value.name}(...)", value.line)
    if isinstance(value, list):
        inner = [_plain(item) for item in value]
        return next((item for item in inner if isinstance(item, UndecidedValue)), inner)
    return value


def _optimizer(value: Call) -> dict[str, Any]:
    """`default_adamw(...)`, or the one group of a container."""
    given = value.arguments
    groups = given.get("param_groups")
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Call):
        group = groups[0].arguments
        words = group.get("optimizer_kwargs")
        given = {"name": group.get("optimizer_name", "AdamW")}
        given |= words if isinstance(words, dict) else {"": _plain(words)}
    elif not value.name.endswith("default_adamw"):
        given = {"name": _plain(Call(value.name, {}, value.line)), **given}
    given = {"lr" if key == "0" else key: _plain(inner) for key, inner in given.items() if key}
    betas = given.pop("betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        given |= {"beta1": betas[0], "beta2": betas[1]}
    elif betas is not None:
        given |= {"beta1": betas, "beta2": betas}
    return given


def _recompute(value: Any) -> Any:
    if value is None:
        return {"mode": "none"}
    kind = value.name.split(".")[-2:][0] if isinstance(value, Call) else ""
    if kind not in _RECOMPUTE:
        return {"mode": _plain(value)}
    rest = {key: _plain(given) for key, given in value.arguments.items()}
    operators = {"selective_ac_option": "op"} if kind == "SelectiveAC" else {}
    return {"mode": _RECOMPUTE[kind], **operators, **rest}


def _model(spec: Any, name: str, module: str, folder: Path | None) -> dict[str, Any]:
    """Table of the model: its family by where its registry is imported from, by the folder, or by
    how the configuration is called, which otherwise stands for a family that is not known here.
    """
    if not _is(spec, "model_registry"):
        return {} if spec is None else {"model": {"flavor": _plain(spec)}}
    families = sorted({family for family, _ in MODELS}, key=len, reverse=True)
    imported, place = module.rpartition(".")[2], folder.name if folder else ""
    known = place if place in families else next(filter(name.startswith, families), name)
    said = {"name": imported or known, **spec.arguments}
    model = {"flavor" if key == "0" else key: _plain(value) for key, value in said.items()}
    if isinstance(converters := said.get("converters"), list):
        model["converters"] = [_CONVERTERS.get(_kind(one), _kind(one)) for one in converters]
    return {"model": model}


def _kind(converter: Any) -> str:
    named = isinstance(converter, Call)
    return converter.name.split(".")[-2:][0] if named else shown(converter)


def _conversion(spec: Any) -> dict[str, Any]:
    """Tables of how linear layers are converted, by the name of the converter."""
    listed = spec.arguments.get("converters") if isinstance(spec, Call) else None
    calls = [one for one in listed if isinstance(one, Call)] if isinstance(listed, list) else []
    rows = {
        _CONVERTERS.get(_kind(one), _kind(one)): {k: _plain(v) for k, v in one.arguments.items()}
        for one in calls
    }
    return {
        name if name in OPEN else f"quantize.{name}": inner for name, inner in rows.items() if inner
    }


def python(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of a job as a file whose function `job` returns them."""
    model, training = dict(tables.get("model", {})), dict(tables["training"])
    family, flavor = model.get("name", "llama3"), model.get("flavor", "debugmodel")
    imports = {
        "components.loss": {"ChunkedLossWrapper", "CrossEntropyLoss"},
        "components.optimizer": {"default_adamw"},
        "hf_datasets.text_datasets": {"HuggingFaceTextDataLoader"},
        f"models.{family}": {"model_registry"},
        "models.common.config_utils": {"decoder_vocab_size"},
        "trainer": {"Trainer"},
    }
    said = {"model_spec": "model_spec", "loss": _LOSS, "dataloader": _DATA}
    said["optimizer"] = _written_optimizer(tables["optimizer"])
    kind = _written_recompute(tables["activation_checkpoint"], imports)
    said["activation_checkpoint"] = kind
    for table, rows in ({**tables, "training": training}).items():
        if table in _CLASSES:
            module, name = _CLASSES[table]
            imports.setdefault(module, set()).add(name.partition(".")[0])
            key = "validator" if table == "validation" else table
            said[key] = _written(name, rows, 2)
    spec = {"flavor": flavor}
    written = [f"{key}={value!a}" for key, value in spec.items()]
    for word in model.get("converters", ()):
        name = next(name for name, short in _CONVERTERS.items() if short == word)
        imports["components.quantization"] = {name}
        compiled = bool(tables.get("compile", {}).get("enable"))
        written.append(f"converters=[{name}.Config(model_compile_enabled={compiled})]")
    lines = [
        f"from torchtitan.{module} import {', '.join(sorted(names))}"
        for module, names in sorted(imports.items())
    ]
    return "\n".join(
        [
            '"""Job for torchtitan: save as job.py; torchrun ... -m torchtitan.train --module job '
            '--config job."""',
            "",
            *lines,
            "",
            "",
            f"def job() -> {_ROOT}:",
            f"    model_spec = model_registry({', '.join(written)})",
            f"    return {_ROOT}(",
            *(f"        {key}={value}," for key, value in said.items()),
            "    )",
            "",
        ]
    )


_LOSS = """ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        )"""
_DATA = 'HuggingFaceTextDataLoader.Config(dataset="c4_test")'


def _written(name: str, rows: Mapping[str, Any], depth: int) -> str:
    inner, outer = "    " * (depth + 1), "    " * depth
    lines = "".join(f"{inner}{key}={value!a},\n" for key, value in rows.items())
    return f"{name}(\n{lines}{outer})"


def _written_optimizer(rows: Mapping[str, Any]) -> str:
    words = {"lr": rows["lr"], "betas": (rows["beta1"], rows["beta2"])}
    words |= {"eps": rows["eps"], "weight_decay": rows["weight_decay"]}
    return _written("default_adamw", words, 2)


def _written_recompute(rows: Mapping[str, Any], imports: dict[str, set[str]]) -> str:
    kind = next((name for name, mode in _RECOMPUTE.items() if mode == rows["mode"]), None)
    if kind is None:
        return "None"
    imports["distributed.activation_checkpoint"] = {kind}
    return f"{kind}.Config()"
