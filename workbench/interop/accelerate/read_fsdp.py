"""accelerate's YAML with FSDP, by https://huggingface.co/docs/accelerate/usage_guides/fsdp: what it
says of a plan.

It says how the states are sharded and on how many GPUs; the model and the training are the user's
script.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from workbench.errors import refuse
from workbench.interop.accelerate import fsdp_keys as known
from workbench.interop.foreign_keys import ForeignKeys
from workbench.interop.foreign_text import mapping
from workbench.interop.translation import (
    FRAMEWORK_PROFILES,
    Imported,
    ImportOptions,
    Translation,
    imported,
)
from workbench.interop.translation_loss import lost, nearest
from workbench.machine import gpu_catalog
from workbench.machine.hardware import Fabric
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolution import model_shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.recompute_rules import recomputed_layers
from workbench.plan.schema import Plan
from workbench.safe_io import yaml_files
from workbench.units import gib_text
from workbench.untrusted_text import shown

F, AXIS = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
_KINDS = {
    "no": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp32": "fp32",
    "false": "fp32",
}


def read(
    text: str | Mapping[str, Any], given: ImportOptions | None = None, lenient: bool = False
) -> Imported:
    """The plan of an accelerate YAML (or JSON) with FSDP, as text or parsed. Raises `PlanError`
    naming the key.
    """
    given = given or ImportOptions()
    keys = ForeignKeys(
        spelled(
            mapping(yaml_files.parse(text, where="file") if isinstance(text, str) else text, "file")
        )
    )
    keys.sections("fsdp_config", "parallelism_config", "dynamo_config")
    _require_fsdp(keys)
    nodes = keys.count("num_machines")
    world = given.world(keys.count("num_processes"), "num_processes")
    if nodes is not None and world % nodes:
        raise refuse(
            "num_processes",
            f"is {world}, which num_machines {nodes} does not divide; every machine starts "
            "the same number",
        )
    cluster = given.cluster(world, **({"nodes": nodes} if nodes and nodes > 1 else {}))
    sizes = {
        axis: keys.count(f"{AXIS}{key}") or 1
        for axis, key in (("tensor", "tp_size"), ("context", "cp_size"))
    }
    keys.skip(f"{AXIS}sp_size", "runs under DeepSpeed, not FSDP (Ulysses)")
    wanted = precision(keys) or "fp32"
    strategy = {
        "stack": FRAMEWORK_PROFILES["fsdp"],
        "data": _data(keys, given, world, nodes or 1, sizes),
        "precision": wanted,
        "gradient_dtype": "parameters",
        "tensor": {"size": sizes["tensor"]},
        "context": {"size": sizes["context"], "algorithm": "ring"},
        "kernels": kernels_of(keys),
        "recompute": "full" if keys.flag(F + "activation_checkpointing") else "none",
    }
    for field in ("sequence_length", "micro_batch", "global_batch", "steps"):
        keys.assume(f"training.{field}", "default", "the user's script decides; the plan's default")
    model = given.the_model("an accelerate YAML does not say the model")
    _wrapping(keys, given, strategy)
    plan = {"model": model, "cluster": cluster, "strategy": strategy}
    keys.finish(known.KNOWN, known.WHYS, known.OPEN, lenient)
    return imported("fsdp", plan, keys, given)


def spelled(data: dict[str, Any]) -> dict[str, Any]:
    """The same keys with their prefixes, which accelerate lets one leave out inside a section; null
    is absent.
    """
    found: dict[str, Any] = {}
    for section, value in data.items():
        prefix = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}.get(
            str(section)
        )
        if prefix and isinstance(value, Mapping):
            renamed: dict[str, Any] = {}
            for key, inner in value.items():
                full = (
                    f"{prefix}{key}" if isinstance(key, str) and not key.startswith(prefix) else key
                )
                if full in renamed:
                    raise refuse(f"{section}.{full}", "is written twice; keep one of them")
                renamed[full] = inner
            value = {key: inner for key, inner in renamed.items() if inner is not None}
        if value is not None and value != {}:
            found[section] = value
    return found


def _require_fsdp(keys: ForeignKeys) -> None:
    kind = keys.take("distributed_type")
    if kind != "FSDP":
        raise refuse("distributed_type", f"is {shown(kind)}; legal here: FSDP")
    for other in ("deepspeed_config", "megatron_lm_config"):
        for key in keys.below(other):
            keys.skip(key, "read only with another distributed_type")


def _data(
    keys: ForeignKeys, given: ImportOptions, world: int, nodes: int, sizes: Mapping[str, int]
) -> dict[str, Any]:
    version = int(keys.choice(F + "version", {"1": 1, "2": 2}) or 1)
    zero, kept, node = _sharding(keys, version)
    others = sizes["tensor"] * sizes["context"]
    if world % others:
        raise refuse(
            "num_processes", f"is {world}, which tp_size x cp_size = {others} does not divide"
        )
    replicate, shard = (keys.count(AXIS + "dp_replicate_size"), keys.count(AXIS + "dp_shard_size"))
    data = world // others
    if shard is not None and (replicate or 1) * shard != data:
        raise refuse(
            AXIS + "dp_shard_size",
            f"is {shard}, but dp_replicate_size {replicate or 1} x dp_shard_size x "
            f"{others} other ranks is not num_processes {world}; "
            f"legal: {data // (replicate or 1)}",
        )
    if replicate is not None and data % replicate:
        raise refuse(
            AXIS + "dp_replicate_size",
            f"is {replicate}, which does not divide {data} data-parallel ranks",
        )
    if version == 2 and shard == 1 and sizes["context"] == 1:
        zero, kept, replicate = 0, False, None  # nothing left to shard: replicas only
    found: dict[str, Any] = {
        "zero": zero,
        "keep_gathered": kept,
        "reduce": "microbatch" if zero >= 2 else "step",
        "overlap": _prefetch(keys),
        "offload": _offload(keys, zero),
    }
    if node:
        found["shard"] = _node(given, world, nodes)
    elif (replicate or 1) > 1 and zero:
        found["shard"] = data // (replicate or 1) * sizes["context"]
    return found


def _wrapping(keys: ForeignKeys, given: ImportOptions, strategy: Mapping[str, Any]) -> None:
    """Report units other than layers, which an estimate gathers one at a time, by their size."""
    key, least = F + "auto_wrap_policy", F + "min_num_params"
    words = {str(number): name for number, name in enumerate(_POLICIES, start=1)}
    policy = keys.choice(key, words | {name: name for name in _POLICIES})
    wide = 4 if strategy["precision"] == "fp32" else 2
    if policy == "SIZE_BASED_WRAP" and (number := keys.integer(least, 0)):
        size = gib_text(wide * number)
        keys.mark_untranslated(
            least, f"units of {wide} bytes x so many parameters or more, {size}, are gathered"
        )
    if policy not in (None, "NO_WRAP") or strategy["data"]["zero"] < 2:
        return
    shape = given.model if isinstance(given.model, Shape) else None
    with suppress(ValueError):  # code, or a profile, whose parameters nobody has counted here
        shape = shape or model_shape(str(given.model))
    sized = f" = {gib_text(wide * parameters(shape).total)} a rank" if shape else ""
    why = (
        "one unit: the whole model is gathered from forward to backward, and its gradients reduced "
        f"at once, + {wide} bytes x parameters{sized}; an estimate gathers a layer at a time"
    )
    if policy is None:
        keys.assume(key, "NO_WRAP", f"accelerate's default: {why}")
    else:
        keys.mark_untranslated(key, why)


_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _offload(keys: ForeignKeys, zero: int) -> str:
    """What lives on the host: FSDP keeps parameters and gradients there between uses, so the
    optimizer steps there.
    """
    key = F + "offload_params"
    if not keys.flag(key):
        return "none"
    if zero == 3:
        return "parameters"
    if zero:
        keys.mark_untranslated(
            key,
            "a plan offloads parameters only where stage 3 shards them; the optimizer's states "
            "were taken",
        )
        return "optimizer"
    keys.mark_untranslated(key, "a plan offloads what is sharded, and nothing is here")
    return "none"


_PREFETCH = {
    "BACKWARD_PRE": True,
    "BACKWARD_POST": True,
    "NO_PREFETCH": False,
    "1": True,
    "2": True,
    "3": False,
    "None": False,
}
"""Name or number of a prefetch policy -> whether it overlaps."""


def _sharding(keys: ForeignKeys, version: int) -> tuple[int, bool, bool]:
    """(ZeRO stage, whether gathered parameters are kept for the backward pass, whether only a node
    shards).
    """
    names = {name: name for name in known.SHARDING}
    numbered = {str(number): name for number, name in enumerate(known.SHARDING, start=1)}
    older = keys.choice(F + "sharding_strategy", names | numbered)
    again = keys.choice(
        F + "reshard_after_forward", names | numbered | {"true": True, "false": False}
    )
    if version == 2:
        if older is not None:
            keys.mark_untranslated(
                F + "sharding_strategy",
                "read only by the first version; reshard_after_forward counts",
            )
        if isinstance(again, str):
            raise refuse(
                F + "reshard_after_forward", f"is {again} with fsdp_version 2; legal: true, false"
            )
        return 3, again is False, False
    if isinstance(again, bool):
        again = "FULL_SHARD" if again else "SHARD_GRAD_OP"
    if older and again and older != again:
        raise refuse(
            F + "reshard_after_forward",
            f"is {again}, but fsdp_sharding_strategy is {older}; legal: one of them",
        )
    zero, node = known.SHARDING[str(older or again or "FULL_SHARD")]
    return zero, False, node


def _node(given: ImportOptions, world: int, nodes: int) -> int:
    """Ranks of a node: as the machines say, else as the GPU's usual fabric has."""
    if nodes > 1:
        return world // nodes
    fabric: Fabric | None = given.fabric if isinstance(given.fabric, Fabric) else None
    if fabric is None and isinstance(given.gpu, str) and given.gpu in gpu_catalog.gpus():
        fabric = gpu_catalog.clusters()[gpu_catalog.gpus()[given.gpu].fabric]
    return min(world, fabric.gpus_per_node) if fabric else world


def kernels_of(keys: ForeignKeys) -> str:
    """eager, or compiled where the file turns dynamo on."""
    for key in ("dynamo_config.dynamo_backend", "dynamo_config.backend", "dynamo_backend"):
        if (backend := keys.text(key)) is not None and backend.upper() not in ("NO", "EAGER"):
            return "compiled"
    return "eager"


def precision(keys: ForeignKeys) -> str | None:
    """What `mixed_precision`, or the older `fp16`, says; None where neither does."""
    said, older = keys.choice("mixed_precision", _KINDS), keys.flag("fp16")
    if said is None:
        return "fp16" if older else None if older is None else "fp32"
    if older is not None and older != (said == "fp16"):
        raise refuse("fp16", f"is {older}, but mixed_precision is {said}; keep one of them")
    return str(said)


def _prefetch(keys: ForeignKeys) -> bool:
    """Whether the next layer's parameters are gathered ahead, by either name of the key."""
    found = [
        keys.choice(f"{F}{key}", _PREFETCH)
        for key in ("backward_prefetch", "backward_prefetch_policy")
    ]
    if found[1] not in (None, found[0]) and found[0] is not None:
        raise refuse(
            f"{F}backward_prefetch_policy",
            "is the older name of fsdp_backward_prefetch, and says otherwise; keep one of them",
        )
    return False not in found


def write(plan: Plan) -> Translation:
    """The plan as an accelerate YAML with FSDP, and the fields that it does not say. Raises
    `PlanError`.
    """
    full = plan.resolve()
    text = yaml_files.dump(_config(full))
    with nearest("fsdp"):
        back = read(text, ImportOptions(full.shape, full.gpu, None, full.fabric))
    return Translation(text, lost(plan, full, back, known.LOST, ("model", "cluster.gpu")))


def _config(full: ResolvedPlan) -> dict[str, Any]:
    precision, nodes = full.strategy.precision, int(full.cluster.nodes or 1)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": _fsdp(full),
        "machine_rank": 0,
        "mixed_precision": precision if precision in ("bf16", "fp16", "fp8") else "no",
        "num_machines": nodes,
        "num_processes": full.world_size,
        "use_cpu": full.gpu.device == "cpu",
    }
    if full.strategy.kernels == "compiled":
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return config | ({"parallelism_config": axes} if (axes := _axes(full)) else {})


def _fsdp(full: ResolvedPlan) -> dict[str, Any]:
    data, recompute = full.strategy.data, full.strategy.recompute
    every = recompute == "full" or (
        isinstance(recompute, list)
        and recompute != []
        and len(recomputed_layers(recompute, full.shape)) == full.shape.layers
    )
    found: dict[str, Any] = {
        "fsdp_activation_checkpointing": every,
        "fsdp_offload_params": data.offload != "none",
    }
    found["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    if data.zero == 3 or _axes(full):
        return {"fsdp_version": 2, "fsdp_reshard_after_forward": not data.keep_gathered, **found}
    word = (
        "NO_SHARD"
        if data.zero == 0
        else "HYBRID_SHARD_ZERO2"
        if _by_node(full)
        else "SHARD_GRAD_OP"
    )
    prefetch = "BACKWARD_PRE" if data.overlap else "NO_PREFETCH"
    return {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": word,
        "fsdp_backward_prefetch": prefetch,
        **found,
    }


def _by_node(full: Plan) -> bool:
    return full.strategy.data.shard == full.cluster.gpus_per_node != full.world_size


def _axes(full: ResolvedPlan) -> dict[str, int]:
    """Sizes that only the second version knows; empty where plain sharding says all."""
    sizes, data = full.sizes, full.strategy.data
    ranks, context = sizes["data"] * sizes["pipeline"], sizes["context"]
    shard = ranks
    if (
        isinstance(data.shard, int)
        and data.shard % context == 0
        and ranks % (data.shard // context) == 0
    ):
        shard = data.shard // context
    plain = shard == ranks or (data.zero < 3 and context == 1)
    if data.zero == 0 or (sizes["tensor"] * context == 1 and plain):
        shard = shard if data.zero else 1
        if sizes["tensor"] * context == 1:
            return {}
    found = {
        "dp_replicate_size": ranks // shard,
        "dp_shard_size": shard,
        "tp_size": sizes["tensor"],
        "cp_size": context,
    }
    return {f"parallelism_config_{key}": size for key, size in found.items()}
