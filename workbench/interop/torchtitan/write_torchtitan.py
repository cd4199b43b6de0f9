"""A complete plan as the tables of a torchtitan job; what it cannot say is left out, or said as
nearly as it can.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from workbench.errors import refuse
from workbench.interop.foreign_keys import is_below
from workbench.interop.torchtitan import torchtitan_keys as known
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.recompute_rules import recomputed_layers
from workbench.plan.schema import STORED, Plan


def tables(
    full: ResolvedPlan, flavor: tuple[str, str] | None, named: bool, version: str
) -> dict[str, dict[str, Any]]:
    """Table -> keys and values, as `version` of torchtitan has them. `flavor` is torchtitan's own
    word for the model; a plan that is `named` keeps that. Raises `PlanError`.
    """
    _check_length(full)
    converters = known.CONVERTERS.get(version, known.NAMED_CONVERTERS)
    word = converters.get(full.strategy.precision)
    fp8 = {"converters": [word]} if word else {}
    model = {"name": flavor[0], "flavor": flavor[1]} if flavor else {}
    found: dict[str, dict[str, Any]] = {
        "job": {"description": full.name} if named else {},
        "model": {**model, **fp8},
        "training": _training(full),
        "parallelism": _parallelism(full, version),
        "activation_checkpoint": _recompute(full, version),
        "optimizer": _optimizer(full),
        "lr_scheduler": _schedule(full),
        "checkpoint": _checkpoint(full),
        "validation": _validation(full),
        "compile": {"enable": True} if full.strategy.kernels == "compiled" else {},
        "metrics": {f"enable_{name}": True for name in full.telemetry.trackers if name != "mlflow"},
        "comm": {"train_timeout_seconds": full.telemetry.timeout_seconds},
        "debug": {"seed": full.training.seed}
        | ({"deterministic": True} if full.training.deterministic else {}),
    }
    if full.sizes["context"] > 1:
        _split_context(found["parallelism"], model, version)
    if version == known.PYTHON:
        # Graphs are captured by default there, and a plan's layers are not.
        found["training"]["disable_cuda_graphs"] = True
        found["validation"].pop("local_batch_size", None)
    return _of_version(found, version)


def _of_version(tables: Mapping[str, Mapping[str, Any]], version: str) -> dict[str, dict[str, Any]]:
    """Tables with the names that keys have in a release, without those that it does not have."""
    names, lacks = known.RENAMED.get(version, {}), known.LACKS.get(version, ())
    found: dict[str, dict[str, Any]] = {}
    for table, rows in tables.items():
        for key, value in rows.items():
            path = f"{table}.{key}"
            section, _, last = names.get(path, path).partition(".")
            if not is_below(path, lacks):
                found.setdefault(section, {})[last] = value
    return found


def _split_context(rows: dict[str, Any], model: Mapping[str, str], version: str) -> None:
    """Say what context parallelism needs of FlexAttention, which all models of Python jobs have,
    and DeepSeek's of others.
    """
    if version == known.PYTHON:
        rows["context_parallel_load_balancer"] = "ptrr"
    elif model.get("name") == "deepseek_v3":
        raise refuse(
            "strategy.context.size",
            f"is above 1; cannot be written as torchtitan job of {version}, which splits no "
            f"context of deepseek_v3; legal: 1, or --framework-version {known.PYTHON}",
        )


def _check_length(full: ResolvedPlan) -> None:
    length = full.training.sequence_length
    parts = 2 * full.sizes["tensor"] * full.sizes["context"]
    if length % parts:
        raise refuse(
            "training.sequence_length",
            f"is {length}; cannot be written as torchtitan job, which cuts it into 2 x tensor x "
            f"context = {parts} parts; legal: a multiple of {parts}",
        )


def _training(full: ResolvedPlan) -> dict[str, Any]:
    s, t = full.strategy, full.training
    whole = t.global_batch // full.sizes["data"]
    found: dict[str, Any] = {
        "local_batch_size": whole if s.pipeline.size > 1 else t.micro_batch,
        "global_batch_size": t.global_batch,
        "seq_len": t.sequence_length,
        "steps": t.steps,
        "max_norm": t.optimizer.clip or 0.0,
        "mixed_precision_param": "float32"
        if STORED.get(s.precision, s.precision) == "fp32"
        else "bfloat16",
    }
    if s.precision in ("bf16", "fp8") and (t.optimizer.master, t.optimizer.moments) == (
        "none",
        "bf16",
    ):
        found["dtype"] = "bfloat16"
    return found | ({"enable_cpu_offload": True} if s.data.offload != "none" else {})


def _parallelism(full: ResolvedPlan, version: str) -> dict[str, Any]:
    s, sizes = full.strategy, full.sizes
    replicate, shard = _split(full, version)
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "tensor_parallel_degree": sizes["tensor"],
        "pipeline_parallel_degree": sizes["pipeline"],
        "context_parallel_degree": sizes["context"],
    }
    if shard * sizes["context"] > 1:
        kept = s.data.keep_gathered or s.data.zero == 2
        found["fsdp_reshard_after_forward"] = "never" if kept else "always"
    if s.expert.size > 1:
        found["expert_parallel_degree"] = s.expert.size
    if s.expert.size > 1 and sizes["tensor"] > 1:
        whole = s.expert.tensor in (None, sizes["tensor"])
        found["expert_tensor_parallel_degree"] = sizes["tensor"] if whole else 1
    if version == known.PYTHON and sizes["tensor"] > 1 and not s.tensor.sequence:
        found["enable_sequence_parallel"] = False
    return found | (_pipeline(full, version) if sizes["pipeline"] > 1 else {})


def _split(full: ResolvedPlan, version: str) -> tuple[int, int]:
    """(replicas, ranks that shard between them) of the data axis, as near as may be to the
    plan's: experts are spread over ranks that shard, and before 0.3.0 ranks that split anything
    else shard too. Raises `PlanError`.
    """
    data = full.sizes["data"]
    wanted = _wanted_split(full)[1]
    if full.world_size > data and version != known.PYTHON and wanted == 1:
        wanted = data
    if full.strategy.expert.size == 1 or version == "0.1.0":
        return data // wanted, wanted
    legal = [n for n in range(wanted, data + 1) if data % n == 0 and _holds(full, n, version)]
    if not legal:
        raise refuse(
            "strategy.expert.size",
            f"is {full.strategy.expert.size}; cannot be written as torchtitan job, which spreads "
            f"experts over context ranks, tensor ranks and {data} that shard",
        )
    return data // legal[0], legal[0]


def _holds(full: ResolvedPlan, shard: int, version: str) -> bool:
    """True where experts are spread legally with `shard` ranks that shard (`ParallelDims`)."""
    tensor, context, experts = full.sizes["tensor"], full.sizes["context"], full.strategy.expert
    whole = version != known.PYTHON and experts.tensor in (None, tensor)
    ranks, inner = (shard * context, context) if whole else (shard * context * tensor, 1)
    if not whole and version == "0.2.0":
        inner = context * tensor
    return ranks % experts.size == 0 and (version != "0.2.0" or experts.size % inner == 0)


def _wanted_split(full: ResolvedPlan) -> tuple[int, int]:
    data, sizes = full.strategy.data, full.sizes
    if data.zero == 0:
        return sizes["data"], 1
    if (
        data.shard == "all"
        or data.shard % sizes["context"]
        or sizes["data"] % (data.shard // sizes["context"])
    ):
        return 1, sizes["data"]
    shard = data.shard // sizes["context"]
    return sizes["data"] // shard, shard


def _pipeline(full: Plan, version: str) -> dict[str, Any]:
    p = full.strategy.pipeline
    assert isinstance(p.partition, list), "complete() writes the partition out"
    word = next((word for word, name in known.SCHEDULES.items() if name == p.schedule), None)
    found: dict[str, Any]
    if p.schedule.endswith(".csv"):
        found = {
            "pipeline_parallel_schedule": "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": p.schedule,
        }
    else:
        found = {
            "pipeline_parallel_schedule": word or ("Interleaved1F1B" if p.chunks > 1 else "1F1B")
        }
    found["pipeline_parallel_microbatch_size"] = full.training.micro_batch
    if version == "0.1.0":
        starts = itertools.accumulate(p.partition[:-1])
        return {**found, "pipeline_parallel_split_points": [f"layers.{n}" for n in starts]}
    head = "lm_head" if version == known.PYTHON else "output"
    return {**found, "module_fqns_per_model_part": _parts(p.partition, head)}


def _parts(partition: list[int], head: str) -> list[list[str]]:
    """Names of the modules of each stage."""
    parts: list[list[str]] = []
    start = 0
    for held in partition:
        parts.append([f"layers.{layer}" for layer in range(start, start + held)])
        start += held
    return (
        [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", head]]
        if len(parts) > 1
        else [["tok_embeddings", *parts[0], "norm", head]]
    )


def _recompute(full: ResolvedPlan, version: str) -> dict[str, Any]:
    word, layers = full.strategy.recompute, full.shape.layers
    if word == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    if isinstance(word, str):
        return {"mode": word}
    wanted = recomputed_layers(word, full.shape)
    if not wanted:
        return {"mode": "none"}
    step = min(wanted) + 1
    every_nth = version != known.PYTHON and step > 1
    if every_nth and sorted(wanted) == list(range(step - 1, layers, step)):
        return {"mode": "selective", "selective_ac_option": str(step)}
    return {"mode": "full"} if len(wanted) * 2 > layers else {"mode": "none"}


def _optimizer(full: Plan) -> dict[str, Any]:
    o = full.training.optimizer
    found = {
        "name": "AdamW",
        "lr": o.learning_rate,
        "beta1": o.beta1,
        "beta2": o.beta2,
        "eps": o.epsilon,
    }
    return {**found, "weight_decay": o.weight_decay}


def _schedule(full: Plan) -> dict[str, Any]:
    o = full.training.optimizer
    kind: dict[str, Any] = (
        {"decay_ratio": 0.0} if o.decay == "constant" else {"decay_type": o.decay}
    )
    return {"warmup_steps": o.warmup_steps, **kind, "min_lr_factor": o.final_ratio}


def _checkpoint(full: Plan) -> dict[str, Any]:
    c = full.checkpoint
    found: dict[str, Any] = {"enable": False}
    if c.every:
        found = {
            "enable": True,
            "interval": c.every,
            "async_mode": "async" if c.asynchronous else "disabled",
        }
    found["keep_latest_k"] = max(2, c.keep)
    return found | ({"initial_load_path": c.load} if c.load else {})


def _validation(full: ResolvedPlan) -> dict[str, Any]:
    """Evaluation, in batches of a rank as in training."""
    e, total = full.training.evaluation, full.training.global_batch
    local = _training(full)["local_batch_size"]
    steps = e.batches * total // (local * full.sizes["data"])
    found = {"enable": True, "freq": e.every, "local_batch_size": local, "steps": steps}
    return found if e.every else {}
