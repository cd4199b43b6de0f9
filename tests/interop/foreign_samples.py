"""Samples of foreign configurations, and what tests ask of an import."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import interop
from workbench.errors import PlanError
from workbench.interop.translation import Imported, ImportOptions

SAMPLES = Path(__file__).parent / "foreign"

GPU_NAME = "h100-sxm-80gb"

ON_16 = ImportOptions("llama-3-8b", GPU_NAME, 16)


def problems(call: Callable[..., Any], *arguments: Any, **named: Any) -> dict[str, Any]:
    with pytest.raises(PlanError) as caught:
        call(*arguments, **named)
    return {problem.field: problem.message for problem in caught.value.problems}


def load(name: str, **given: Any) -> Imported:
    return interop.load(SAMPLES / name, gpu=GPU_NAME, **given)


def left(found: Imported) -> dict[str, Any]:
    return {note.field: note.value for note in found.untranslated}


def assumed(found: Imported) -> dict[str, Any]:
    return {note.field: note.value for note in found.assumed}


TRAINERS = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale_window": 1000},
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
        },
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}

OPTIMIZER = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "warmup_steps", "clip")

LEFT_OPEN = {
    *(f"training.optimizer.{field}" for field in OPTIMIZER),
    "strategy.precision",
    *(f"training.{field}" for field in ("global_batch", "micro_batch", "steps")),
    "strategy.data.bucket_mib",
}

RECIPE = """
ENV_VARS:
  NCCL_ALGO: Ring
BASE: &BASE
  --hidden-size: 64
  --num-attention-heads: 4
  --lr: 1e-4
MODEL_ARGS:
  <<: *BASE
  --num-layers: 4
  --seq-length: 64
  --micro-batch-size: 1
  --global-batch-size: 32
  --tensor-model-parallel-size: 2
  --bf16: true
  --swiglu: false
  --train-iters: null
  --num-experts: 4
  --moe-ffn-hidden-size: 32
  --moe-layer-freq: ([0]*1+[1]*3)
  --data-path: ${DATA_PATH}/text
  --recompute-modules: "[core_attn mlp]"
  --hierarchical-context-parallel-sizes: 2 2
  --wandb-exp-name: ""
MODEL_ARGS_2:
  <<: *BASE
TEST_TYPE: regular
METRICS: [lm loss]
"""

LLAMA = [
    "--num-layers",
    4,
    "--hidden-size",
    64,
    "--num-attention-heads",
    4,
    "--vocab-size",
    512,
    "--seq-length",
    64,
    "--micro-batch-size",
    1,
    "--global-batch-size",
    32,
    "--bf16",
]

NEOX = {
    "pipe_parallel_size": 0,
    "model_parallel_size": 1,
    "num_layers": 4,
    "hidden_size": 64,
    "seq_length": 64,
    "num_attention_heads": 4,
    "padded_vocab_size": 512,
    "train_micro_batch_size_per_gpu": 1,
}

ON_8 = ImportOptions(None, GPU_NAME, 8)

THROUGH_DEEPSPEED = """distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: nvme
  gradient_clipping: 0.5
  zero3_init_flag: true
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""

DS = '{"train_batch_size": 16, "zero_optimization": {"stage": 1}}'

TITAN = '[model]\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 2\n'

FSDP = "distributed_type: FSDP\nnum_processes: 16\n"

NOT_MEGATRONS = {"model.name", "model.positions", "model.embedding_norm"}
