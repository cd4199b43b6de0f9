"""A mixture of experts in Megatron-LM's arguments and in Megatron-DeepSpeed's: the router, its
loss, and capacity.
"""

import pytest

from tests.interop.foreign_samples import GPU_NAME, assumed, left
from workbench.interop.megatron import read_megatron
from workbench.interop.translation import ImportOptions

WORDS = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4
 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512
 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --bf16
 --vocab-size 1000 --train-iters 10 --num-experts 8 """.replace("\n", "")


def read(more, model=None):
    return read_megatron.read(WORDS + more, ImportOptions(model, GPU_NAME))


def moe(more):
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
def test_gates_add_up_to_one_unless_the_softmax_is_over_all_experts(words, renormalised):
    assert moe(words).renormalise == renormalised
    assert "--moe-router-pre-softmax" not in left(read(words))


def test_the_auxiliary_loss_is_the_files_or_megatrons_default_of_none():
    assert moe("--moe-aux-loss-coeff 1e-3").auxiliary_loss == 1e-3
    assert (
        moe("--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type none").auxiliary_loss == 0
    )
    silent = read("")
    assert (
        silent.plan.resolve().shape.moe.auxiliary_loss
        == assumed(silent)["model.moe.auxiliary_loss"]
        == 0
    )
    several = read(
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 1e-3 1e-4"
    )
    assert (
        several.plan.resolve().shape.moe.auxiliary_loss == 1e-3
        and "--moe-aux-loss-coeff" in left(several)
    )


def test_capacity_is_taken_and_what_differs_is_told():
    found = read("--moe-expert-capacity-factor 1.25")
    assert found.plan.resolve().shape.moe.capacity == 1.25
    assert (
        "in each micro-batch"
        in {n.field: n.why for n in found.untranslated}["--moe-expert-capacity-factor"]
    )
    assert moe("--moe-expert-capacity-factor -1").capacity is None and moe("").capacity is None


def test_megatron_deepspeed_has_its_own_names_and_defaults():
    found = read("--deepspeed")
    experts = found.plan.resolve().shape.moe
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
    experts = said.plan.resolve().shape.moe
    assert (experts.top_k, experts.capacity, experts.auxiliary_loss, experts.renormalise) == (
        2,
        None,
        0.01,
        True,
    )
    assert "--topk" in said.translated and "--expert-interval" not in assumed(said)
    assert "--expert-interval" in left(read("--topk 1 --expert-interval 2"))


def test_a_model_that_is_given_is_held_against_what_the_arguments_say_of_experts():
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
def test_experts_come_back_from_the_arguments_that_are_written(change):
    plan = read("--moe-aux-loss-coeff 0.01").plan
    plan = plan.replace(**{f"model.moe.{field}": value for field, value in change.items()})
    written = read_megatron.write(plan)
    assert not [note.field for note in written.untranslated if note.field.startswith("model.moe")]
    back = read_megatron.read(written.text, ImportOptions(None, GPU_NAME)).plan.resolve().shape.moe
    assert back == plan.resolve().shape.moe


@pytest.mark.parametrize(
    "words",
    [
        "--moe-router-score-function sigmoid",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-router-num-groups 4",
        "--moe-router-enable-expert-bias",
        "--moe-shared-expert-gate",
    ],
)
def test_another_router_is_unmodelled(words):
    found = read(words)
    assert words in (found.plan.resolve().shape.unmodelled or "") and words.split()[0] in left(
        found
    )


def test_a_router_that_says_the_usual_is_modelled():
    usual = (
        "--moe-router-score-function softmax --moe-router-topk-scaling-factor 1.0 "
        "--moe-router-num-groups 1"
    )
    assert read(usual).plan.resolve().shape.unmodelled is None
