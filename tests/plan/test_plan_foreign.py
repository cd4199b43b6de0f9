"""Foreign configurations read: what they mean, what is left out and why, and what is refused by
name.
"""

import json
from pathlib import Path

import pytest

from workbench import data_files, interop
from workbench.errors import PlanError
from workbench.interop.accelerate import read_fsdp
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.export import export
from workbench.interop.foreign_keys import flat
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.megatron import read_megatron
from workbench.interop.torchtitan import read_torchtitan
from workbench.interop.translation import ImportOptions
from workbench.plan.schema import Plan
from workbench.safe_io import yaml_files

SAMPLES = Path(__file__).parent / "foreign"
GPU_NAME = "h100-sxm-80gb"
ON_16 = ImportOptions("llama-3-8b", GPU_NAME, 16)


def problems(call, *arguments, **named):
    with pytest.raises(PlanError) as caught:
        call(*arguments, **named)
    return {problem.field: problem.message for problem in caught.value.problems}


def load(name, **given):
    return interop.load(SAMPLES / name, gpu=GPU_NAME, **given)


def left(found):
    return {note.field: note.value for note in found.untranslated}


def assumed(found):
    return {note.field: note.value for note in found.assumed}


# ---- DeepSpeed -----------------------------------------------------------------------------------


def test_a_ds_config_says_sharding_batch_optimizer_and_so_how_many_gpus():
    found = load("ds_config.json", model="llama-3-8b")
    plan = found.plan
    assert (found.format, plan.strategy.stack) == ("deepspeed", "deepspeed-zero")
    assert plan.cluster.gpus == 512 // (4 * 8)
    assert (plan.strategy.data.zero, plan.strategy.data.offload, plan.strategy.data.overlap) == (
        2,
        "optimizer",
        True,
    )
    assert plan.strategy.data.bucket_mib == 2e8 * 4 / 2**20  # elements, in the gradients' fp32
    assert (plan.strategy.precision, plan.strategy.gradient_dtype) == ("bf16", "fp32")
    assert (plan.training.global_batch, plan.training.micro_batch, plan.training.steps) == (
        512,
        4,
        900,
    )
    optimizer = plan.training.optimizer
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.weight_decay) == (2e-4, 0.98, 0.05)
    assert (optimizer.decay, optimizer.warmup_steps, optimizer.final_ratio, optimizer.clip) == (
        "linear",
        30,
        0,
        0.5,
    )
    assert plan.telemetry.trackers == ["tensorboard"]
    assert left(found) == {
        "zero_optimization.allgather_bucket_size": 2e8,
        "zero_optimization.offload_optimizer.pin_memory": True,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.type": "WarmupDecayLR",
        "tensorboard.output_path": "logs",
        "flops_profiler.enabled": False,
        "steps_per_print": 20,
    }
    assert set(assumed(found)) == {"strategy.recompute", "training.sequence_length"}


@pytest.mark.parametrize(
    "name", ["ds_config.json", "accelerate.yaml", "megatron.sh", "torchtitan.toml"]
)
def test_the_stack_is_one_that_the_planner_knows(name):
    more = {} if name in ("megatron.sh", "torchtitan.toml") else {"model": "tiny"}
    assert load(name, **more).plan.strategy.stack in data_files.read("data/stacks.yaml")
    assert read_deepspeed.read(
        {"pipeline": {"stages": 2}}, ON_16
    ).plan.strategy.stack in data_files.read("data/stacks.yaml")


def test_every_key_of_a_file_is_either_translated_or_told():
    for name, more in (
        ("ds_config.json", {"model": "tiny"}),
        ("accelerate.yaml", {"model": "tiny"}),
        ("megatron.sh", {}),
    ):
        found = load(name, **more)
        told = [*found.translated, *left(found)]
        assert len(told) == len(set(told))
    keys = {
        "zero_optimization.stage",
        "steps_per_print",
        "train_batch_size",
        "scheduler.params.warmup_type",
        "scheduler.params.warmup_num_steps",
    }
    config = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 3,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log", "warmup_num_steps": 9}},
    }
    found = read_deepspeed.read(config, ON_16)
    assert keys | {"scheduler.type"} == {*found.translated, *left(found)}


@pytest.mark.parametrize(
    "sizes, global_batch, micro",
    [
        ((64, None, None), 64, 4),
        ((64, 2, None), 64, 2),
        ((None, 2, 3), 96, 2),
        ((64, None, 2), 64, 2),
    ],
)
def test_two_batch_sizes_give_the_third(sizes, global_batch, micro):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    training = read_deepspeed.read(config, ON_16).plan.training
    assert (training.global_batch, training.micro_batch) == (global_batch, micro)


def test_batch_sizes_that_contradict_each_other():
    config = {
        "train_batch_size": 60,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    message = problems(read_deepspeed.read, config, ON_16)["train_batch_size"]
    assert (
        "60" in message
        and "2 x gradient_accumulation_steps 2 x 16" in message
        and "legal: 64" in message
    )
    assert (
        "legal: 32"
        in problems(
            read_deepspeed.read,
            {"train_batch_size": 40, "train_micro_batch_size_per_gpu": 2},
            ON_16,
        )["train_batch_size"]
    )


def test_axes_of_a_ds_config_share_the_gpus():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
    }
    full = read_deepspeed.read(config, ON_16).plan.resolve()
    assert full.sizes == {"tensor": 2, "context": 2, "data": 2, "pipeline": 2}
    assert full.strategy.context.algorithm == "ulysses" and full.strategy.recompute == "full"


def test_auto_is_left_to_the_trainer_and_told():
    config = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    assert left(read_deepspeed.read(config, ON_16)) == {
        "train_batch_size": "auto",
        "zero_optimization.reduce_bucket_size": "auto",
    }


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


def test_auto_leaves_the_plans_own_default():
    found = read_deepspeed.read(TRAINERS, ON_16)
    full, plain = (
        found.plan.resolve(),
        Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="ddp").resolve(),
    )
    assert full.strategy.precision == plain.strategy.precision == "bf16"
    for field in OPTIMIZER:
        assert getattr(full.training.optimizer, field) == getattr(
            plain.training.optimizer, field
        ), field
    for field in ("global_batch", "micro_batch", "steps"):
        assert getattr(full.training, field) == getattr(plain.training, field), field
    assert full.strategy.data.bucket_mib == plain.strategy.data.bucket_mib
    notes = {note.field: note for note in found.assumed}
    assert set(notes) >= LEFT_OPEN
    assert notes["strategy.precision"].value == "bf16" and "auto" in notes["strategy.precision"].why
    assert notes["training.optimizer.weight_decay"].value == 0.1
    assert sum(value == "auto" for value in left(found).values()) == 16


def test_what_is_set_decides_where_the_file_says_auto():
    sets = {
        "strategy.precision": "fp16",
        "training.optimizer.learning_rate": 2e-5,
        "training.micro_batch": 4,
    }
    found = interop.read(json.dumps(TRAINERS), model="llama-3-8b", gpu=GPU_NAME, gpus=16, set=sets)
    full = found.plan.resolve()
    assert (full.strategy.precision, full.strategy.gradient_dtype) == ("fp16", "fp16")
    assert (full.training.optimizer.learning_rate, full.training.micro_batch) == (2e-5, 4)
    assert not set(sets) & set(assumed(found))


def test_auto_beside_what_the_file_says():
    wide = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20},
        "bf16": {"enabled": "auto"},
    }
    assert read_deepspeed.read(wide, ON_16).plan.strategy.data.bucket_mib == 2  # bf16 on this GPU
    fp16 = read_deepspeed.read({**TRAINERS, "fp16": {"enabled": True}}, ON_16)
    assert fp16.plan.strategy.precision == "fp16" and "strategy.precision" not in assumed(fp16)
    peak = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-5, "warmup_num_steps": 10}}
    rate = read_deepspeed.read({**TRAINERS, "scheduler": peak}, ON_16)
    assert rate.plan.training.optimizer.learning_rate == 1e-5
    assert "training.optimizer.learning_rate" not in assumed(rate)
    micro = (
        read_deepspeed.read({**TRAINERS, "train_micro_batch_size_per_gpu": 2}, ON_16)
        .plan.resolve()
        .training
    )
    assert (micro.micro_batch, micro.global_batch) == (2, 4 * 16 * 2)
    whole = (
        read_deepspeed.read({**TRAINERS, "train_batch_size": 256}, ON_16).plan.resolve().training
    )
    assert (whole.micro_batch, whole.global_batch) == (1, 256)
    steps = (
        read_deepspeed.read({**TRAINERS, "gradient_accumulation_steps": 8}, ON_16)
        .plan.resolve()
        .training
    )
    assert (steps.micro_batch, steps.global_batch) == (1, 8 * 16)
    assert (
        assumed(read_deepspeed.read({**TRAINERS, "gradient_accumulation_steps": 8}, ON_16))[
            "training.micro_batch"
        ]
        == 1
    )
    refused = problems(read_deepspeed.read, {"zero_optimization": {"stage": "auto"}}, ON_16)
    assert "'auto'; must be an integer" in refused["zero_optimization.stage"]


def test_offload_by_its_older_switches():
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}
    assert (
        read_deepspeed.read({"zero_optimization": zero}, ON_16).plan.strategy.data.offload
        == "parameters"
    )
    found = read_deepspeed.read({"zero_optimization": {**zero, "cpu_offload": False}}, ON_16)
    assert found.plan.strategy.data.offload == "none"
    assert left(found) == {"zero_optimization.cpu_offload_params": True}


def test_precision_that_no_key_says_is_assumed():
    assert (
        assumed(read_deepspeed.read({"train_batch_size": 16}, ON_16))["strategy.precision"]
        == "fp32"
    )
    off = {"train_batch_size": 16, "bf16": {"enabled": False}}
    assert "strategy.precision" not in assumed(read_deepspeed.read(off, ON_16))
    assert assumed(read_gpt_neox.read(NEOX, ON_8))["strategy.precision"] == "fp32"


def test_what_is_nearest_is_told_too():
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme"},
            "offload_param": {"device": "cpu"},
        },
        "optimizer": {"type": "Lamb"},
    }
    found = read_deepspeed.read(config, ON_16)
    assert (
        found.plan.strategy.data.offload == "parameters"
        and found.plan.training.optimizer.name == "adamw"
    )
    assert left(found) == {
        "zero_optimization.offload_optimizer.device": "nvme",
        "optimizer.type": "Lamb",
    }
    assert "optimizer.type" not in found.translated


# ---- Megatron-LM ---------------------------------------------------------------------------------


def test_a_megatron_script_holds_shape_cluster_and_strategy():
    found = load("megatron.sh")
    full = found.plan.resolve()
    assert full.strategy.stack == found.format == "megatron"
    shape = full.shape
    assert (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads) == (
        32,
        4096,
        11008,
        32,
        8,
    )
    assert (shape.positions, shape.norm, shape.mlp, shape.biases, shape.tied) == (
        "rope",
        "rmsnorm",
        "swiglu",
        "none",
        False,
    )
    assert full.sizes == {"tensor": 2, "context": 1, "data": 4, "pipeline": 4}
    assert (full.cluster.nodes, full.cluster.gpus_per_node) == (4, 8)
    pipeline = full.strategy.pipeline
    assert (pipeline.schedule, pipeline.chunks, pipeline.partition) == ("interleaved", 2, [4] * 8)
    assert (
        full.strategy.data.zero == 1
        and full.strategy.tensor.sequence
        and full.strategy.recompute == "selective"
    )
    assert full.strategy.gradient_dtype == "fp32" and full.checkpoint.every == 500
    assert full.training.optimizer.final_ratio == 0.1 and full.training.sequence_length == 4096
    assert left(found)["--data-path"] == ["part_a", "part_b"] and "--use-flash-attn" in left(found)
    assert assumed(found)["training.optimizer.epsilon"] == 1e-8


def test_a_mapping_of_arguments_with_experts():
    full = load("megatron.yaml", gpus=16).plan.resolve()
    moe = full.shape.moe
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared, moe.first_dense) == (8, 2, 128, 2, 1)
    assert full.strategy.expert.size == 4 and full.strategy.context.algorithm == "ulysses"
    assert full.strategy.precision == "fp8" and full.shape.biases == "none"


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


def test_a_recipe_of_megatrons_tests():
    found = interop.read(RECIPE, gpu=GPU_NAME, vocab_size=512)
    full = found.plan.resolve()
    assert (found.format, full.cluster.gpus, full.sizes["tensor"], full.strategy.precision) == (
        "megatron",
        8,
        2,
        "bf16",
    )
    assert (full.shape.moe.first_dense, full.shape.mlp, full.training.optimizer.learning_rate) == (
        1,
        "gelu",
        1e-4,
    )
    ignored = {note.field: note.why for note in found.ignored}
    assert {"ENV_VARS", "BASE", "MODEL_ARGS_2", "TEST_TYPE", "METRICS"} <= set(ignored)
    assert (
        "passes the word false" in ignored["--swiglu"]
        and "passes the word null" in ignored["--train-iters"]
    )
    assert (
        left(found)["--recompute-modules"] == ["core_attn", "mlp"]
        and left(found)["--data-path"] == "${DATA_PATH}/text"
    )
    assert left(found)[
        "--hierarchical-context-parallel-sizes"
    ] == "2 2" and "--wandb-exp-name" not in left(found)
    assert assumed(found)["--nproc-per-node"] == 8
    assert interop.read(RECIPE, gpu=GPU_NAME, vocab_size=512, gpus=64).plan.cluster.gpus == 64
    seeded = RECIPE.replace("--bf16: true", "--seed: ${REPEAT}")
    assert (
        interop.read(seeded, gpu=GPU_NAME, vocab_size=512, set={"REPEAT": 5}).plan.training.seed
        == 5
    )


@pytest.mark.parametrize(
    "old, new, field, words",
    [
        ("TEST_TYPE: regular", "MODE: inference", "MODE", "legal: pretraining"),
        ("parallel-size: 2", "parallel-size: ${TP}", "--tensor-model-parallel-size", "${TP}"),
        ("--bf16: true", "--no-such-thing: true", "--no-such-thing", "unknown key"),
        ("<<: *BASE", "<<: 3", "<<", "an anchor"),
    ],
)
def test_recipes_refused_by_name(old, new, field, words):
    assert (
        words
        in problems(interop.read, RECIPE.replace(old, new), gpu=GPU_NAME, vocab_size=512)[field]
    )


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


@pytest.mark.parametrize(
    "spell",
    [list, json.dumps, lambda w: " ".join(map(str, w)), lambda w: "\n".join(f"- {x}" for x in w)],
)
def test_arguments_may_be_a_list_text_json_or_yaml(spell):
    plan = read_megatron.read(spell(LLAMA), ImportOptions(None, GPU_NAME, 8)).plan
    assert plan.resolve().shape.ffn == 256 and plan.strategy.precision == "bf16"


def test_the_rest_of_a_script_is_no_argument():
    script = """set -e
ROOT=/data  # where it all is
if [ "$RANK" == 0 ]; then echo "starts --now"; fi
CORE="--num-layers 4 --hidden-size 64
      --num-attention-heads 4"
torchrun --nproc_per_node=8 train.py $CORE --vocab-size 512 --seq-length 64 --bf16 \\
    --micro-batch-size 1 --save '/my runs/a' "$@" | tee "$ROOT/log"
echo done
"""
    found = read_megatron.read(script, ImportOptions(None, GPU_NAME))
    assert found.plan.cluster.gpus == 8 and found.plan.strategy.precision == "bf16"
    assert left(found) == {"--save": "/my runs/a"}


@pytest.mark.parametrize(
    "more, field, value",
    [
        (
            [
                "--recompute-granularity",
                "full",
                "--recompute-method",
                "block",
                "--recompute-num-layers",
                1,
                "--pipeline-model-parallel-size",
                2,
            ],
            "recompute",
            [0, 2],
        ),
        (["--recompute-activations"], "recompute", "selective"),
        (["--use-tp-pp-dp-mapping"], "placement", ["tensor", "context", "pipeline", "data"]),
        (["--transformer-impl", "local"], "kernels", "eager"),
    ],
)
def test_words_of_a_strategy(more, field, value):
    found = read_megatron.read([*LLAMA, *more], ImportOptions(None, GPU_NAME, 8))
    assert getattr(found.plan.strategy, field) == value


@pytest.mark.parametrize(
    "more, counts",
    [
        (["--pipeline-model-parallel-layout", "Et|(t|)*2tL"], [1, 1, 1, 1]),
        (["--pipeline-model-parallel-layout", "Et*2|tL|t|"], None),
        (["--decoder-first-pipeline-num-layers", 1], [1, 3]),
        (["--pp-partition-method", "type:transformer|embedding"], [2, 2]),
    ],
)
def test_uneven_stages(more, counts):
    words = [*LLAMA, "--pipeline-model-parallel-size", 2, *more]
    if counts is None:
        assert "--pipeline-model-parallel-layout" in problems(
            read_megatron.read, words, ImportOptions(None, GPU_NAME, 8)
        )
    else:
        assert (
            read_megatron.read(
                words, ImportOptions(None, GPU_NAME, 8)
            ).plan.strategy.pipeline.partition
            == counts
        )


def test_a_model_that_is_given_wins_and_what_differs_is_told():
    found = read_megatron.read(LLAMA, ImportOptions("tiny", GPU_NAME, 8))
    assert found.plan.model == "tiny"
    assert left(found) == {"--hidden-size": 64}


@pytest.mark.parametrize(
    "text, dense",
    [
        ("([0]*1+[1]*3)", 1),
        ("[0]+[1]*3", 1),
        ("([0,0]+[1]*2)", 2),
        ("[0,0,1,1]", 2),
        ("[0]*1+[1]*9", None),
        ("[0,1,0,1]", None),
        ("[1]*4+x", None),
    ],
)
def test_which_layers_have_experts(text, dense):
    found = read_megatron.read(
        [*LLAMA, "--num-experts", 4, "--moe-layer-freq", text], ImportOptions(None, GPU_NAME, 8)
    )
    assert found.plan.resolve().shape.moe.first_dense == (dense or 0)
    assert ("--moe-layer-freq" in left(found)) == (dense is None)


def test_a_warm_up_longer_than_the_run_is_cut_and_told():
    found = read_megatron.read(
        [*LLAMA, "--train-iters", 10, "--lr-warmup-samples", 3200], ImportOptions(None, GPU_NAME, 8)
    )
    assert (
        found.plan.training.optimizer.warmup_steps == 10
        and left(found)["--lr-warmup-samples"] == 3200
    )


def test_a_list_says_a_value_twice():
    assert (
        read_megatron.read([*LLAMA, "--num-layers", 4], ImportOptions(None, GPU_NAME, 8))
        .plan.resolve()
        .shape.layers
        == 4
    )
    found = problems(
        read_megatron.read, [*LLAMA, "--num-layers", 5], ImportOptions(None, GPU_NAME, 8)
    )
    assert found["--num-layers"].startswith("is 4 and 5, written twice")


def test_without_a_shape_each_missing_argument_is_named():
    found = problems(
        read_megatron.read, "--bf16 --micro-batch-size 1", ImportOptions(None, GPU_NAME, 8)
    )
    assert set(found) == {"--num-layers", "--hidden-size", "--num-attention-heads"}
    assert "--model" in found["--num-layers"]


# ---- gpt-neox ------------------------------------------------------------------------------------


def test_a_gpt_neox_yaml_holds_shape_strategy_and_training():
    found = load("gpt_neox.yml", gpus=16)
    full, optimizer = found.plan.resolve(), found.plan.training.optimizer
    assert (found.format, full.strategy.stack) == ("gpt-neox", "deepspeed-3d")
    shape = full.shape
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocab) == (
        24,
        1024,
        16,
        4096,
        50257,
    )
    assert (shape.norm, shape.norm_epsilon, shape.positions, shape.mlp) == (
        "rmsnorm",
        1e-6,
        "rope",
        "gelu",
    )
    assert (shape.biases, shape.tied, shape.unmodelled) == ("all", False, None)
    assert full.sizes == {"tensor": 2, "context": 1, "data": 4, "pipeline": 2}
    assert (full.strategy.data.zero, full.strategy.data.overlap, full.strategy.recompute) == (
        1,
        True,
        "full",
    )
    assert (full.strategy.precision, full.strategy.gradient_dtype) == ("bf16", "bf16")
    assert full.strategy.data.bucket_mib == 2e8 * 2 / 2**20
    assert (full.training.global_batch, full.training.micro_batch, full.training.dropout) == (
        4 * 8 * 4,
        4,
        0.1,
    )
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (
        2e-4,
        0.98,
        0.05,
        1.0,
    )
    assert (optimizer.decay, optimizer.warmup_steps, optimizer.final_ratio) == ("cosine", 20, 0.1)
    assert (full.training.steps, full.training.evaluation.every, full.training.sequence_length) == (
        1000,
        100,
        1024,
    )
    told = {*found.translated, *left(found)}
    keys = {*flat(yaml_files.parse((SAMPLES / "gpt_neox.yml").read_text()))}
    assert keys == told and set(left(found)) == {
        "tokenizer_type",
        "scaled-upper-triang-masked-softmax-fusion",
        "fp16.loss_scale",
        "data-path",
    }


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


@pytest.mark.parametrize(
    "more, width",
    [
        ({}, 256),
        ({"activation": "swiglu", "mlp_multiple_of": 256, "intermediate_size": 32768}, 11008),
        ({"activation": "silu", "mlp_type": "llama", "hidden_size": 4096}, 11008),
        ({"expansion_factor": 3}, 192),
        ({"activation": "geglu", "intermediate_size": 768}, 256),
    ],
)
def test_widths_of_gpt_neox(more, width):
    assert read_gpt_neox.read({**NEOX, **more}, ON_8).plan.resolve().shape.ffn == width


def test_what_gpt_neox_computes_beyond_a_shape_is_told():
    odd = {"gpt_j_residual": True, "rotary_pct": 0.25, "use_bias_in_attn_linear": False}
    words = read_gpt_neox.read({**NEOX, **odd}, ON_8).plan.resolve().shape.unmodelled
    assert (
        words == "gpt_j_residual true; rotary_pct 0.25; biases in attention or in the feed-forward "
        "layers only"
    )


@pytest.mark.parametrize(
    "more, field, words",
    [
        ({"pos_emb": "rpe"}, "pos_emb", "legal: learned, rotary, alibi"),
        ({"num-layers": 3}, "num-layers", "twice"),
        ({"num_experts": 4}, "num_experts", "--model"),
        ({"model_parallel_size": 3}, "gpus", "= 3 does not divide"),
        ({"precision": "fp32", "bf16": {"enabled": True}}, "precision", "bf16 is enabled"),
        ({"optimizer": {"type": "sm3"}}, "optimizer.type", "legal: Adam"),
        ({"hiden_size": 4}, "hiden_size", "did you mean"),
        (
            {"padded_vocab_size": None, "tokenizer_type": "HFTokenizer"},
            "padded_vocab_size",
            "--vocab-size",
        ),
    ],
)
def test_gpt_neox_refused_by_name(more, field, words):
    assert words in problems(read_gpt_neox.read, {**NEOX, **more}, ON_8)[field]


def test_gpt_neox_takes_a_vocabulary_or_a_model_from_beside():
    text = yaml_files.dump(
        {key: value for key, value in NEOX.items() if key != "padded_vocab_size"}
    )
    assert (
        interop.read(text, gpu=GPU_NAME, gpus=8, vocab_size=50304).plan.resolve().shape.vocab
        == 50304
    )
    found = interop.read(text, gpu=GPU_NAME, gpus=8, model="tiny")
    assert found.plan.model == "tiny" and left(found)["hidden_size"] == 64


def test_yaml_in_braces_is_yaml():
    text = '{ # flow style\n  "train_batch_size": 16,\n  "zero_optimization": {"stage": 1,},\n}\n'
    found = interop.read(text, model="tiny", gpu=GPU_NAME, gpus=16)
    assert found.format == "deepspeed" and found.plan.strategy.data.zero == 1
    assert (
        "not valid JSON"
        in problems(interop.read, '{"train_batch_size": ]', model="tiny", gpu=GPU_NAME, gpus=8)[
            "file"
        ]
    )


# ---- torchtitan and FSDP -------------------------------------------------------------------------


def test_a_torchtitan_job():
    found = load("torchtitan.toml")
    plan, data = found.plan, found.plan.strategy.data
    assert (plan.model, plan.name, plan.cluster.gpus, plan.strategy.stack) == (
        "llama-3-8b",
        "an 8B job",
        32,
        "torchtitan",
    )
    assert (data.zero, data.shard, data.reduce, data.keep_gathered) == (3, 8, "microbatch", False)
    assert (
        plan.strategy.tensor.sequence
        and plan.strategy.precision == "fp8"
        and plan.strategy.kernels == "compiled"
    )
    assert (
        plan.training.micro_batch,
        plan.training.global_batch,
        plan.training.sequence_length,
    ) == (2, 64, 8192)
    assert (plan.checkpoint.every, plan.checkpoint.keep) == (100, 3)
    assert set(left(found)) == {
        "job.dump_folder",
        "training.dataset",
        "parallelism.enable_async_tensor_parallel",
        "float8.recipe_name",
    }


@pytest.mark.parametrize(
    "name, flavor, model",
    [
        ("llama2", "7B", "llama-2-7b"),
        ("llama2", "70B", "llama-2-70b"),
        ("llama3", "1B", "llama-3.2-1b"),
        ("llama3", "3B", "llama-3.2-3b"),
        ("llama3", "8B_flex", "llama-3-8b"),
        ("simple_fsdp.llama3", "8B", "llama-3-8b"),
        ("deepseek_v3", "16B", "deepseek-v2-lite"),
        ("deepseek_v3", "236B", "deepseek-v2"),
    ],
)
def test_flavors_of_torchtitan_that_the_catalog_holds(name, flavor, model):
    found = read_torchtitan.read(
        {"model": {"name": name, "flavor": flavor}}, ImportOptions(None, GPU_NAME, 8)
    )
    assert found.plan.model == model
    assert bool(left(found)) == ("_" in flavor or "." in name)


@pytest.mark.parametrize(
    "name, flavor", [("llama3", "debugmodel"), ("llama2", "26B"), ("qwen3", "32B"), ("flux", "dev")]
)
def test_other_flavors_are_refused_with_the_remedy(name, flavor):
    words = problems(
        read_torchtitan.read,
        {"model": {"name": name, "flavor": flavor}},
        ImportOptions(None, GPU_NAME, 8),
    )["model"]
    assert (
        f"'{name}', model.flavor '{flavor}'" in words
        and "--model" in words
        and "llama3: 8B, 70B" in words
    )


def test_an_optimizer_that_a_plan_does_not_know_is_refused_unless_one_is_set():
    job = {"model": {"flavor": "8B"}, "optimizer": {"name": "Muon", "lr": 1e-3}}
    words = problems(read_torchtitan.read, job, ImportOptions(None, GPU_NAME, 8))["optimizer.name"]
    assert "'Muon'" in words and "--set training.optimizer.name" in words
    found = read_torchtitan.read(
        job, ImportOptions(None, GPU_NAME, 8, sets={"training.optimizer.name": "adamw"})
    )
    assert (
        left(found) == {"optimizer.name": "Muon"}
        and found.plan.training.optimizer.learning_rate == 1e-3
    )


def test_a_torchtitan_job_of_2024_has_its_degrees_elsewhere():
    text = """[model]\nflavor = "8B"\n[training]\nbatch_size = 1\ntensor_parallel_degree = 2\nwarmup_steps = 7
data_parallel_degree = -1\n[experimental]\npipeline_parallel_degree = 2\n"""
    full = read_torchtitan.read(text, ImportOptions(None, GPU_NAME, 8)).plan.resolve()
    assert full.sizes == {"tensor": 2, "context": 1, "data": 2, "pipeline": 2}
    assert full.training.optimizer.warmup_steps == 7


def test_every_second_layer_is_a_list_of_layers():
    text = (
        '[model]\nflavor = "8B"\n[activation_checkpoint]\nmode = '
        '"selective"\nselective_ac_option = "2"\n'
    )
    assert read_torchtitan.read(
        text, ImportOptions(None, GPU_NAME, 8)
    ).plan.strategy.recompute == list(range(1, 32, 2))


def test_a_pipeline_of_torchtitan_counts_its_own_microbatches():
    text = """[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 8\n
[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "ZBVZeroBubble"\n"""
    full = read_torchtitan.read(text, ImportOptions(None, GPU_NAME, 8)).plan.resolve()
    assert full.strategy.pipeline.schedule == "zb-v" and len(full.strategy.pipeline.partition) == 8
    assert full.training.micro_batch == 1 and full.num_microbatches == 8


def test_an_accelerate_yaml_with_fsdp():
    found = load("accelerate.yaml", model="llama-3-8b")
    plan, data = found.plan, found.plan.strategy.data
    assert (plan.cluster.gpus, plan.cluster.nodes, plan.strategy.stack) == (16, 2, "fsdp")
    assert (data.zero, data.shard, data.overlap) == (3, 8, True)
    assert plan.strategy.recompute == "full" and plan.strategy.precision == "bf16"
    assert "training.global_batch" in assumed(found) and left(found)["rdzv_backend"] == "static"


@pytest.mark.parametrize(
    "word, zero",
    [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), (1, 3), ("full_shard", 3)],
)
def test_sharding_strategies(word, zero):
    config = {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"sharding_strategy": word},
    }
    assert (
        read_fsdp.read(config, ON_16 and ImportOptions("tiny", GPU_NAME)).plan.strategy.data.zero
        == zero
    )


def test_the_second_version_keeps_or_frees_gathered_parameters():
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    data = read_fsdp.read(
        {"distributed_type": "FSDP", "fsdp_config": section}, ON_16
    ).plan.strategy.data
    assert (data.zero, data.keep_gathered) == (3, True)


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


def test_an_accelerate_yaml_with_deepspeed_in_its_own_keys():
    found = interop.read(THROUGH_DEEPSPEED, model="llama-3-8b", gpu=GPU_NAME)
    full = found.plan.resolve()
    assert (found.format, full.strategy.stack, full.cluster.gpus, full.cluster.nodes) == (
        "fsdp",
        "deepspeed-zero",
        16,
        2,
    )
    assert (full.strategy.data.zero, full.strategy.data.offload) == (3, "optimizer")
    assert (full.strategy.precision, full.training.optimizer.clip) == ("bf16", 0.5)
    assert set(found.translated) == {
        "distributed_type",
        "num_processes",
        "num_machines",
        "mixed_precision",
        "deepspeed_config.zero_stage",
        "deepspeed_config.gradient_clipping",
    }
    assert set(left(found)) == {
        "deepspeed_config.offload_optimizer_device",
        "deepspeed_config.zero3_init_flag",
        "machine_rank",
    }
    plain = Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="ddp").resolve().training
    assert (full.training.global_batch, full.training.micro_batch) == (
        plain.global_batch,
        plain.micro_batch,
    )
    assert {"training.global_batch", "training.optimizer.name"} <= set(assumed(found))
    fewer = interop.read(
        THROUGH_DEEPSPEED.replace("  zero_stage: 3\n", ""), model="llama-3-8b", gpu=GPU_NAME
    )
    assert fewer.plan.strategy.data.zero == 2 and assumed(fewer)["strategy.data.zero"] == 2


def test_an_accelerate_yaml_that_names_a_ds_config(tmp_path):
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: fp16\ndeepspeed_config:\n"
    )
    (tmp_path / "config.yaml").write_text(
        text + "  deepspeed_config_file: ds.json\n  zero_stage: 1\n"
    )
    ds = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "steps_per_print": 7,
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    found = interop.load(tmp_path / "config.yaml", model="tiny", gpu=GPU_NAME)
    assert (found.plan.strategy.data.zero, found.plan.strategy.precision) == (2, "fp16")
    assert "ds.json: zero_optimization.stage" in found.translated
    assert {
        "ds.json: steps_per_print",
        "ds.json: train_batch_size",
        "deepspeed_config.zero_stage",
    } == set(left(found))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stag": 2}}')
    assert (
        "did you mean"
        in problems(interop.load, tmp_path / "config.yaml", model="tiny", gpu=GPU_NAME)[
            "ds.json: zero_optimization.stag"
        ]
    )


@pytest.mark.parametrize("kind, gpus", [("MULTI_GPU", 8), ("MULTI_NPU", 8), ("NO", 1)])
def test_an_accelerate_yaml_without_sharding(kind, gpus):
    text = (
        f"distributed_type: {kind}\nmixed_precision: bf16\ngpu_ids: all\nfsdp_config: "
        f"{{fsdp_version: 2}}\n"
    )
    found = interop.read(
        text + (f"num_processes: {gpus}\n" if gpus > 1 else ""), model="tiny", gpu=GPU_NAME
    )
    full = found.plan.resolve()
    assert (full.cluster.gpus, full.strategy.data.zero, full.strategy.precision) == (
        gpus,
        0,
        "bf16",
    )
    assert full.strategy.gradient_dtype == "fp32"
    assert set(left(found)) == {"mixed_precision", "gpu_ids", "fsdp_config.fsdp_version"}
    assert {"training.global_batch", "strategy.recompute"} <= set(assumed(found))


def test_the_launchers_half_of_an_export_is_the_plan_beside_it(tmp_path):
    plan = Plan.of("tiny", gpu=GPU_NAME, gpus=4, strategy="zero-3", set={"training.steps": 7})
    export(plan, tmp_path)
    found = interop.load(tmp_path / "accelerate.yaml")
    assert found.plan.resolve() == Plan.load(tmp_path / "plan.yaml").resolve()
    assert {"num_processes", "distributed_type", "mixed_precision"} <= {
        note.field for note in found.ignored
    }
    assert str(tmp_path / "plan.yaml") in found.ignored[0].why
    more = interop.load(tmp_path / "accelerate.yaml", set={"training.steps": 9})
    assert more.plan.training.steps == 9
    text = (
        (tmp_path / "accelerate.yaml").read_text().replace("num_processes: 4", "num_processes: 8")
    )
    (tmp_path / "accelerate.yaml").write_text(text)
    assert "cluster.gpus 4" in problems(interop.load, tmp_path / "accelerate.yaml")["num_processes"]


@pytest.mark.parametrize(
    "section, overlap, zero",
    [
        ({"fsdp_backward_prefetch_policy": "NO_PREFETCH", "fsdp_sharding_strategy": 2}, False, 2),
        ({"backward_prefetch_policy": "BACKWARD_POST", "sharding_strategy": 5}, True, 2),
        (
            {
                "fsdp_backward_prefetch": 3,
                "fsdp_sharding_strategy": "1",
                "fsdp_limit_all_gathers": True,
            },
            False,
            3,
        ),
    ],
)
def test_older_names_of_fsdp(section, overlap, zero):
    config = {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": section,
        "dynamo_backend": "INDUCTOR",
    }
    found = read_fsdp.read({**config, "fp16": True}, ImportOptions("tiny", GPU_NAME)).plan.strategy
    assert (found.data.overlap, found.data.zero, found.precision, found.kernels) == (
        overlap,
        zero,
        "fp16",
        "compiled",
    )


@pytest.mark.parametrize(
    "word, offload, told",
    [
        ("FULL_SHARD", "parameters", ""),
        ("NO_SHARD", "none", "nothing is"),
        ("SHARD_GRAD_OP", "optimizer", "optimizer's states"),
    ],
)
def test_what_fsdp_offloads(word, offload, told):
    section = {"fsdp_sharding_strategy": word, "fsdp_offload_params": True}
    config = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": section}
    found = read_fsdp.read(config, ImportOptions("tiny", GPU_NAME))
    why = {note.field: note.why for note in found.untranslated}
    assert found.plan.resolve().strategy.data.offload == offload
    assert told in why.get("fsdp_config.fsdp_offload_params", "")
    assert bool(told) == ("fsdp_config.fsdp_offload_params" in why)


# ---- what is refused -----------------------------------------------------------------------------

DS = '{"train_batch_size": 16, "zero_optimization": {"stage": 1}}'
TITAN = '[model]\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 2\n'
FSDP = "distributed_type: FSDP\nnum_processes: 16\n"


@pytest.mark.parametrize(
    "text, field, words",
    [
        (DS[:-1], "file", "not valid JSON at line 1"),
        (DS.replace("{", '{"bf16": {}, "bf16": {}, ', 1), "bf16", "written twice"),
        (DS.replace('"stage": 1', '"stage": 1, "stage": 2'), "stage", "written twice"),
        (
            DS.replace('"stage": 1', '"stage": 5'),
            "zero_optimization.stage",
            "at least 0 and at most 3",
        ),
        (
            DS.replace('"stage": 1', '"stag": 1'),
            "zero_optimization.stag",
            "did you mean zero_optimization.stage",
        ),
        (DS.replace("16", '"many"'), "train_batch_size", "is 'many'; must be an integer"),
        (DS.replace("16", "NaN"), "", "NaN is no number"),
        (
            DS.replace("}}", '}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}'),
            "fp16.enabled",
            "one of them",
        ),
        (DS.replace("}}", '}, "optimizer": {"type": "Sgdd"}}'), "optimizer.type", "legal: Adam"),
        ("[model\n[parallelism]\n[training]", "file", "not valid TOML"),
        (
            TITAN + "tensor_parallel_degree = 4\n",
            "parallelism.tensor_parallel_degree",
            "written twice (lines 4 and 5)",
        ),
        (TITAN + "data_parallel_shard_degree = 3\n", "gpus", "the file says 6"),
        (
            TITAN + "pipeline_parallel_schedule = '2F2B'\n",
            "parallelism.pipeline_parallel_schedule",
            "1F1B, GPipe",
        ),
        (
            TITAN + "data_parallel_shard_degree = 0\n",
            "parallelism.data_parallel_shard_degree",
            "legal: -1",
        ),
        (TITAN + "degree = 3\n", "parallelism.degree", "unknown key"),
        (
            TITAN.replace("= 2", "= 'two'"),
            "parallelism.tensor_parallel_degree",
            "must be an integer",
        ),
        (FSDP + "num_processes: 8\n", "num_processes", "lines 2 and 3"),
        (FSDP.replace("16", "12"), "gpus", "the file says 12"),
        (FSDP.replace("FSDP", "XLA"), "distributed_type", "legal here: FSDP, DEEPSPEED"),
        (FSDP.replace("FSDP", "MEGATRON_LM"), "distributed_type", "arguments"),
        (
            FSDP.replace("FSDP", "DEEPSPEED") + "deepspeed_config: {zero_stage: 4}\n",
            "deepspeed_config.zero_stage",
            "is 4",
        ),
        (
            FSDP.replace("FSDP", "DEEPSPEED") + "deepspeed_config: {zero_stag: 3}\n",
            "deepspeed_config.zero_stag",
            "did you mean deepspeed_config.zero_stage",
        ),
        (
            FSDP.replace("FSDP", "DEEPSPEED")
            + "deepspeed_config: {deepspeed_config_file: ../x.json}\n",
            "deepspeed_config.deepspeed_config_file",
            "'../x.json', which is no file that can be read beside",
        ),
        (FSDP + "mixed_precision: bf16\nfp16: true\n", "fp16", "mixed_precision is bf16"),
        (
            FSDP
            + "fsdp_config: {fsdp_backward_prefetch: NO_PREFETCH, fsdp_backward_prefetch_policy: "
            "BACKWARD_PRE}\n",
            "fsdp_config.fsdp_backward_prefetch_policy",
            "older name",
        ),
        (FSDP + "fsdp_config: [1]\n", "fsdp_config", "is [1]; must be a mapping"),
        ('{"zero_optimization": true}', "zero_optimization", "is True; must be a mapping"),
        ("training = 3\n" + TITAN, "training", "is 3; must be a mapping"),
        (
            FSDP + "fsdp_config: {fsdp_sharding_strategy: HALF}\n",
            "fsdp_config.fsdp_sharding_strategy",
            "FULL_SHARD, SHARD",
        ),
        (FSDP + "mixed_precision: fp12\n", "mixed_precision", "legal: no, fp16, bf16"),
        (
            "--num-layers 4\n--num-layers 5 --hidden-size 8 --num-attention-heads 2",
            "--num-layers",
            "is 4 (line 1) and 5 (line 2), written twice",
        ),
        ("--num-layers 4 --hiden-size 4", "--hidden-size", "missing"),
        ("--num-layers '4", "file", "line 1 cannot be read"),
        ("hello", "file", "no format that is known here"),
        ("", "file", "DeepSpeed ds_config.json (train_batch_size"),
    ],
)
def test_refused_by_name(text, field, words):
    given = {"gpu": GPU_NAME, "gpus": 16} | (
        {} if "flavor" in text or "--num" in text else {"model": "tiny"}
    )
    found = problems(interop.read, text, **given)
    assert words in found[field], found


@pytest.mark.parametrize(
    "more, field, words",
    [
        (["--hiden-size", 4], "--hiden-size", "did you mean --hidden-size"),
        (["--fp16"], "--fp16", "beside --bf16"),
        (["--min-lr", 1], "--min-lr", "above --lr"),
        (["--global-batch-sizes", 4], "--global-batch-sizes", "--lenient"),
        (
            ["--tensor-model-parallel-size", "$TP"],
            "--tensor-model-parallel-size",
            "'$TP'; must be an integer",
        ),
        (["--tensor-model-parallel-size", 3], "gpus", "tensor x pipeline x context = 3"),
        (
            ["--context-parallel-size", 8, "--cp-comm-type", "carrier"],
            "--cp-comm-type",
            "p2p, allgather, a2a",
        ),
        (
            ["--num-experts", 4, "--expert-model-parallel-size", 3],
            "strategy.expert.size",
            "legal: 1, 2, 4",
        ),
        (["--pipeline-model-parallel-size", 8], "strategy.pipeline.size", "legal sizes: 1 to 4"),
        (["--sequence-parallel", 3], "--sequence-parallel", "true, false"),
    ],
)
def test_arguments_refused_by_name(more, field, words):
    assert (
        words
        in problems(read_megatron.read, [*LLAMA, *more], ImportOptions(None, GPU_NAME, 8))[field]
    )


def test_unknown_keys_may_be_told_instead():
    found = interop.read(
        DS.replace("16,", '16, "house_style": {"a": 1},'),
        model="tiny",
        gpu=GPU_NAME,
        gpus=16,
        lenient=True,
    )
    assert left(found) == {"house_style.a": 1}


@pytest.mark.parametrize(
    "lack, name, words",
    [
        ("gpu", "ds_config.json", "--gpu"),
        ("model", "accelerate.yaml", "--model"),
        ("gpus", "megatron.yaml", "--gpus"),
    ],
)
def test_what_a_file_lacks_is_asked_for_by_name(lack, name, words):
    given = {"model": "tiny", "gpu": GPU_NAME, "gpus": 16}
    if name == "ds_config.json":
        given.pop("gpus")
    given.pop(lack)
    assert words in problems(interop.load, SAMPLES / name, **given)[lack]


@pytest.mark.parametrize(
    "given, field",
    [
        ({"gpus": "8"}, "gpus"),
        ({"gpus": 0}, "gpus"),
        ({"gpu": "h1000"}, "cluster.gpu"),
        ({"model": "no"}, "model"),
        ({"format": "nemo"}, "format"),
    ],
)
def test_what_is_given_beside_is_checked(given, field):
    found = problems(interop.read, DS, **({"model": "tiny", "gpu": GPU_NAME, "gpus": 16} | given))
    assert "ds_config" not in found[field]


def test_a_refusal_says_which_numbers_are_the_files():
    beside = ImportOptions("tiny", GPU_NAME, 16, sets={"training.optimizer.warmup_steps": 10**7})
    ours = problems(read_deepspeed.read, json.loads(DS), beside)["training.optimizer.warmup_steps"]
    assert "says it" not in ours and "assumed" not in ours
    short, slow = (
        ImportOptions("tiny", GPU_NAME, 16, sets={"training.steps": 50}),
        {"type": "WarmupLR"},
    )
    assumes = problems(read_deepspeed.read, {**json.loads(DS), "scheduler": slow}, short)[
        "training.optimizer.warmup_steps"
    ]
    assert "says it" not in assumes and assumes.endswith("(assumed: the file does not say it)")
    slow["params"] = {"warmup_num_steps": 1000}
    says = problems(read_deepspeed.read, {**json.loads(DS), "scheduler": slow}, short)[
        "training.optimizer.warmup_steps"
    ]
    assert says.endswith("(as DeepSpeed ds_config.json says it)")


def test_files_that_cannot_be_read(tmp_path):
    assert (
        "cannot be read" in problems(interop.load, tmp_path / "no.json")[str(tmp_path / "no.json")]
    )
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problems(interop.load, tmp_path / "bin")[str(tmp_path / "bin")]


# ---- what became of everything in the file -------------------------------------------------------


@pytest.mark.parametrize(
    "text, held",
    [
        ("hello: world  # see --help\n", "hello"),
        ("greet --help me --out x\n", "greet --help"),
        ("# --num-layers 4\nname: x\n", "name"),
        ('{"steps_per_print": 5}', "steps_per_print"),
    ],
)
def test_a_file_in_which_nothing_was_read_is_refused_with_what_it_holds(text, held):
    message = problems(interop.read, text, model="tiny", gpu=GPU_NAME, gpus=8)["file"]
    assert held in message and "Megatron-LM arguments (--num-layers)" in message


def test_a_file_of_a_known_format_without_a_key_in_use_is_refused():
    found = problems(
        read_deepspeed.read, {"steps_per_print": 5, "wall_clock_breakdown": False}, ON_16
    )
    assert "steps_per_print, wall_clock_breakdown, none of which a plan can use" in found["file"]


def test_unknown_keys_have_a_list_of_their_own():
    found = interop.read(
        DS.replace("16,", '16, "house_style": 1,'),
        model="tiny",
        gpu=GPU_NAME,
        gpus=16,
        lenient=True,
    )
    assert [(note.field, note.value) for note in found.unknown] == [("house_style", 1)]
    titles = {
        title.partition(":")[0]: [note.field for note in rows] for title, _, rows in found.tables()
    }
    assert titles["Unknown"] == ["house_style"] and "house_style" not in titles["Not translated"]


def test_fields_that_are_set_stand_above_the_file():
    sets = {"cluster.gpus": 8, "training.global_batch": 64, "training.steps": 7}
    found = interop.read(DS, model="tiny", gpu=GPU_NAME, set=sets)
    plan = found.plan
    assert (plan.cluster.gpus, plan.training.global_batch, plan.training.steps) == (8, 64, 7)
    assert [(note.field, note.value) for note in found.ignored] == [("training.global_batch", 16)]
    assert "training.steps" not in assumed(found)
    assert "no" in problems(
        interop.read, DS, model="tiny", gpu=GPU_NAME, gpus=8, set={"no.such": 1}
    )


def test_a_vocabulary_may_be_given_where_the_arguments_have_none():
    words = [word for word in LLAMA if word not in ("--vocab-size", 512)]
    found = interop.read(json.dumps(words), gpu=GPU_NAME, gpus=8, vocab_size=700)
    assert found.plan.resolve().shape.vocab == 700 and assumed(found)["model.vocab"] == 700
    assert (
        "--vocab-size"
        in problems(interop.read, json.dumps(words), gpu=GPU_NAME, gpus=8)["--vocab-size"]
    )
    assert (
        "the file says 512"
        in problems(interop.read, json.dumps(LLAMA), gpu=GPU_NAME, gpus=8, vocab_size=700)[
            "vocab_size"
        ]
    )
    assert (
        "model"
        in problems(interop.read, DS, model="tiny", gpu=GPU_NAME, gpus=8, vocab_size=700)[
            "vocab_size"
        ]
    )


# ---- writing -------------------------------------------------------------------------------------


NOT_MEGATRONS = {"model.name", "model.positions", "model.embedding_norm"}


def test_what_a_format_cannot_say_is_named_with_value_and_reason():
    plan = Plan.of(
        "bloom-7b1",
        gpu=GPU_NAME,
        gpus=16,
        strategy="pangu-5d",
        set={"corpus": "/text", "training.steps": 100},
    )
    lost = {
        format: {note.field: note for note in interop.write(plan, format).untranslated}
        for format in interop.FORMATS
    }
    assert all({"cluster.gpu", "corpus.source"} <= set(found) for found in lost.values())
    assert lost["megatron"]["model.positions"].value == "alibi"
    assert lost["fsdp"]["strategy.pipeline.size"].value == plan.resolve().strategy.pipeline.size
    assert lost["deepspeed"]["training.sequence_length"].value == 2048
    assert lost["torchtitan"]["model"].value == "bloom-7b1"
    assert not any(field.startswith("model") for field in set(lost["megatron"]) - NOT_MEGATRONS)


def test_a_plan_with_nothing_near_it_is_refused_with_the_field():
    plan = Plan.of("tiny", gpu=GPU_NAME, gpus=16, strategy="colossal-2d")
    assert (
        "cannot be written as Megatron-LM"
        in problems(interop.write, plan, "megatron")["strategy.tensor.size"]
    )
    assert "legal: deepspeed, megatron" in problems(interop.write, plan, "nemo")["format"]


def test_an_import_shows_itself_in_a_notebook():
    shown = load("ds_config.json", model="llama-3-8b")._repr_html_()
    assert "steps_per_print" in shown and "<table>" in shown and "stack: deepspeed-zero" in shown
    assert "sequence_length" in interop.write(Plan.of("tiny", gpu=GPU_NAME), "fsdp")._repr_html_()


def test_a_model_alone_is_pointed_to_the_option_that_takes_it():
    with pytest.raises(PlanError, match=r"config\.json.*--model"):
        interop.read(
            '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}'
        )
