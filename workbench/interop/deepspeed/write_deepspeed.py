"""A complete plan as a ds_config.json; what it cannot say is left out, or said as nearly as it
can.
"""

from __future__ import annotations

from typing import Any

from workbench.interop.deepspeed.deepspeed_keys import DECAYS
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import STORED, Plan

MIB = 2**20


def config(full: ResolvedPlan) -> dict[str, Any]:
    """The keys of a ds_config.json, nested."""
    s, t, sizes = full.strategy, full.training, full.sizes
    config: dict[str, Any] = {
        "train_batch_size": t.global_batch,
        "train_micro_batch_size_per_gpu": t.micro_batch,
        "gradient_accumulation_steps": full.num_microbatches,
        "gradient_clipping": t.optimizer.clip or 0.0,
        "zero_optimization": _zero(full),
        "data_types": {"grad_accum_dtype": s.gradient_dtype},
        "optimizer": _written_optimizer(full),
        "scheduler": _written_schedule(full),
    }
    stored = STORED.get(s.precision, s.precision)
    if stored == "bf16":
        # Both only where states are sharded, and the second beside the first alone.
        plain = t.optimizer.master == "none" and s.data.zero >= 1
        wide = {"bf16_master_weights_and_grads": plain}
        wide |= {"bf16_optimizer_states": plain and t.optimizer.moments == "bf16"}
        config["bf16"] = {"enabled": True} | {key: True for key, on in wide.items() if on}
    if stored == "fp32":
        config["bf16"] = {"enabled": False}
    if s.precision == "fp16":
        config["fp16"] = {"enabled": True}
    if sizes["tensor"] > 1:
        config["tensor_parallel"] = {"autotp_size": sizes["tensor"]}
    if sizes["context"] > 1:
        config |= {"sequence_parallel_size": sizes["context"], "data_parallel_size": sizes["data"]}
    if sizes["pipeline"] > 1:
        interval = 1 if s.recompute == "full" else 0
        config["pipeline"] = {
            "stages": sizes["pipeline"],
            "activation_checkpoint_interval": interval,
        }
    return config | {
        name: {"enabled": True} for name in full.telemetry.trackers if name != "mlflow"
    }


def _zero(full: ResolvedPlan) -> dict[str, Any]:
    data, gradients = full.strategy.data, full.strategy.gradient_dtype
    stage = min(data.zero, 1) if full.sizes["pipeline"] > 1 else data.zero
    found: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": data.overlap,
        "reduce_bucket_size": max(1, round(data.bucket_mib * MIB / DTYPE_BYTES[gradients])),
    }
    place: dict[str, Any] = {"device": "cpu"}
    if data.offload_tier == "disk":
        place = {"device": "nvme", "nvme_path": "/local_nvme"}
    share = {"ratio": data.offload_ratio} if data.offload_ratio != 1 and stage == 3 else {}
    if data.offload != "none":
        found["offload_optimizer"] = place | share
    if data.offload == "parameters" and stage == 3:
        found["offload_param"] = place
    return found


def _written_optimizer(full: Plan) -> dict[str, Any]:
    o = full.training.optimizer
    if o.name == "sgd":
        return {
            "type": "SGD",
            "params": {"lr": o.learning_rate, "momentum": o.beta1, "weight_decay": o.weight_decay},
        }
    params = {
        "lr": o.learning_rate,
        "betas": [o.beta1, o.beta2],
        "eps": o.epsilon,
        "weight_decay": o.weight_decay,
    }
    return {"type": "AdamW", "params": params}


def _written_schedule(full: Plan) -> dict[str, Any]:
    o = full.training.optimizer
    kind = next(name for name, decay in DECAYS.items() if decay == o.decay)
    params: dict[str, Any] = {"warmup_num_steps": o.warmup_steps}
    if kind != "WarmupCosineLR":
        params |= {"warmup_min_lr": 0, "warmup_max_lr": o.learning_rate, "warmup_type": "linear"}
    if kind != "WarmupLR":
        params["total_num_steps"] = full.training.steps
    return {
        "type": kind,
        "params": params | ({"cos_min_ratio": o.final_ratio} if kind == "WarmupCosineLR" else {}),
    }
