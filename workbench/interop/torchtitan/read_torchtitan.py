"""torchtitan's jobs, TOML by torchtitan/config/job_config.py or Python by torchtitan/trainer.py:
what one says of a plan, and a plan as such a file.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.foreign_text import from_toml, mapping, to_toml
from workbench.interop.torchtitan import torchtitan_keys as known
from workbench.interop.torchtitan.registry import is_registry, python, tables_of
from workbench.interop.torchtitan.training_tables import read_training
from workbench.interop.torchtitan.write_torchtitan import tables
from workbench.interop.translation import (
    FRAMEWORK_PROFILES,
    Imported,
    ImportOptions,
    Translation,
    imported,
)
from workbench.interop.translation_loss import lost, nearest
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolution import model_shape
from workbench.plan.schema import Plan

P = "parallelism."

FLOAT8_TABLES = ("float8", "mx", "quantize.linear.float8", "quantize.linear.mx")
"""Where a job's recipe of fp8 may stand."""


def read(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of a torchtitan job, as TOML, Python, or already parsed. Raises `PlanError` naming
    key and legal values.
    """
    given = given or ImportOptions()
    newer = isinstance(text, str) and is_registry(text)
    if isinstance(text, str):
        parsed = tables_of(text, given.config, given.folder) if newer else from_toml(text, "file")
        text = mapping(parsed, "file")
    keys = ForeignKeys(mapping(text, "file"))
    plan = keys.with_open_values(lambda: _plan(keys, given, newer))
    keys.finish(known.KNOWN, known.WHYS, known.OPEN, lenient)
    return imported("torchtitan", plan, keys, given)


def _plan(keys: ForeignKeys, given: ImportOptions, newer: bool) -> dict[str, Any]:
    keys.sections(*known.MAPPINGS)
    model, shape, narrow = _model(keys, given)
    sizes, world = _sizes(keys, given)
    pipeline = _pipeline(keys, sizes["pipeline"], shape)
    training, precision = (
        read_training(keys, sizes["data"], sizes["pipeline"], given.sets),
        _precision(keys, narrow),
    )
    training["training"]["optimizer"] |= _states(keys, precision["precision"])
    strategy = {
        "stack": FRAMEWORK_PROFILES["torchtitan"],
        "data": _data(keys, sizes),
        "tensor": {"size": sizes["tensor"], "sequence": _sequence(keys, sizes["tensor"])},
        "pipeline": pipeline,
        "context": {"size": sizes["context"], "algorithm": "ring"},
        "expert": _expert(keys, sizes["tensor"]),
        "recompute": _recompute(keys, shape.layers, newer),
        "kernels": _kernels(keys),
        **precision,
    }
    plan = {"model": model, "cluster": given.cluster(world), "strategy": strategy, **training}
    if name := keys.text("job.description"):
        plan["name"] = name
    return plan


def _model(keys: ForeignKeys, given: ImportOptions) -> tuple[str | dict[str, Any], Shape, str]:
    """(the plan's model, its shape, the precision of its GEMMs where it is below 16 bits)."""
    name, flavor = keys.text("model.name"), keys.text("model.flavor")
    family, size = (
        (name or "llama3").rpartition(".")[2],
        re.sub(known.KERNEL_OF_FLAVOR, "", flavor or ""),
    )
    found = known.MODELS.get((family, size))
    if found and (family, size) != (name or "llama3", flavor):
        keys.mark_untranslated(
            "model.flavor" if size != flavor else "model.name",
            "a plan says how operators run in strategy.kernels",
        )
    if given.model is not None and (flavor is not None or name is not None):
        ours = given.model if isinstance(given.model, str) else given.model.name
        for key, value in (("model.name", name), ("model.flavor", flavor)):
            if value is not None and found != ours:
                keys.mark_untranslated(key, f"the model given is {ours}")
    sizes: dict[str, list[str]] = {}
    for one, flavors in known.MODELS:
        sizes.setdefault(one, []).append(flavors)
    legal = "; ".join(f"{one}: {', '.join(flavors)}" for one, flavors in sizes.items())
    why = (
        f"model.name '{name}', model.flavor '{flavor}' is no model that the catalog holds ({legal})"
    )
    model = found if found is not None and given.model is None else given.the_model(why)
    shape = given.model if isinstance(given.model, Shape) else model_shape(str(model))
    return model, shape, _converted(keys)


def _converted(keys: ForeignKeys) -> str:
    """The precision that linear layers are converted to: by `model.converters`, or the switch that
    jobs of 2024 have; empty where they are not.
    """
    value = keys.take("model.converters")
    words = [
        str(word)
        for word in (value if isinstance(value, list) else re.split(r"[,\s]+", str(value or "")))
        if word
    ]
    fp8 = [word for word in words if re.search("float8|mx", word)]
    if rest := [word for word in words if word not in fp8]:
        keys.mark_untranslated(
            "model.converters", f"a plan knows no such conversion of layers: {', '.join(rest)}"
        )
    recipes = [table for table in FLOAT8_TABLES if _recipe(keys, table)]
    if keys.flag("float8.enable_float8_linear"):
        fp8 = fp8 or ["float8"]
    elif keys.has_key("float8.enable_float8_linear"):
        recipes = []
    named = fp8 or (recipes if value is None else [])
    blocks = any(word.rpartition(".")[2].startswith("mx") for word in named)
    return "mxfp8" if blocks else "fp8" if named else ""


def _recipe(keys: ForeignKeys, table: str) -> bool:
    """True where a table names a recipe; of fp8 a plan knows one, beside blocks (MX)."""
    key = f"{table}.recipe_name"
    recipe = keys.take(key)
    if table.endswith("mx"):
        if recipe is not None and not str(recipe).startswith("mxfp8"):
            keys.mark_untranslated(key, "a plan's blocks are of 8 bits (mxfp8)")
    elif recipe not in (None, "tensorwise"):
        keys.mark_untranslated(key, "a plan's fp8 scales each tensor by its own largest entry")
    return recipe is not None


def _sizes(keys: ForeignKeys, given: ImportOptions) -> tuple[dict[str, int], int]:
    """(ranks of each axis with those that share the data, ranks of the job)."""
    sizes = {
        axis: _degree(keys, f"{axis}_parallel_degree") or 1
        for axis in ("tensor", "context", "pipeline")
    }
    replicate = _degree(keys, "data_parallel_replicate_degree") or 1
    shards = [
        _degree(keys, name, -1) for name in ("data_parallel_shard_degree", "data_parallel_degree")
    ]
    shard = next((degree for degree in shards if degree is not None), None)
    if shard == 0:
        raise refuse(
            P + "data_parallel_shard_degree",
            "is 0; legal: -1 for all that are left over, or 1 or more",
        )
    others = math.prod(sizes.values()) * replicate
    if shard in (None, -1):
        world = given.world(None, P + "data_parallel_shard_degree is -1: whatever is left over")
        if world % others:
            raise refuse(
                "gpus",
                f"is {world}, which tensor x context x pipeline x replicate = {others} does not "
                "divide",
            )
        shard = world // others
    assert shard is not None
    world = given.world(others * shard, "the product of the degrees in [parallelism]")
    return {**sizes, "replicate": replicate, "shard": shard, "data": replicate * shard}, world


def _degree(keys: ForeignKeys, name: str, least: int = 1) -> int | None:
    """A degree of [parallelism], or of the sections where jobs of 2024 have it."""
    found = {
        section: keys.integer(f"{section}.{name}", least)
        for section in ("parallelism", "training", "experimental")
    }
    said = {section: degree for section, degree in found.items() if degree is not None}
    if len(set(said.values())) > 1:
        degrees = " and ".join(f"{degree} in [{section}]" for section, degree in said.items())
        raise refuse(P + name, f"is {degrees}; legal: the same, or one of them")
    return next(iter(said.values()), None)


def _data(keys: ForeignKeys, sizes: Mapping[str, int]) -> dict[str, Any]:
    sharded = sizes["shard"] * sizes["context"] > 1
    policy = (
        keys.choice(
            P + "fsdp_reshard_after_forward", {w: w for w in ("default", "always", "never")}
        )
        or "default"
    )
    offload = keys.flag("training.enable_cpu_offload")
    if not sharded:
        for key, value in (
            (P + "fsdp_reshard_after_forward", policy),
            ("training.enable_cpu_offload", offload),
        ):
            if value not in (None, False, "default"):
                keys.mark_untranslated(key, "nothing is sharded here, so it does nothing")
        return {"zero": 0}
    found: dict[str, Any] = {
        "zero": 3,
        "reduce": "step" if sizes["pipeline"] > 1 else "microbatch",
        "offload": "parameters" if offload else "none",
        "keep_gathered": policy == "never" or (policy == "default" and sizes["pipeline"] > 1),
    }
    return found | ({"shard": sizes["shard"] * sizes["context"]} if sizes["replicate"] > 1 else {})


def _expert(keys: ForeignKeys, tensor: int) -> dict[str, int]:
    """Sizes over which experts are spread; tensor ranks too, unless those split each expert."""
    key = P + "expert_tensor_parallel_degree"
    size, own = keys.integer(P + "expert_parallel_degree") or 1, keys.integer(key)
    if size == 1 or tensor == 1:
        if own is not None and own != tensor:
            keys.mark_untranslated(key, "read only where tensor and experts are split")
        return {"size": size}
    if own is None:
        own = int(keys.assume("strategy.expert.tensor", 1, "torchtitan's default"))
    return {"size": size} | ({} if own == tensor else {"tensor": own})


def _pipeline(keys: ForeignKeys, size: int, shape: Shape) -> dict[str, Any]:
    word = keys.choice(
        P + "pipeline_parallel_schedule", {name: name for name in (*known.SCHEDULES, *known.LONE)}
    )
    table = keys.text(P + "pipeline_parallel_schedule_csv")
    schedule = known.SCHEDULES.get(word or "1F1B") or known.LONE[word]
    if table:
        schedule = table if table.endswith(".csv") else f"{table}.csv"
    elif word in known.LONE:
        schedule = schedule or "1f1b"
        keys.mark_untranslated(
            P + "pipeline_parallel_schedule", f"a plan knows no such schedule; {schedule} was taken"
        )
    single = schedule in ("1f1b", "gpipe")
    held = keys.integer(P + "pipeline_parallel_layers_per_stage")
    stages = _parts(keys, shape.layers)
    chunks = 1 if single else 2
    if stages is None and held is not None:
        chunks = max(1, -(-shape.layers // (held * size)))
        stages = _spread(shape.layers, size * chunks)
    if stages is not None and size > 1:
        if len(stages) % size:
            raise refuse(
                P + "module_fqns_per_model_part",
                f"makes {len(stages)} stages; legal: a multiple of {size}",
            )
        chunks = len(stages) // size
    elif size > 1:
        keys.assume(
            "strategy.pipeline.partition", "balanced", "torchtitan's own split; the plan's default"
        )
    found: dict[str, Any] = {
        "size": size,
        "chunks": chunks if size > 1 else 1,
        "schedule": schedule if size > 1 else "1f1b",
    }
    return found | ({"partition": stages} if stages and size > 1 else {})


def _spread(layers: int, stages: int) -> list[int] | None:
    """Layers over stages as evenly as they go, more in front."""
    if layers < stages:
        return None
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _parts(keys: ForeignKeys, layers: int) -> list[int] | None:
    """Layers of each stage that the lists of modules, or the older split points, say."""
    parts, points = (
        keys.take(P + "module_fqns_per_model_part"),
        keys.take(P + "pipeline_parallel_split_points"),
    )
    if parts is not None:
        if not (isinstance(parts, list) and all(isinstance(part, list) for part in parts)):
            raise refuse(
                P + "module_fqns_per_model_part", "must be a list of lists of module names"
            )
        counts = [sum(str(name).startswith("layers.") for name in part) for part in parts]
        if sum(counts) != layers or min(counts, default=0) < 1:
            raise refuse(
                P + "module_fqns_per_model_part",
                f"holds {counts} layers; legal: {layers} in all, one or more in each part",
            )
        return counts
    if not points:
        return None
    starts = [int(number) for number in re.findall(r"layers\.(\d{1,6})", str(points))]
    bounds = [0, *starts, layers]
    counts = [after - before for before, after in itertools.pairwise(bounds)]
    if min(counts) < 1:
        raise refuse(
            P + "pipeline_parallel_split_points",
            f"is {str(points)[:60]!r}; legal: rising names from layers.1 to layers.{layers - 1}",
        )
    return counts


def _sequence(keys: ForeignKeys, tensor: int) -> bool:
    return tensor > 1 and keys.flag(P + "enable_sequence_parallel") is not False


def _recompute(keys: ForeignKeys, layers: int, newer: bool) -> str | list[int]:
    """Layers that are recomputed; where nothing is said, by the default of TOML or of `newer`
    Python.
    """
    mode = keys.choice(
        "activation_checkpoint.mode", {w: w for w in ("selective", "full", "none", "memory_budget")}
    )
    option = keys.take("activation_checkpoint.selective_ac_option")
    if mode == "memory_budget":
        keys.mark_untranslated(
            "activation_checkpoint.mode", "a plan has no such budget; selective was taken"
        )
        return "selective"
    if newer and mode is None:
        return str(keys.assume("strategy.recompute", "selective", "torchtitan's: SelectiveAC"))
    if mode not in (None, "selective") or option == "op":
        return str(
            mode or keys.assume("strategy.recompute", "selective", "torchtitan's default of mode")
        )
    if option is None:
        option = 2
        every_second = list(range(1, layers, 2))
        keys.assume(
            "strategy.recompute", every_second, "torchtitan's default of selective_ac_option, 2"
        )
    if not re.fullmatch(r"[1-9]\d{0,5}", str(option)):
        raise refuse(
            "activation_checkpoint.selective_ac_option",
            f"is {option!r:.60}; legal: op, or n for every n-th layer",
        )
    step = int(option)
    return "full" if step == 1 else list(range(step - 1, layers, step))


def _precision(keys: ForeignKeys, narrow: str) -> dict[str, str]:
    kinds = {"bfloat16": "bf16", "float32": "fp32"}
    precision = keys.choice("training.mixed_precision_param", kinds) or "bf16"
    gradients = keys.choice("training.mixed_precision_reduce", kinds) or "fp32"
    if gradients == "bf16" and precision == "fp32" and not narrow:
        keys.mark_untranslated(
            "training.mixed_precision_reduce", "a plan reduces fp32 gradients as they are"
        )
        gradients = "fp32"
    return {"precision": narrow or precision, "gradient_dtype": gradients}


def _states(keys: ForeignKeys, precision: str) -> dict[str, str]:
    """What `training.dtype = "bfloat16"` makes of the optimizer: bf16 moments, and no fp32 copy of
    the parameters.
    """
    if keys.choice("training.dtype", {"bfloat16": "bf16", "float32": "fp32"}) != "bf16":
        return {}
    if precision == "fp32":
        keys.mark_untranslated(
            "training.dtype", "a plan keeps parameters in the precision that it computes in"
        )
        return {}
    return {"master": "none", "moments": "bf16"}


def _kernels(keys: ForeignKeys) -> str:
    older, compiled = keys.flag("training.compile"), keys.flag("compile.enable")
    parts = keys.take("compile.components")
    if compiled and isinstance(parts, list) and "model" not in parts:
        keys.mark_untranslated(
            "compile.components", "a plan compiles its layers or nothing; eager was taken"
        )
        compiled = False
    return "compiled" if older or compiled else "eager"


def write(plan: Plan, version: str = known.VERSIONS[-1]) -> Translation:
    """The plan as a job for a `version` of torchtitan, and the fields that it does not say. Raises
    `PlanError` for an illegal plan.
    """
    full = plan.resolve()
    flavor = flavor_of(full.shape, version)
    rows = tables(full, flavor, bool(plan.name), version)
    text = python(rows) if version == known.PYTHON else to_toml(rows)
    with nearest("torchtitan"):
        back = read(
            text, ImportOptions(None if flavor else full.shape, full.gpu, None, full.fabric)
        )
    handed = ("cluster.gpu",) if flavor else ("model", "cluster.gpu")
    return Translation(text, lost(plan, full, back, known.LOST, handed))


def flavor_of(shape: Shape, version: str) -> tuple[str, str] | None:
    """(model.name, model.flavor) of a model that a release of torchtitan has; None for another."""
    same = (key for key, name in known.MODELS.items() if catalog.models()[name].shape == shape)
    return next((key for key in same if known.has_model(version, *key)), None)
