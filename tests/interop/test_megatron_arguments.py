"""What Megatron-LM's arguments mean where the file is silent, or says it in another unit than a
plan.
"""

from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, assumed, left, problems
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.megatron import read_megatron
from workbench.interop.translation import Imported, ImportOptions

SMALL = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4
 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512
 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --bf16
 --vocab-size 1000 """.replace("\n", "")


def read(more: str, front: str = "") -> Imported:
    return read_megatron.read(front + SMALL + more, ImportOptions(None, GPU_NAME))


@pytest.mark.parametrize(
    "words, steps, warmup",
    [
        ("--train-iters 1000 --lr-decay-iters 2000", 1000, 200),
        ("--train-iters 1000 --lr-decay-iters 20000", 1000, 1000),
        ("--train-samples 8000 --lr-decay-samples 16000", 1000, 200),
        ("--train-iters 1000", 1000, 100),
    ],
)
def test_a_warm_up_is_a_share_of_the_decay(words: str, steps: int, warmup: int) -> None:
    found = read(words + " --lr-warmup-fraction 0.1")
    assert (found.plan.training.steps, found.plan.training.optimizer.warmup_steps) == (
        steps,
        warmup,
    )
    assert ("--lr-warmup-fraction" in left(found)) == ("20000" in words)


def test_samples_that_fill_no_batch_are_not_trained() -> None:
    assert read("--train-samples 1001").plan.training.steps == 125


def test_gradients_and_master_weights_have_a_dtype_of_their_own() -> None:
    words = "--train-iters 10 --use-precision-aware-optimizer --use-distributed-optimizer"
    found = read(f"{words} --main-grads-dtype bf16 --main-params-dtype fp16")
    assert found.plan.strategy.gradient_dtype == "bf16" and "--main-grads-dtype" in found.translated
    why = {note.field: note.why for note in found.untranslated}
    assert "training.optimizer.master" in why["--main-params-dtype"]
    assert read(f"{words} --main-grads-dtype fp32").plan.strategy.gradient_dtype == "fp32"
    both = f"{words} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32"
    assert "--main-grads-dtype" in problems(read, both)


def test_dropout_is_megatrons_own_unless_the_file_says_it() -> None:
    silent = read("--train-iters 10")
    assert silent.plan.training.dropout == assumed(silent)["training.dropout"] == 0.1
    assert assumed(silent)["--attention-dropout"] == 0.1
    said = read("--train-iters 10 --hidden-dropout 0 --attention-dropout 0")
    assert said.plan.training.dropout == 0 and "training.dropout" not in assumed(said)


@pytest.mark.parametrize("load", ["", " --load old", " --load ckpt"])
def test_where_checkpoints_go_is_told(load: str) -> None:
    found = read("--train-iters 10 --save ckpt" + load)
    assert left(found)["--save"] == "ckpt" and "--save" not in found.translated


@pytest.mark.parametrize(
    "words",
    [
        "--qk-layernorm",
        "--apply-layernorm-1p",
        "--rotary-interleaved",
        "--squared-relu",
        "--quick-geglu",
        "--glu-activation reglu",
    ],
)
def test_what_the_model_computes_beyond_a_shape_is_unmodelled(words: str) -> None:
    found = read("--train-iters 10 --position-embedding-type rope " + words)
    assert words.removesuffix(" reglu") in (found.plan.resolve().shape.unmodelled or "")
    assert words.split()[0] in left(found)
    beside = read_megatron.read(
        SMALL + "--train-iters 10 " + words, ImportOptions("tiny", GPU_NAME)
    )
    why = {note.field: note.why for note in beside.untranslated}
    assert beside.plan.model == "tiny" and "the model given stands" in why[words.split()[0]]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--position-embedding-type rope --rotary-percent 0.25", "rotary_dim", 16),
        ("--position-embedding-type rope --rotary-percent 1.0", "rotary_dim", None),
        ("--rotary-percent 0.25", "rotary_dim", None),
        ("--normalization RMSNorm --apply-layernorm-1p", "zero_centered_norms", True),
    ],
)
def test_what_a_shape_says_comes_back(words: str, field: str, value: Any) -> None:
    found = read("--train-iters 10 " + words)
    shape = found.plan.resolve().shape
    assert getattr(shape, field) == value and shape.unmodelled is None
    _, lost = interop.write(found.plan, "megatron")
    assert f"model.{field}" not in {note.field for note in lost}


@pytest.mark.parametrize(
    "words, kind, factor",
    [
        ("--use-rope-scaling", "llama3", 8.0),
        ("--use-rope-scaling --rope-scaling-factor 32", "llama3", 32.0),
        ("--rotary-seq-len-interpolation-factor 4", "linear", 4.0),
    ],
)
def test_stretched_rotary_positions_are_read_and_written(
    words: str, kind: str, factor: float
) -> None:
    found = read("--train-iters 10 --position-embedding-type rope " + words)
    scaling = found.plan.resolve().shape.rope_scaling
    assert scaling is not None and (scaling.type, scaling.factor) == (kind, factor)
    text = interop.write(found.plan, "megatron").text
    again = read_megatron.read(text, ImportOptions(None, GPU_NAME)).plan.resolve()
    assert again.shape.rope_scaling == scaling


def test_layers_that_predict_further_tokens_are_the_plans_last() -> None:
    found = read("--train-iters 10 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.1")
    shape = found.plan.resolve().shape
    assert (shape.layers, shape.mtp_layers, shape.unmodelled) == (6, 2, None)
    assert "--mtp-num-layers" in found.translated
    given = read_megatron.read(
        SMALL + "--train-iters 10 --mtp-num-layers 1", ImportOptions("tiny", GPU_NAME)
    )
    why = {note.field: note.why for note in given.untranslated}
    assert why["--mtp-num-layers"] == "the model given has 0" and "--num-layers" not in why


@pytest.mark.parametrize(
    "words, held",
    [
        ("--pipeline-model-parallel-size 4", [1, 1, 1, 2]),
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|t|t|tmL'",
            [1, 1, 1, 2],
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ettt|tmL'", [3, 2]),
    ],
)
def test_the_last_stage_has_the_layers_that_predict_further_tokens(
    words: str, held: list[int]
) -> None:
    more = "--train-iters 10 --mtp-num-layers 1 "
    plan = read(more + words).plan
    assert plan.resolve().strategy.pipeline.partition == held
    text = interop.write(plan, "megatron")
    again = read_megatron.read(text.text, ImportOptions(None, GPU_NAME)).plan.resolve()
    assert again.strategy.pipeline.partition == held
    assert (again.shape.layers, again.shape.mtp_layers) == (sum(held), 1)


def test_layers_that_predict_further_tokens_anywhere_else_are_refused() -> None:
    more = "--train-iters 10 --pipeline-model-parallel-size 4 --mtp-num-layers 1 "
    split = more + "--pipeline-model-parallel-layout 'Et|t|tm|tL'"
    assert "and 1 m in the last" in problems(read, split)["--pipeline-model-parallel-layout"]
    uneven = more.replace("size 4", "size 8")
    assert "is 4, which 8 pipeline stages" in problems(read, uneven)["--num-layers"]
    plan = read(more).plan.replace(
        **{"model.mtp_layers": 2, "strategy.pipeline.partition": [1, 1, 2, 1]}
    )
    with pytest.raises(PlanError, match=r"has 1 layers in the last stage.*all 2 of model\.mtp"):
        interop.write(plan, "megatron")


def test_slurms_options_are_no_comment() -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=10\n# --bf16 is faster\n"
    why = {note.field: note.why for note in read("--train-iters 10", script).ignored}
    assert (
        "SLURM_NNODES" in why["line 2"]
        and why["line 3"] == "an option of Slurm"
        and why["line 4"] == "a comment"
    )


@pytest.mark.parametrize(
    "words, offload", [("--zero-stage 2 --cpu-optimizer", "optimizer"), ("--cpu-optimizer", "none")]
)
def test_megatron_deepspeeds_optimizer_on_the_host_is_offloaded_where_it_is_sharded(
    words: str, offload: str
) -> None:
    found = read("--train-iters 10 --deepspeed " + words)
    assert found.plan.resolve().strategy.data.offload == offload
    assert ("--cpu-optimizer" in left(found)) == (offload == "none")


def test_a_public_file_of_words_below_a_variable_is_known_by_its_name() -> None:
    script = "BASE=$PWD/data\n" + SMALL.replace(
        "--vocab-size 1000", "--vocab-file $BASE/gpt2-vocab.json"
    )
    found = read_megatron.read(script + "--train-iters 10", ImportOptions(None, GPU_NAME))
    assert found.plan.resolve().shape.vocab == assumed(found)["model.vocab"] == 50257


PIPED = "--train-iters 10 --pipeline-model-parallel-size 4 --num-layers {} "


def stages(more: str, layers: int) -> list[int]:
    words = SMALL.replace("--num-layers 4 ", "") + PIPED.format(layers) + more
    return (
        read_megatron.read(words, ImportOptions(None, GPU_NAME))
        .plan.resolve()
        .strategy.pipeline.partition
    )


@pytest.mark.parametrize(
    "words, layers, held",
    [
        (
            "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4",
            32,
            [4, 12, 12, 4],
        ),
        (
            "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4 "
            "--num-virtual-stages-per-pipeline-rank 2",
            32,
            [2, 6, 6, 2, 2, 6, 6, 2],
        ),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            30,
            [7, 8, 8, 7],
        ),
        ("--account-for-embedding-in-pipeline-split", 31, [7, 8, 8, 8]),
        (
            "--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2",
            31,
            [4, 4, 4, 4, 4, 4, 4, 3],
        ),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 4",
            30,
            [3, 4, 4, 4, 4, 4, 4, 3],
        ),
    ],
)
def test_layers_of_uneven_stages_are_as_megatron_builds_them(
    words: str, layers: int, held: list[int]
) -> None:
    assert stages(words, layers) == held


def test_stages_that_the_layers_do_not_fill_are_refused() -> None:
    more = PIPED.format(33) + "--account-for-loss-in-pipeline-split"
    assert "34 of 33" in problems(read_piped, more)["--account-for-loss-in-pipeline-split"]
    odd = PIPED.format(31) + (
        "--decoder-first-pipeline-num-layers 7 --num-virtual-stages-per-pipeline-rank 2"
    )
    assert "7 layers" in problems(read_piped, odd)["--decoder-first-pipeline-num-layers"]


def read_piped(more: str) -> Any:
    return read_megatron.read(
        SMALL.replace("--num-layers 4 ", "") + more, ImportOptions(None, GPU_NAME)
    )


def test_a_launcher_that_says_nodes_alone_spreads_the_gpus_over_them() -> None:
    words = (
        SMALL.replace("torchrun --nproc_per_node 8", "deepspeed --num_nodes=2") + "--train-iters 10"
    )
    full = read_megatron.read(words, ImportOptions(None, GPU_NAME, 8)).plan.resolve()
    assert (full.cluster.nodes, full.cluster.gpus_per_node) == (2, 4)
    assert (
        "--nnodes 2"
        in problems(read_megatron.read, words, ImportOptions(None, GPU_NAME, 9))["gpus"]
    )


@pytest.mark.parametrize(("stages", "reduce"), [(1, "microbatch"), (2, "step")])
def test_sharded_gradients_of_a_pipeline_are_reduced_once_a_step(stages: int, reduce: str) -> None:
    words = (
        "--num-layers 4 --train-iters 10 --use-megatron-fsdp --use-distributed-optimizer "
        f"--data-parallel-sharding-strategy optim_grads --pipeline-model-parallel-size {stages}"
    )
    data = read_piped(words).plan.strategy.data
    assert (data.zero, data.reduce) == (2, reduce)


def test_fsdp2_may_keep_what_it_gathered() -> None:
    words = "--train-iters 10 --use-torch-fsdp2 "
    assert read(words + "--torch-fsdp2-no-reshard-after-forward").plan.strategy.data.keep_gathered
    assert not read(words).plan.strategy.data.keep_gathered


def test_deepspeed_decides_overlap_and_bucket_where_its_arguments_are_given() -> None:
    found = read("--train-iters 10 --deepspeed --deepspeed_config ds.json --zero-stage 3")
    data = found.plan.strategy.data
    assert data.overlap and data.bucket_mib == 5e8 * 4 / 2**20
    assert "--deepspeed-config" in str(
        [n.why for n in found.assumed if n.field == "strategy.data.overlap"]
    )
    assert not read("--train-iters 10 --deepspeed --zero-stage 1").plan.strategy.data.overlap


def test_fp8_beside_fp32_parameters_is_told() -> None:
    words = SMALL.replace("--bf16 ", "") + "--train-iters 10 --fp8-format hybrid"
    found = read_megatron.read(words, ImportOptions(None, "h100-sxm-80gb"))
    assert found.plan.strategy.precision == "fp8" and "--fp8-format" in left(found)
    both = read_megatron.read(
        SMALL + "--train-iters 10 --fp8-format hybrid", ImportOptions(None, "h100-sxm-80gb")
    )
    assert "--fp8-format" in both.translated


def test_a_recipe_of_fp8_that_is_not_tensor_wise_is_told() -> None:
    given, words = ImportOptions(None, "h100-sxm-80gb"), SMALL + "--train-iters 10 --fp8-format "
    same = read_megatron.read(words + "hybrid --fp8-recipe tensorwise", given)
    assert not {"--fp8-format", "--fp8-recipe"} & set(left(same))
    assert "strategy.precision" not in {note.field for note in same.assumed}
    other = read_megatron.read(words + "e4m3 --fp8-recipe blockwise", given)
    why = {note.field: note.why for note in other.untranslated}
    assert "largest entry" in why["--fp8-recipe"] and "e5m2" in why["--fp8-format"]
    unsaid = read_megatron.read(words + "hybrid", given)
    assert any("delayed" in note.why for note in unsaid.assumed)


def test_newer_arguments_are_known() -> None:
    assert {"--use-nccl-ub", "--tokenizer-library"} <= set(
        left(read("--train-iters 10 --use-nccl-ub --tokenizer-library sentencepiece"))
    )


@pytest.mark.parametrize(
    "words",
    [
        "--hybrid-override-pattern M-M*",
        "--hybrid-attention-ratio 0.1",
        "--is-hybrid-model",
        "--linear-attention-freq 4",
        "--softmax-type off-by-one",
        "--multi-latent-attention --rotary-scaling-factor 40",
    ],
)
def test_another_kind_of_layer_is_unmodelled(words: str) -> None:
    found = read("--train-iters 10 --position-embedding-type rope " + words)
    said = words.removeprefix("--multi-latent-attention ").split()[0]
    assert said in (found.plan.resolve().shape.unmodelled or "") and said in left(found)


def test_latent_attention_with_plain_rotary_positions_is_modelled() -> None:
    words = (
        "--train-iters 10 --position-embedding-type rope --multi-latent-attention --rope-type rope"
    )
    assert read(words + " --rotary-scaling-factor 40").plan.resolve().shape.unmodelled is None


def test_a_recipe_s_quoting_is_undone_twice_as_by_its_harness() -> None:
    arguments = {
        "num-layers": 5,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": 64,
        "micro-batch-size": 1,
        "global-batch-size": 32,
        "train-iters": 10,
        "pipeline-model-parallel-size": 2,
        "pipeline-model-parallel-layout": r"Et\\|\\(t\\|\\)*2ttL",
    }
    recipe = "MODEL_ARGS:\n" + "".join(f"  --{key}: {value}\n" for key, value in arguments.items())
    found = interop.read(recipe, gpu=GPU_NAME, vocab_size=512)
    assert found.plan.strategy.pipeline.partition == [1, 1, 1, 2]


def test_the_names_of_2020_are_read() -> None:
    words = SMALL.replace("--micro-batch-size 1 --global-batch-size 8", "--batch-size 2")
    found = read_megatron.read(
        f"{words}--train-iters 100 --model-parallel-size 4 --warmup 0.1",
        ImportOptions(None, GPU_NAME),
    )
    plan = found.plan
    assert (plan.strategy.tensor.size, plan.training.micro_batch, plan.training.global_batch) == (
        4,
        2,
        4,
    )
    assert plan.training.optimizer.warmup_steps == 10
    assert {"--batch-size", "--model-parallel-size", "--warmup"} <= set(found.translated)
    both = "--train-iters 10 --model-parallel-size 4 --tensor-model-parallel-size 2"
    assert "its newer name, is 2" in problems(read, both)["--model-parallel-size"]
    long = read_megatron.read(
        f"{words}--train-iters 10 --lr-decay-iters 1000 --warmup 0.1", ImportOptions(None, GPU_NAME)
    )
    assert "--warmup" in left(long)


@pytest.mark.parametrize(
    "words",
    [
        "--perform-rl-step",
        "--freeze-all-layers",
        "--logits-load-dir /teacher",
        "--decoder-seq-length 128",
        "--decoder-num-layers 12",
    ],
)
def test_what_trains_otherwise_is_refused(words: str) -> None:
    assert "legal: leave it out" in problems(read, words)[words.split()[0]]


@pytest.mark.parametrize(
    "words",
    [
        "--attention-output-gate",
        "--hybrid-layer-pattern M-M*",
        "--mtp-use-repeated-layer --mtp-num-layers 1",
        "--activation-func-clamp-value 7",
    ],
)
def test_newer_arguments_that_change_the_model_are_named_as_unmodelled(words: str) -> None:
    found = read(words + " --train-iters 9")
    assert words.split()[0] in str(found.plan.resolve().shape.unmodelled)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--rl-partial-rollouts", "--perform-rl-step"),
        ("--fine-grained-activation-offloading", "strategy.offload_activations"),
        ("--step-batch-size-schedule 0:8", "the same in every step"),
        ("--moe-hybridep-num-sms 16", "--num-experts"),
        ("--inprocess-max-iterations 3", "watched"),
        ("--no-pad-vocab-size", "by its own rule"),
    ],
)
def test_arguments_of_core_0_19_are_known(words: str, why: str) -> None:
    notes = read(words + " --train-iters 9").untranslated
    assert why in {note.field: note.why for note in notes}[words.split()[0]]


CORE_YAML = """
language_model:
  {num_layers: 4, hidden_size: 256, num_attention_heads: 4, activation_func: swiglu,
   gated_linear_unit: false, layernorm_zero_centered_gamma: true, num_moe_experts: 8,
   moe_router_topk: 2, masked_softmax_fusion: true, bias_dropout_fusion: false}
model_parallel:
  {tensor_model_parallel_size: 2, batch_p2p_comm: true, barrier_with_L1_time: true, bf16: true,
   cpu_offloading_activations: true}
micro_batch_size: 1
global_batch_size: 8
seq_length: 512
vocab_size: 1000
max_position_embeddings: 512
train_iters: 9
manual_gc_eval: true
"""


def test_a_yaml_says_the_fields_of_cores_own_configurations() -> None:
    found = interop.read(CORE_YAML, gpu=GPU_NAME, gpus=8)
    shape = found.plan.resolve().shape
    assert (shape.mlp, shape.moe and shape.moe.experts) == ("swiglu", 8)
    assert {"--batch-p2p-comm", "--no-bias-dropout-fusion"} <= {n.field for n in found.untranslated}
    assert "--no-masked-softmax-fusion" not in {note.field for note in found.untranslated}
