"""A mixture of experts in Megatron-LM's arguments and in Megatron-DeepSpeed's: the router, its
loss, and capacity.
"""

from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, assumed, left
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.megatron import read_megatron
from workbench.interop.translation import Imported, ImportOptions

WORDS = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4
 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512
 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --bf16
 --vocab-size 1000 --train-iters 10 --num-experts 8 """.replace("\n", "")


def read(more: str, model: None = None) -> Imported:
    return read_megatron.read(WORDS + more, ImportOptions(model, GPU_NAME))


def experts_of(found: Any) -> Any:
    return found.plan.resolve().shape.moe


def moe(more: str) -> Any:
    return read(more).plan.resolve().shape.moe


@pytest.mark.parametrize(
    "words, renormalised",
    [
        ("", True),
        ("--moe-router-pre-softmax", False),
        ("--moe-router-topk 1 --moe-router-pre-softmax", False),
        ("--moe-router-pre-softmax --moe-router-score-function sigmoid", True),
        ("--moe-router-load-balancing-type sinkhorn", False),
    ],
)
def test_gates_add_up_to_one_unless_the_softmax_is_over_all_experts(
    words: str, renormalised: bool
) -> None:
    assert moe(words).renormalise == renormalised
    assert "--moe-router-pre-softmax" not in left(read(words))


def test_the_auxiliary_loss_is_the_files_or_megatrons_default_of_none() -> None:
    assert moe("--moe-aux-loss-coeff 1e-3").auxiliary_loss == 1e-3
    assert (
        moe("--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type none").auxiliary_loss == 0
    )
    silent = read("")
    assert experts_of(silent).auxiliary_loss == assumed(silent)["model.moe.auxiliary_loss"] == 0
    several = read(
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 1e-3 1e-4"
    )
    assert experts_of(several).auxiliary_loss == 1e-3 and "--moe-aux-loss-coeff" in left(several)


def test_capacity_is_taken_and_what_differs_is_told() -> None:
    found = read("--moe-expert-capacity-factor 1.25")
    assert experts_of(found).capacity == 1.25
    assert (
        "in each micro-batch"
        in {n.field: n.why for n in found.untranslated}["--moe-expert-capacity-factor"]
    )
    assert moe("--moe-expert-capacity-factor -1").capacity is None and moe("").capacity is None


def test_megatron_deepspeed_has_its_own_names_and_defaults() -> None:
    found = read("--deepspeed")
    experts = experts_of(found)
    assert (experts.top_k, experts.capacity, experts.auxiliary_loss, experts.renormalise) == (
        1,
        1.0,
        0.1,
        False,
    )
    assert {"model.moe.top_k", "model.moe.capacity", "model.moe.auxiliary_loss"} <= set(
        assumed(found)
    )
    assert assumed(found)["--expert-interval"] == 2
    said = read("--topk 2 --moe-loss-coeff 0.01 --disable-moe-token-dropping --expert-interval 1")
    experts = experts_of(said)
    assert (experts.top_k, experts.capacity, experts.auxiliary_loss, experts.renormalise) == (
        2,
        None,
        0.01,
        True,
    )
    assert "--topk" in said.translated and "--expert-interval" not in assumed(said)
    assert "--expert-interval" in left(read("--topk 1 --expert-interval 2"))


def test_a_model_that_is_given_is_held_against_what_the_arguments_say_of_experts() -> None:
    same = "--moe-router-topk 2 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336"
    words = WORDS.replace("--num-layers 4 --hidden-size 256 ", "") + same
    assert "--num-experts" not in left(
        read_megatron.read(words, ImportOptions("mixtral-8x7b", GPU_NAME))
    )
    other = read_megatron.read(
        words.replace("--moe-router-topk 2", "--moe-router-topk 1"),
        ImportOptions("mixtral-8x7b", GPU_NAME),
    )
    assert "--num-experts" in left(other)


@pytest.mark.parametrize(
    "change", [{}, {"renormalise": False}, {"auxiliary_loss": 0.0}, {"capacity": 1.5}]
)
def test_experts_come_back_from_the_arguments_that_are_written(change: dict[str, Any]) -> None:
    plan = read("--moe-aux-loss-coeff 0.01").plan
    plan = plan.replace(**{f"model.moe.{field}": value for field, value in change.items()})
    written = read_megatron.write(plan)
    assert not [note.field for note in written.untranslated if note.field.startswith("model.moe")]
    back = read_megatron.read(written.text, ImportOptions(None, GPU_NAME)).plan.resolve().shape.moe
    assert back == plan.resolve().shape.moe


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--moe-router-score-function sigmoid", {"scores": "sigmoid"}),
        ("--moe-router-topk-scaling-factor 2.5", {"scale": 2.5}),
        ("--moe-router-num-groups 4 --moe-router-group-topk 2", {"groups": 4, "top_groups": 2}),
        ("--moe-router-num-groups 4", {"groups": None}),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            {"score_bias": True},
        ),
    ],
)
def test_a_router_beyond_a_softmax_is_the_plans(words: str, said: dict[str, Any]) -> None:
    found = read(words)
    shape = found.plan.resolve().shape
    assert {field: getattr(shape.moe, field) for field in said} == said
    assert shape.unmodelled is None
    _, lost = interop.write(found.plan, "megatron")
    assert not [note for note in lost if note.field.startswith("model.moe")]


def test_a_gate_of_shared_experts_is_unmodelled() -> None:
    found = read("--moe-shared-expert-gate")
    assert "--moe-shared-expert-gate" in (found.plan.resolve().shape.unmodelled or "")
    assert "--moe-shared-expert-gate" in left(found)


def test_a_router_that_says_the_usual_is_modelled() -> None:
    usual = (
        "--moe-router-score-function softmax --moe-router-topk-scaling-factor 1.0 "
        "--moe-router-num-groups 1"
    )
    assert read(usual).plan.resolve().shape.unmodelled is None


@pytest.mark.parametrize(
    ("words", "size", "tensor"),
    [
        # 8 ranks = tensor 4 x data 2, and of the experts 1 x 8 x 1: Megatron-core folds the axes.
        ("--tensor-model-parallel-size 4 --expert-tensor-parallel-size 1", 8, 1),
        ("--tensor-model-parallel-size 4 --expert-tensor-parallel-size 2", 4, 2),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            4,
            1,
        ),
        (
            "--tensor-model-parallel-size 2 --context-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            8,
            1,
        ),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2", 4, 2),
        ("--tensor-model-parallel-size 2", 4, None),
        ("--tensor-model-parallel-size 4 --deepspeed --topk 2", 2, 1),
        (
            "--tensor-model-parallel-size 4 --deepspeed --topk 2 "
            "--enable-expert-tensor-parallelism",
            2,
            None,
        ),
    ],
)
def test_experts_have_a_tensor_axis_of_their_own(words: str, size: int, tensor: int | None) -> None:
    found = read(f"{words} --expert-model-parallel-size {size}")
    expert = found.plan.resolve().strategy.expert
    assert (expert.size, expert.tensor) == (size, tensor)
    assert "--expert-tensor-parallel-size" not in left(found)
    text, lost = interop.write(found.plan, "megatron")
    assert f"--expert-tensor-parallel-size {tensor}\n" in text.replace(" \\\n", "\n") or not tensor
    assert not [note for note in lost if note.field.startswith("strategy.expert")]
    again = read_megatron.read(text, ImportOptions(None, GPU_NAME)).plan.resolve()
    assert again.strategy.expert == expert or expert.tensor == again.sizes["tensor"]


def test_an_expert_size_that_needs_unsplit_experts_says_so() -> None:
    with pytest.raises(PlanError, match=r"or expert\.tensor 1, estimated only"):
        read("--tensor-model-parallel-size 4 --expert-model-parallel-size 8").plan.resolve()


@pytest.mark.parametrize(
    ("words", "tensor"), [("", 1), ("expert_tensor_parallel_degree = 2\n", None)]
)
def test_torchtitan_spreads_experts_over_tensor_ranks_unless_it_splits_them(
    words: str, tensor: int | None
) -> None:
    text = "[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 8\n" + words
    size = 8 if tensor else 4
    text = text.replace("= 8", f"= {size}")
    found = interop.read(text, model="mixtral-8x7b", gpu=GPU_NAME, gpus=8)
    assert found.plan.strategy.expert.tensor == tensor
    written, lost = interop.write(found.plan, "torchtitan", "0.2.2")
    assert f"expert_tensor_parallel_degree = {tensor or 2}\n" in written
    assert not [note for note in lost if note.field.startswith("strategy.expert")]


def test_ranks_that_split_no_dense_model_are_reported() -> None:
    words = WORDS.replace("--num-experts 8", "--expert-tensor-parallel-size 1")
    found = read_megatron.read(
        words + "--tensor-model-parallel-size 2", ImportOptions(None, GPU_NAME)
    )
    assert left(found)["--expert-tensor-parallel-size"] == 1
