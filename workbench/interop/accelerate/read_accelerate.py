"""accelerate's YAML of every kind: FSDP (`fsdp`), DeepSpeed, plain data parallelism, and the
workbench's own export.

Names are those of accelerate's `commands/config/config_args.py` and `utils/dataclasses.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import PlanError, Problem, refuse
from workbench.interop.accelerate import fsdp_keys as known
from workbench.interop.accelerate import read_fsdp
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.foreign_keys import ForeignKeys, flat
from workbench.interop.foreign_text import from_hjson, mapping
from workbench.interop.missing_fields import with_problems
from workbench.interop.translation import (
    FRAMEWORK_PROFILES,
    Imported,
    ImportOptions,
    KeyNote,
    imported,
)
from workbench.plan.schema import build_plan
from workbench.safe_io import yaml_files
from workbench.untrusted_text import shown

PLAIN = (
    "NO",
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_NPU",
    "MULTI_XPU",
    "MULTI_MLU",
    "MULTI_MUSA",
    "MULTI_HPU",
)
"""distributed_type of data parallelism without sharding; NO is one process."""
LEGAL = ("FSDP", "DEEPSPEED", *PLAIN)
D = "deepspeed_config."
AXES = "parallelism_config.parallelism_config_"
LARGEST = 4 * 2**20
"""Bytes of the largest deepspeed_config_file that is read."""
BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Keys of a ds_config.json that accelerate fills when the script prepares its model."""
INLINE = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""Key of deepspeed_config -> the key of a ds_config.json that accelerate writes it to."""
SCRIPT = "the user's script decides; the plan's default"


def read(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of an accelerate YAML (or JSON), as text or parsed. Raises `PlanError` naming the
    key.
    """
    given = given or ImportOptions()
    data = mapping(yaml_files.parse(text, where="file") if isinstance(text, str) else text, "file")
    _refuse_host_experts(data.get("kt_config"))
    kind = data.get("distributed_type")
    if kind == "FSDP":
        return read_fsdp.read(data, given, lenient)
    if kind == "DEEPSPEED":
        return _deepspeed(data, given, lenient)
    if kind in PLAIN:
        return _own(data, given) or _plain(data, given, lenient)
    more = (
        "; the arguments that its script passes on are read by themselves"
        if kind == "MEGATRON_LM"
        else ""
    )
    said = "missing" if kind is None else shown(kind)
    raise refuse("distributed_type", f"is {said}; legal here: {', '.join(LEGAL)}{more}")


def _refuse_host_experts(said: Any) -> None:
    """Refuse experts that KTransformers computes on the host. Raises `PlanError`."""
    if said and not (isinstance(said, Mapping) and said.get("enabled") is False):
        raise refuse(
            "kt_config",
            f"is {shown(said)}: KTransformers keeps experts in host memory and computes them on "
            "the CPU, which no plan says; legal: without it",
        )


def _keys(data: Mapping[str, Any], *other: str) -> ForeignKeys:
    """The file's keys, those of the `other` kinds of launch reported as unused."""
    keys = ForeignKeys(read_fsdp.spelled(dict(data)))
    keys.sections("deepspeed_config", "parallelism_config", "dynamo_config")
    keys.take("distributed_type")
    for section in other:
        for key in keys.below(section):
            keys.skip(key, "read only with another distributed_type")
    return keys


def _cluster(
    keys: ForeignKeys, given: ImportOptions, alone: bool = False
) -> tuple[int, dict[str, Any]]:
    """(ranks, the plan's `cluster`); `alone`: the launcher starts one process."""
    nodes, said = keys.count("num_machines"), keys.count("num_processes")
    if alone and said not in (None, 1):
        keys.mark_untranslated("num_processes", "distributed_type NO starts one process")
    world = given.world(1 if alone else said, "distributed_type" if alone else "num_processes")
    if nodes is not None and world % nodes:
        raise refuse(
            "num_processes",
            f"is {world}, which num_machines {nodes} does not divide; every machine starts "
            "the same number",
        )
    return world, given.cluster(world, **({"nodes": nodes} if nodes and nodes > 1 else {}))


def _plain(data: Mapping[str, Any], given: ImportOptions, lenient: bool) -> Imported:
    """Data parallelism: every rank holds all states, gradients are reduced once a step."""
    keys = _keys(
        data, "fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config"
    )
    _, cluster = _cluster(keys, given, data["distributed_type"] == "NO")
    precision = read_fsdp.precision(keys)
    if precision not in ("fp32", None):
        key = "mixed_precision" if "mixed_precision" in data else "fp16"
        keys.mark_untranslated(
            key,
            "autocast over fp32 parameters; a plan keeps 16-bit parameters beside fp32 master "
            "weights",
        )
    strategy = {
        "stack": FRAMEWORK_PROFILES["fsdp"],
        "data": {"zero": 0},
        "precision": precision or "fp32",
        "gradient_dtype": "fp32",
        "kernels": read_fsdp.kernels_of(keys),
    }
    return _finish(keys, given, {"cluster": cluster, "strategy": strategy}, lenient)


def _finish(
    keys: ForeignKeys, given: ImportOptions, plan: dict[str, Any], lenient: bool
) -> Imported:
    keys.assume("strategy.recompute", "none", SCRIPT)
    for field in ("sequence_length", "micro_batch", "global_batch", "steps"):
        keys.assume(f"training.{field}", "default", SCRIPT)
    plan["model"] = given.the_model("an accelerate YAML does not say the model")
    keys.finish(known.KNOWN, known.WHYS, known.OPEN, lenient)
    return imported("fsdp", plan, keys, given)


def _own(data: Mapping[str, Any], given: ImportOptions) -> Imported | None:
    """The plan beside the launcher's half of an export; None where this is no such file."""
    beside = given.folder / "plan.yaml" if given.folder else None
    if (
        beside is None
        or not beside.is_file()
        or any(data.get(section) for section in known.PLUGINS)
    ):
        return None
    written = yaml_files.parse(
        beside.read_text(encoding="utf-8", errors="replace"), where=str(beside)
    )
    if not (isinstance(written, dict) and {"model", "cluster"} <= set(written)):
        return None
    plan, world = build_plan(written), data.get("num_processes")
    if world not in (None, plan.world_size):
        raise refuse(
            "num_processes",
            f"is {shown(world)}, but the plan beside it, {beside}, has cluster.gpus "
            f"{plan.world_size}; legal: the same",
        )
    chosen = {"model": given.model, "cluster.gpu": given.gpu, "cluster.gpus": given.gpus}
    plan = plan.replace(
        **{field: value for field, value in chosen.items() if value is not None}, **given.sets
    )
    plan.resolve()
    ignored = [
        KeyNote(key, value, f"the launcher's half of an export; {beside} says the plan")
        for key, value in data.items()
    ]
    return Imported("fsdp", plan, [str(beside)], [], [], ignored)


def _deepspeed(data: Mapping[str, Any], given: ImportOptions, lenient: bool) -> Imported:
    """DeepSpeed through accelerate: what a ds_config.json with the same content means, in this
    file's own keys.
    """
    keys = _keys(data, "fsdp_config", "megatron_lm_config")
    world, cluster = _cluster(keys, given)
    named = f"{D}deepspeed_config_file" in keys
    config, names = _from_file(keys, given) if named else _inline(keys)
    computed = _mixed(config, keys, named)
    if (size := keys.count(f"{AXES}sp_size")) is not None:
        config["sequence_parallel_size"] = size
    keys.finish(known.KNOWN, known.WHYS, known.OPEN, lenient)
    inner = _read_inner(config, replace(given, gpus=world), names, lenient)
    sets = {f"cluster.{field}": value for field, value in cluster.items()}
    plan = inner.plan.replace(**sets, **computed)
    plan.resolve()
    return _merged(replace(inner, plan=plan), keys, names)


def _mixed(config: dict[str, Any], keys: ForeignKeys, named: bool) -> dict[str, str]:
    """Write `mixed_precision` where the ds_config.json leaves it open; one of the user's own may
    say it itself. DeepSpeed has no word of fp8: accelerate converts the products of a model that
    DeepSpeed keeps in bf16, and the plan's field is what is returned.
    """
    wanted = read_fsdp.precision(keys) or (None if named else "fp32")
    computed = {}
    if wanted == "fp8":
        computed, wanted = {"strategy.precision": "fp8"}, "bf16"
    for name in ("bf16", "fp16"):
        section = config.get(name, {})
        if (
            wanted is not None
            and isinstance(section, Mapping)
            and section.get("enabled", "auto") == "auto"
        ):
            config[name] = {**section, "enabled": wanted == name}
    return computed


def _merged(inner: Imported, keys: ForeignKeys, names: Mapping[str, str]) -> Imported:
    """What was read through a ds_config.json, in the keys of this file."""
    untranslated = [
        KeyNote(names[n.field], n.value, n.why) for n in inner.untranslated if n.field in names
    ]
    unknown = [KeyNote(names[n.field], n.value, n.why) for n in inner.unknown if n.field in names]
    assumed = [
        KeyNote(n.field, n.value, SCRIPT if n.why.startswith("the file says auto") else n.why)
        for n in inner.assumed
    ]
    used = [*keys.translated, *(names[key] for key in inner.translated if key in names)]
    return Imported(
        "fsdp",
        inner.plan,
        used,
        [*keys.untranslated, *untranslated],
        [*keys.assumed, *assumed],
        [*keys.ignored, *inner.ignored],
        [*keys.unknown, *unknown],
    )


def _inline(keys: ForeignKeys) -> tuple[dict[str, Any], dict[str, str]]:
    """(content of the ds_config.json that accelerate writes, its keys -> keys of this file)."""
    found: dict[str, Any] = dict.fromkeys(BATCH, "auto")
    names: dict[str, str] = {}
    for key, meant in INLINE.items():
        if (value := keys.take(D + key)) is not None:
            keys.translated.remove(D + key)  # the reader of a ds_config.json says what is used
            found[meant], names[meant] = value, D + key
    if "zero_optimization.stage" not in found:
        found["zero_optimization.stage"] = keys.assume(
            "strategy.data.zero", 2, "accelerate's default"
        )
    return _nested(found), names


def _from_file(keys: ForeignKeys, given: ImportOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """The same of the ds_config.json that `deepspeed_config_file` names, below the folder of this
    file.
    """
    name = keys.text(f"{D}deepspeed_config_file") or ""
    for key in INLINE:
        keys.skip(D + key, f"read only without deepspeed_config_file; {name} says it")
    folder = given.folder.resolve() if given.folder else None
    path = folder / name if folder else None
    beside = (
        path is not None
        and folder is not None
        and os.path.isfile(path)
        and path.resolve().is_relative_to(folder)
    )
    if path is None or not beside or path.stat().st_size > LARGEST:
        raise refuse(
            f"{D}deepspeed_config_file",
            f"is {shown(name)}, which is no file that can be read beside this "
            "one; put it there, or import it by itself with --gpus",
        )
    config = mapping(from_hjson(path.read_text(encoding="utf-8-sig", errors="replace"), name), name)
    return config, {key: f"{name}: {key}" for key in flat(config)}


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in dotted.items():
        *above, last = path.split(".")
        section = found
        for key in above:
            section = section.setdefault(key, {})
        section[last] = value
    return found


def _read_inner(
    config: dict[str, Any], given: ImportOptions, names: Mapping[str, str], lenient: bool
) -> Imported:
    try:
        return read_deepspeed.read(config, given, lenient)
    except PlanError as error:
        raise with_problems(
            error, [Problem(names.get(p.field, p.field), p.message) for p in error.problems]
        ) from None
