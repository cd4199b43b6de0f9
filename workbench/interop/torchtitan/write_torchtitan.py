"""A complete plan as the tables of a torchtitan job; what it cannot say is left out, or said as
nearly as it can.
"""

from __future__ import annotations

from typing import Any

from workbench.interop.torchtitan.torchtitan_keys import SCHEDULES
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.recompute_rules import recomputed_layers
from workbench.plan.schema import STORED, Plan


def tables(
    full: ResolvedPlan, flavor: tuple[str, str] | None, named: bool
) -> dict[str, dict[str, Any]]:
    """Table -> keys and values. `flavor` is torchtitan's own word for the model; a plan that is
    `named` keeps that.
    """
    words = {"fp8": ["float8"], "mxfp8": ["mx"]}.get(full.strategy.precision)
    fp8 = {"converters": words} if words else {}
    model = {"name": flavor[0], "flavor": flavor[1]} if flavor else {}
    found: dict[str, dict[str, Any]] = {
        "job": {"description": full.name} if named else {},
        "model": {**model, **fp8},
        "training": _training(full),
        "parallelism": _parallelism(full),
        "activation_checkpoint": _recompute(full),
        "optimizer": _optimizer(full),
        "lr_scheduler": _schedule(full),
        "checkpoint": _checkpoint(full),
        "validation": _validation(full),
        "metrics": {f"enable_{name}": True for name in full.telemetry.trackers if name != "mlflow"},
        "comm": {"train_timeout_seconds": full.telemetry.timeout_seconds},
    }
    return {table: rows for table, rows in found.items() if rows}


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
        "mixed_precision_reduce": "bfloat16" if s.gradient_dtype == "bf16" else "float32",
        "seed": t.seed,
    }
    if s.precision in ("bf16", "fp8") and (t.optimizer.master, t.optimizer.moments) == (
        "none",
        "bf16",
    ):
        found["dtype"] = "bfloat16"
    return (
        found
        | ({"enable_cpu_offload": True} if s.data.offload != "none" else {})
        | ({"deterministic": True} if t.deterministic else {})
        | ({"compile": True} if s.kernels == "compiled" else {})
    )


def _parallelism(full: ResolvedPlan) -> dict[str, Any]:
    s, sizes = full.strategy, full.sizes
    replicate, shard = _split(full)
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
    return found | (_pipeline(full) if sizes["pipeline"] > 1 else {})


def _split(full: ResolvedPlan) -> tuple[int, int]:
    """(replicas, ranks that shard between them) of the data axis, as near as may be to the
    plan's.
    """
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


def _pipeline(full: Plan) -> dict[str, Any]:
    p = full.strategy.pipeline
    assert isinstance(p.partition, list), "complete() writes the partition out"
    word = next((word for word, name in SCHEDULES.items() if name == p.schedule), None)
    if p.schedule.endswith(".csv"):
        found = {
            "pipeline_parallel_schedule": "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": p.schedule,
        }
    else:
        found = {
            "pipeline_parallel_schedule": word or ("Interleaved1F1B" if p.chunks > 1 else "1F1B")
        }
    return {
        **found,
        "pipeline_parallel_microbatch_size": full.training.micro_batch,
        "module_fqns_per_model_part": _parts(p.partition),
    }


def _parts(partition: list[int]) -> list[list[str]]:
    """Names of the modules of each stage."""
    parts, start = [], 0
    for held in partition:
        parts.append([f"layers.{layer}" for layer in range(start, start + held)])
        start += held
    return (
        [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]
        if len(parts) > 1
        else [["tok_embeddings", *parts[0], "norm", "output"]]
    )


def _recompute(full: ResolvedPlan) -> dict[str, Any]:
    word, layers = full.strategy.recompute, full.shape.layers
    if word == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    if isinstance(word, str):
        return {"mode": word}
    wanted = recomputed_layers(word, full.shape)
    if not wanted:
        return {"mode": "none"}
    step = min(wanted) + 1
    if sorted(wanted) == list(range(step - 1, layers, step)) and step > 1:
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
