"""A complete plan as Megatron-LM's arguments; what they cannot say is left out, or said as nearly
as they can.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import refuse
from workbench.interop.launch_environment import single_queue
from workbench.interop.megatron.model_arguments import write_model
from workbench.interop.translation_loss import PARTITION
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.recompute_rules import recomputed_layers
from workbench.plan.schema import STORED, Plan

MIB = 2**20
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_NARROW: dict[str, dict[str, Any]] = {
    "fp8": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "nvfp4": {"fp4-format": "e2m1"},
}
_CONTEXT_KINDS = {"ring": "p2p", "ulysses": "a2a", "usp": "a2a+p2p"}


def launch_variables(full: ResolvedPlan) -> dict[str, str]:
    """Environment that `validate_args` asks for: Megatron-FSDP wants several queues of kernels."""
    one = single_queue(full) and full.strategy.data.zero < 2
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one else {}


def launcher(full: Plan) -> dict[str, int]:
    """torchrun's words for the cluster."""
    return {
        "nproc_per_node": int(full.cluster.gpus_per_node or 1),
        "nnodes": int(full.cluster.nodes or 1),
    }


def written(full: ResolvedPlan) -> dict[str, Any]:
    """Argument (without dashes) -> value; True is a flag."""
    found = {
        **write_model(full),
        **_axes(full),
        **_data(full),
        **_recompute(full),
        **_precision(full),
        **_kernels(full),
    }
    return {**found, **_training(full), **_optimizer(full), **_keeping(full)}


def _on(**flags: bool) -> dict[str, Any]:
    return {key.replace("_", "-"): True for key, on in flags.items() if on}


def _axes(full: ResolvedPlan) -> dict[str, Any]:
    s, sizes = full.strategy, full.sizes
    found: dict[str, Any] = {
        "tensor-model-parallel-size": sizes["tensor"],
        "pipeline-model-parallel-size": sizes["pipeline"],
        "context-parallel-size": sizes["context"],
    }
    if s.pipeline.size > 1 and s.pipeline.chunks > 1:
        found["num-virtual-stages-per-pipeline-rank"] = s.pipeline.chunks
    stages = _stages(full)
    if len(set(stages)) > 1:
        found.pop("num-virtual-stages-per-pipeline-rank", None)
        layout = "|".join("t" * layers for layers in stages)
        found["pipeline-model-parallel-layout"] = f"E{layout}{'m' * full.shape.mtp_layers}L"
    if full.training.sequence_length % (2 * sizes["context"]) and sizes["context"] > 1:
        raise refuse(
            "training.sequence_length",
            f"is {full.training.sequence_length}; cannot be written as Megatron-LM arguments, "
            f"which cut it into 2 x context = {2 * sizes['context']} parts; legal: a multiple",
        )
    if sizes["context"] > 1:
        found["cp-comm-type"] = _CONTEXT_KINDS[s.context.algorithm]
    if sizes["context"] > 1 and s.context.algorithm == "usp":
        ulysses = s.context.ulysses_size
        found["hierarchical-context-parallel-sizes"] = [ulysses, sizes["context"] // ulysses]
    if s.expert.size > 1:
        found["expert-model-parallel-size"] = s.expert.size
    if s.expert.tensor is not None and full.shape.moe is not None:
        found["expert-tensor-parallel-size"] = s.expert.tensor
    sharing = [axis for axis in s.placement if axis in ("data", "pipeline")]
    swapped = sharing == ["pipeline", "data"] and sizes["pipeline"] > 1 and sizes["data"] > 1
    return found | _on(
        sequence_parallel=s.tensor.sequence and sizes["tensor"] > 1, use_tp_pp_dp_mapping=swapped
    )


def _stages(full: ResolvedPlan) -> list[int]:
    """Layers of each stage without those that predict a further token, which Megatron has in the
    last one.
    """
    stages, further = full.strategy.pipeline.partition, full.shape.mtp_layers
    if not isinstance(stages, list):
        return []
    if stages[-1] < further:
        raise refuse(
            PARTITION,
            f"has {stages[-1]} layers in the last stage, where Megatron-LM has all {further} of "
            f"model.mtp_layers; legal: at least {further} there",
        )
    return [*stages[:-1], stages[-1] - further]


def _data(full: ResolvedPlan) -> dict[str, Any]:
    data, replicas = full.strategy.data, full.sizes["data"] * full.sizes["context"]
    found = _on(
        use_distributed_optimizer=data.zero >= 1,
        use_megatron_fsdp=data.zero >= 2,
        overlap_grad_reduce=data.overlap,
        overlap_param_gather=data.overlap and data.zero >= 1,
        optimizer_cpu_offload=data.offload != "none",
        use_precision_aware_optimizer=data.offload != "none",
    )
    if data.zero >= 2:
        found["data-parallel-sharding-strategy"] = _SHARDING[data.zero]
        found["ckpt-format"] = "fsdp_dtensor"
    if isinstance(data.shard, int) and data.shard < replicas:
        found["num-distributed-optimizer-instances"] = replicas // data.shard
    if data.offload_ratio != 1:
        found["optimizer-offload-fraction"] = data.offload_ratio
    size = 4 if full.strategy.gradient_dtype == "fp32" else 2
    return found | {"ddp-bucket-size": max(1, round(data.bucket_mib * MIB / size))}


def _recompute(full: ResolvedPlan) -> dict[str, Any]:
    wanted = full.strategy.recompute
    if isinstance(wanted, str):
        whole = (
            {"recompute-method": "uniform", "recompute-num-layers": 1} if wanted == "full" else {}
        )
        return {} if wanted == "none" else {"recompute-granularity": wanted, **whole}
    stages = full.strategy.pipeline.partition
    assert isinstance(stages, list), "complete() writes the partition out"
    layers = recomputed_layers(wanted, full.shape)
    first = sum(layer in layers for layer in range(stages[0]))
    block = {
        "recompute-granularity": "full",
        "recompute-method": "block",
        "recompute-num-layers": first,
    }
    return block if first else {}


def _kernels(full: Plan) -> dict[str, Any]:
    """Attention and loss, where the plan states those of a framework."""
    s = full.strategy
    kind = next((k for k in _BACKENDS if s.attention.startswith(k)), None)
    found: dict[str, Any] = {}
    if kind and s.stack != "workbench":
        found["attention-backend"] = _BACKENDS[kind]
    if s.loss == "fused_linear" and s.stack != "workbench":
        found |= {"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "linear"}
    return found


_BACKENDS = {"flash": "flash", "cudnn": "fused", "unfused": "unfused"}
"""Begin of an attention's name -> word of --attention-backend."""


def _precision(full: ResolvedPlan) -> dict[str, Any]:
    precision, gradients = full.strategy.precision, full.strategy.gradient_dtype
    found = _on(
        bf16=STORED.get(precision, precision) == "bf16",
        fp16=precision == "fp16",
        accumulate_allreduce_grads_in_fp32=precision == "fp16" and gradients == "fp32",
        grad_reduce_in_bf16=gradients == "bf16",
    )
    return found | _NARROW.get(precision, {}) | _layers(full)


def _layers(full: ResolvedPlan) -> dict[str, Any]:
    """Whose layers run: Megatron's own neither split the context, nor compute in 8 bits or fewer,
    nor norm a sequence that tensor ranks split.
    """
    s, sizes = full.strategy, full.sizes
    split = sizes["context"] > 1 or (s.tensor.sequence and sizes["tensor"] > 1)
    if s.kernels != "eager" or split or s.precision in _NARROW:
        return {"transformer-impl": "transformer_engine"}
    return {"transformer-impl": "local", "no-persist-layer-norm": True}


def _training(full: Plan) -> dict[str, Any]:
    t = full.training
    found = {
        "seq-length": t.sequence_length,
        "micro-batch-size": t.micro_batch,
        "global-batch-size": t.global_batch,
        "train-iters": t.steps,
        "seed": t.seed,
        "hidden-dropout": t.dropout,
        "attention-dropout": 0.0,
        "tokenizer-type": "NullTokenizer",
        **_on(mock_data=True, deterministic_mode=t.deterministic),
    }
    if t.evaluation.every == 0:
        return {**found, "eval-iters": 0}
    return {**found, "eval-interval": t.evaluation.every, "eval-iters": t.evaluation.batches}


def _optimizer(full: Plan) -> dict[str, Any]:
    o = full.training.optimizer
    found: dict[str, Any] = {
        "optimizer": "sgd" if o.name == "sgd" else "adam",
        "lr": o.learning_rate,
        "min-lr": min(o.learning_rate, float(f"{o.learning_rate * o.final_ratio:.15g}")),
        "lr-decay-style": o.decay,
        "lr-decay-iters": full.training.steps,
        "lr-warmup-iters": o.warmup_steps,
        "weight-decay": o.weight_decay,
        "clip-grad": o.clip or 0.0,
    }
    if o.name == "sgd":
        found["sgd-momentum"] = o.beta1
    else:
        found |= {"adam-beta1": o.beta1, "adam-beta2": o.beta2, "adam-eps": o.epsilon}
    if o.moments == "bf16":
        found |= {
            "use-precision-aware-optimizer": True,
            "exp-avg-dtype": "bf16",
            "exp-avg-sq-dtype": "bf16",
        }
    return found


def _keeping(full: Plan) -> dict[str, Any]:
    c, telemetry = full.checkpoint, full.telemetry
    found: dict[str, Any] = {"distributed-timeout-minutes": -(-telemetry.timeout_seconds // 60)}
    if c.every:
        found |= {"save": "checkpoints", "save-interval": c.every}
        # Without a worker of its own a save is not asynchronous.
        found |= _on(async_save=c.asynchronous, use_persistent_ckpt_worker=c.asynchronous)
    if c.load is not None:
        found["load"] = c.load
    folders = {
        "tensorboard": ("tensorboard-dir", "tensorboard"),
        "wandb": ("wandb-project", "workbench"),
    }
    return found | dict(folders[name] for name in telemetry.trackers if name in folders)
