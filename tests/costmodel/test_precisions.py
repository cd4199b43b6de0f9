"""Dtypes and adapters: every combination is estimated, and less work or fewer bytes never cost
more.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile

LORA = {"rank": 16, "targets": "all"}


def told(
    model: str = "llama-3-8b", gpu: str = "h100-sxm-80gb", strategy: str = "ddp", **changes: Any
) -> Any:
    set = {key.replace("__", "."): value for key, value in changes.items()}
    return estimate(Plan.of(model, gpu=gpu, gpus=8, strategy=strategy, set=set))


def peak(profile: Profile) -> int:
    return max(profile.peak_bytes_by_rank.values())


def held(profile: Profile, category: str) -> float:
    rows = profile.memory[
        (profile.memory.moment == "before_optimizer") & (profile.memory.category == category)
    ]
    return float(rows.bytes.sum())


@pytest.mark.parametrize(
    ("gpu", "slow", "fast"),
    [
        ("a100-sxm-80gb", "fp32", "tf32"),
        ("a100-sxm-80gb", "tf32", "bf16"),
        ("h100-sxm-80gb", "tf32", "bf16"),
        ("h100-sxm-80gb", "bf16", "fp8"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "zero-3", "dapple", "megatron-tp"])
def test_narrower_products_are_faster(gpu: str, slow: str, fast: str, strategy: str) -> None:
    # In fp8 where norms and activations write 8 bits themselves (Transformer Engine).
    stack = "megatron" if fast == "fp8" else "workbench"
    # The casts of 16-bit norms are launches, which the host of tensor ranks is late with: sixteen
    # sequences at a time.
    more = {"training__micro_batch": 16, "training__global_batch": 64}
    before, after = (
        told(
            gpu=gpu,
            strategy=strategy,
            strategy__precision=dtype,
            strategy__stack=stack,
            **(more if strategy == "megatron-tp" else {}),
        )
        for dtype in (slow, fast)
    )
    assert after.step_seconds < before.step_seconds
    assert after.notes["time"]["compute"] < before.notes["time"]["compute"]


def test_fp8_by_plain_operators_costs_more_than_its_products_gain() -> None:
    """Of torchao's layers that are not compiled, most of all the narrow ones: in pytorch/ao issue
    685 a feed-forward of 512 is 3.4 times as slow as in 16 bits, of 4096 1.14 times.
    """
    ratios = []
    for model in ("llama-3.2-1b", "llama-3-8b", "llama-3-70b"):
        batch = {"training__micro_batch": 8, "training__global_batch": 64}
        wide, narrow = (
            told(model, strategy__precision=dtype, **batch).notes["time"]["compute"]
            for dtype in ("bf16", "fp8")
        )
        ratios.append(narrow / wide)
    assert ratios[0] > 1 and ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("strategy", ["ddp", "zero-3", "dapple", "megatron-tp"])
def test_tf32_keeps_what_fp32_keeps(strategy: str) -> None:
    one, other = (told(strategy=strategy, strategy__precision=dtype) for dtype in ("tf32", "fp32"))
    assert one.peak_bytes_by_rank == other.peak_bytes_by_rank
    assert one.collectives.drop(columns="run").equals(other.collectives.drop(columns="run"))


@pytest.mark.parametrize("strategy", ["ddp", "zero-3", "dapple", "megatron-tp"])
def test_fp8_keeps_what_bf16_keeps_and_what_casts_need(strategy: str) -> None:
    one, other = (told(strategy=strategy, strategy__precision=dtype) for dtype in ("fp8", "bf16"))
    for rank, size in other.peak_bytes_by_rank.items():
        assert size <= one.peak_bytes_by_rank[rank] <= 1.02 * size
    calls = [x.collectives[["axis", "kind", "dtype", "bytes", "action"]] for x in (one, other)]
    mine, theirs = (set(rows.itertuples(index=False, name=None)) for rows in calls)
    assert theirs <= mine
    scales = {(axis, dtype) for axis, _, dtype, size, _ in mine - theirs if size <= 12}
    assert scales == ({("tensor", "fp32")} if strategy == "megatron-tp" else set())


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
@pytest.mark.parametrize("dtype", ["auto", "parameters", "fp32"])
@pytest.mark.parametrize("strategy", ["ddp", "zero-2"])
def test_gradients_have_the_dtype_of_what_is_stored_or_fp32(
    precision: str, dtype: str, strategy: str
) -> None:
    asked = {"strategy__precision": precision, "strategy__gradient_dtype": dtype}
    reduced = told(strategy=strategy, **asked).collectives.query(
        "axis == 'data' and kind != 'all_gather'"
    )
    assert set(reduced.dtype) <= {"fp32", "bf16"} and len(set(reduced.dtype)) == 1


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero-1", "zero-2", "zero-3", "dapple", "megatron-3d", "zero-bubble"]
)
def test_adapters_take_less_memory_and_a_few_two_thirds_of_the_compute(strategy: str) -> None:
    # Fused kernels and eight sequences at a time, so that GEMMs decide: neither memory-bound
    # operators nor the host's launches are spared.
    large = {"strategy__kernels": "fused", "training__micro_batch": 8, "training__global_batch": 64}
    few = LORA | {"targets": ["attention.q"]}
    whole, adapted, thin = (
        told(strategy=strategy, **large, **more)
        for more in ({}, {"finetune__lora": LORA}, {"finetune__lora": few})
    )
    assert peak(adapted) < peak(whole)
    assert thin.step_seconds < min(adapted.step_seconds, whole.step_seconds)
    compute, one, of_all = (each.notes["time"]["compute"] for each in (whole, thin, adapted))
    assert 0.55 < one / compute < 0.75 < of_all / compute < 0.92  # those of all are bytes


def test_utilisation_of_adapters_counts_no_gradients_of_frozen_weights() -> None:
    whole, adapted = told(), told(finetune__lora=LORA)
    flops = [p.notes["model_flops_utilisation"] * p.step_seconds for p in (whole, adapted)]
    assert flops[1] / flops[0] == pytest.approx(2 / 3, abs=0.02)  # attention has no weights


def test_wider_adapters_and_more_of_them_take_more() -> None:
    thin, wide = (told(finetune__lora=LORA | {"rank": rank}) for rank in (8, 128))
    few = told(finetune__lora={"rank": 8, "targets": "attention"})
    assert peak(few) < peak(thin) < peak(wide) and thin.step_seconds < wide.step_seconds


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-3", "dapple"])
def test_narrower_moments_are_smaller_and_faster(strategy: str) -> None:
    each = [
        told(strategy=strategy, training__optimizer__moments=dtype)
        for dtype in ("fp32", "bf16", "int8")
    ]
    sizes = [held(profile, "optimizer") for profile in each]
    assert [sizes[0] / size for size in sizes] == pytest.approx([1, 2, 4], rel=1e-6)
    assert peak(each[0]) > peak(each[1]) > peak(each[2])
    assert each[0].step_seconds > each[1].step_seconds > each[2].step_seconds


def test_no_master_weights_are_none_and_sgd_keeps_one_moment_or_none() -> None:
    adam, bare = told(), told(training__optimizer__master="none")
    assert held(bare, "master") == 0 < held(adam, "master")
    momentum, plain = (
        told(training__optimizer={"name": "sgd", "beta1": beta}) for beta in (0.9, 0.0)
    )
    assert (
        held(adam, "optimizer") == 2 * held(momentum, "optimizer") and held(plain, "optimizer") == 0
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero-2", "dapple"])
def test_narrower_gradients_are_smaller_and_faster(strategy: str) -> None:
    wide, narrow = (
        told(strategy=strategy, strategy__gradient_dtype=dtype) for dtype in ("fp32", "bf16")
    )
    assert held(wide, "gradients") == pytest.approx(2 * held(narrow, "gradients"), rel=1e-6)
    assert narrow.step_seconds < wide.step_seconds and peak(narrow) < peak(wide)


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize(
    "strategy", ["megatron-3d", "deepseek-v3", "colossal-2d", "zb-v", "zero-offload"]
)
@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_every_combination_is_estimated(model: str, strategy: str, precision: str) -> None:
    changes = {
        "finetune__lora": LORA,
        "training__optimizer__moments": "int8",
        "strategy__precision": precision,
    }
    profile = told(model, strategy=strategy, **changes)
    assert profile.step_seconds > 0 and 0 < profile.notes["model_flops_utilisation"] < 1
