"""Megatron-LM's arguments, read as a plan and written from one."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.foreign_samples import (
    GPU_NAME,
    LLAMA,
    NOT_MEGATRONS,
    RECIPE,
    assumed,
    left,
    load,
    problems,
)
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.megatron import read_megatron
from workbench.interop.translation import ImportOptions
from workbench.plan.schema import Plan
from workbench.safe_io import yaml_files


def test_a_megatron_script_holds_shape_cluster_and_strategy() -> None:
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
    assert left(found)["--data-path"] == ["part_a", "part_b"]
    assert full.strategy.attention == "flash-2"
    assert assumed(found)["training.optimizer.epsilon"] == 1e-8


def test_a_mapping_of_arguments_with_experts() -> None:
    full = load("megatron.yaml", gpus=16).plan.resolve()
    moe = full.shape.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared, moe.first_dense) == (8, 2, 128, 2, 1)
    assert full.strategy.expert.size == 4 and full.strategy.context.algorithm == "ulysses"
    assert full.strategy.precision == "fp8" and full.shape.biases == "none"


A2A_P2P = ["--context-parallel-size", 8, "--cp-comm-type", "a2a+p2p"]
LEVELS = "--hierarchical-context-parallel-sizes"


def test_hierarchical_context_parallelism_is_usp() -> None:
    found = read_megatron.read([*LLAMA, *A2A_P2P, LEVELS, 2, 4], ImportOptions(None, GPU_NAME, 8))
    context = found.plan.strategy.context
    assert (context.size, context.algorithm, context.ulysses_size) == (8, "usp", 2)
    written = interop.write(found.plan, "megatron").text
    assert "a2a+p2p" in written and f"{LEVELS} 2 4" in written


@pytest.mark.parametrize("levels", [[], [LEVELS, 2], [LEVELS, 2, 2], [LEVELS, "two", 4]])
def test_levels_of_another_product_are_refused(levels: list[Any]) -> None:
    with pytest.raises(PlanError, match="two sizes whose product is --context-parallel-size = 8"):
        read_megatron.read([*LLAMA, *A2A_P2P, *levels], ImportOptions(None, GPU_NAME, 8))


def test_a_recipe_of_megatrons_tests() -> None:
    found = interop.read(RECIPE, gpu=GPU_NAME, vocab_size=512)
    full = found.plan.resolve()
    assert (found.format, full.cluster.gpus, full.sizes["tensor"], full.strategy.precision) == (
        "megatron",
        8,
        2,
        "bf16",
    )
    assert full.shape.moe is not None
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
    "spell",
    [list, json.dumps, lambda w: " ".join(map(str, w)), lambda w: "\n".join(f"- {x}" for x in w)],
)
def test_arguments_may_be_a_list_text_json_or_yaml(spell: Callable[..., Any]) -> None:
    plan = read_megatron.read(spell(LLAMA), ImportOptions(None, GPU_NAME, 8)).plan
    assert plan.resolve().shape.ffn == 256 and plan.strategy.precision == "bf16"


def test_the_rest_of_a_script_is_no_argument() -> None:
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
def test_words_of_a_strategy(more: list[Any], field: str, value: Any) -> None:
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
def test_uneven_stages(more: list[Any], counts: list[int] | None) -> None:
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


def test_a_model_that_is_given_wins_and_what_differs_is_told() -> None:
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
def test_which_layers_have_experts(text: str, dense: int | None) -> None:
    found = read_megatron.read(
        [*LLAMA, "--num-experts", 4, "--moe-layer-freq", text], ImportOptions(None, GPU_NAME, 8)
    )
    moe = found.plan.resolve().shape.moe
    assert moe is not None and moe.first_dense == (dense or 0)
    assert ("--moe-layer-freq" in left(found)) == (dense is None)


def test_a_warm_up_longer_than_the_run_is_cut_and_told() -> None:
    found = read_megatron.read(
        [*LLAMA, "--train-iters", 10, "--lr-warmup-samples", 3200], ImportOptions(None, GPU_NAME, 8)
    )
    assert (
        found.plan.training.optimizer.warmup_steps == 10
        and left(found)["--lr-warmup-samples"] == 3200
    )


def test_a_list_says_a_value_twice() -> None:
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


def test_without_a_shape_each_missing_argument_is_named() -> None:
    found = problems(
        read_megatron.read, "--bf16 --micro-batch-size 1", ImportOptions(None, GPU_NAME, 8)
    )
    assert set(found) == {"--num-layers", "--hidden-size", "--num-attention-heads"}
    assert "--model" in found["--num-layers"]


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
def test_arguments_refused_by_name(more: list[Any], field: str, words: str) -> None:
    assert (
        words
        in problems(read_megatron.read, [*LLAMA, *more], ImportOptions(None, GPU_NAME, 8))[field]
    )


@pytest.mark.parametrize(
    "text, held",
    [
        ("hello: world  # see --help\n", "hello"),
        ("greet --help me --out x\n", "greet --help"),
        ("# --num-layers 4\nname: x\n", "name"),
        ('{"steps_per_print": 5}', "steps_per_print"),
    ],
)
def test_a_file_in_which_nothing_was_read_is_refused_with_what_it_holds(
    text: str, held: str
) -> None:
    message = problems(interop.read, text, model="tiny", gpu=GPU_NAME, gpus=8)["file"]
    assert held in message and "Megatron-LM arguments (--num-layers)" in message


def test_of_a_mixture_its_sources_are_named_and_no_other() -> None:
    mix = [{"source": "a.jsonl", "weight": 2}, {"source": "b.jsonl", "weight": 1}]
    plan = Plan.of("tiny", gpu=GPU_NAME, gpus=1, set={"corpus": {"mix": mix}})
    found = {note.field: note.value for note in interop.write(plan, "megatron").untranslated}
    assert [part["source"] for part in found["corpus.mix"]] == ["a.jsonl", "b.jsonl"]
    assert "corpus.source" not in found


def test_what_a_format_cannot_say_is_named_with_value_and_reason() -> None:
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


def test_a_plan_with_nothing_near_it_is_refused_with_the_field() -> None:
    plan = Plan.of("tiny", gpu=GPU_NAME, gpus=16, strategy="colossal-2d")
    assert (
        "cannot be written as Megatron-LM"
        in problems(interop.write, plan, "megatron")["strategy.tensor.size"]
    )
    assert "legal: deepspeed, megatron" in problems(interop.write, plan, "nemo")["format"]


def test_what_a_mapping_turns_off_is_in_the_account() -> None:
    text = yaml_files.dump(
        {
            **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
            **{"max_position_embeddings": 32, "train_iters": 9, "vocab_size": 512},
            **{"fp32_residual_connection": False, "bias_swiglu_fusion": True, "lr": 1e-3},
        }
    )
    found = interop.read(text, "megatron", gpu=GPU_NAME, gpus=1)
    off = {note.field for note in found.ignored}
    assert {"--fp32-residual-connection", "--no-bias-swiglu-fusion"} <= off
    said = problems(
        interop.read, text + "hidden_dropuot: false\n", "megatron", gpu=GPU_NAME, gpus=1
    )
    assert "did you mean --hidden-dropout" in said["--hidden-dropuot"]
