"""Compute of a step: how products join, what the loss moves, what hosts of expert layers cost,
shares of a card.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.compute.roofline import (
    device_rates,
    head_pass,
    layer_pass,
    optimizer_seconds,
)
from workbench.costmodel.inputs.layer_gemms import LayerGemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import Constants, constants
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan


def asked(model: str = "llama-3-8b", strategy: str = "zero-1", **sets: Any) -> Workload:
    written = {name.replace("__", "."): value for name, value in sets.items()}
    return workload(
        Plan.of(model, gpu="h100-sxm-80gb", gpus=8, strategy=strategy, set=written).resolve()
    )


def usual(w: Workload, **changes: Any) -> Constants:
    return replace(constants(w.fixed.gpu, w.fixed.kernels), **changes)


def joined(w: Workload) -> Workload:
    fixed = replace(w.fixed, framework=replace(w.fixed.framework, fused_qkv=1.0))
    return replace(w, fixed=fixed)


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-xl", "mixtral-8x7b"])
def test_joined_products_do_the_same_work_in_fewer_calls_and_less_time(model: str) -> None:
    w = asked(model)
    mixture = w.shape.moe is not None
    apart, together = layer_gemms(w, mixture), layer_gemms(joined(w), mixture)
    assert sum(p.flops for p in together) == pytest.approx(sum(p.flops for p in apart))
    assert len(together) == len(apart) - 2 - int(w.shape.gated)
    m = device_rates(w.fixed.gpu, "bf16", usual(w, launch_us=0.0))
    assert layer_pass(joined(w), m, mixture).forward < layer_pass(w, m, mixture).forward


def test_a_loss_moves_its_bytes_forward_and_backward() -> None:
    w = asked()
    times = []
    for size in (0.0, 28.0):
        head = head_pass(w, device_rates(w.fixed.gpu, "bf16", usual(w, loss_bytes=size)))
        times.append(float(head.forward + head.backward))
    bandwidth = w.fixed.gpu.bandwidth_gbs * 1e9 * usual(w).memory_share
    assert times[1] - times[0] == pytest.approx(float(w.tokens * w.vocab_rows) * 28 / bandwidth)


def test_a_host_that_waits_for_routed_counts_slows_layers_of_experts_alone() -> None:
    w = asked("mixtral-8x7b")
    slow = device_rates(w.fixed.gpu, "bf16", usual(w, host_us=100.0, host_routing_us=1e6))
    quick = device_rates(w.fixed.gpu, "bf16", usual(w, host_us=100.0))
    assert layer_pass(w, slow, True).forward == pytest.approx(1.0001)
    assert layer_pass(w, slow, False).forward == layer_pass(w, quick, False).forward


def test_ranks_that_broadcast_in_turn_take_as_many_turns_as_shares() -> None:
    w = asked()
    owned = np.array([1e9])
    none, some = (
        optimizer_seconds(
            w, device_rates(w.fixed.gpu, "bf16", usual(w, param_broadcast_ms=turn)), owned
        )
        for turn in (0.0, 3.0)
    )
    assert some - none == pytest.approx(8 * 3e-3)


def test_a_stack_scales_a_cards_shares_and_never_hides_them() -> None:
    """Two cards of one peak and different power keep their ratio under every stack that says
    nothing of its own.
    """
    cards = [gpu_catalog.gpus()[name].gpu for name in ("gb200", "gb300")]
    ratios = {
        stack: constants(cards[0], "fused", stack).narrow_share
        / constants(cards[1], "fused", stack).narrow_share
        for stack in (
            "workbench",
            "textbook",
            "megatron-bridge",
            "torchtitan",
            "torchtitan-rowwise",
        )
    }
    assert all(ratio == pytest.approx(ratios["workbench"]) for ratio in ratios.values())
    assert ratios["workbench"] < 0.9


def test_a_product_is_worth_its_flops() -> None:
    assert LayerGemm(2, 3, 5, 7).flops == 2 * 2 * 3 * 5 * 7


def test_dropout_draws_its_masks_in_forward_and_again_in_backward() -> None:
    none, some, more = (asked(training__dropout=rate) for rate in (0.0, 0.1, 0.5))
    m = device_rates(none.fixed.gpu, "bf16", usual(none, launch_us=0.0))
    plain, drawn, same = (layer_pass(w, m, False) for w in (none, some, more))
    branches = (
        2
        * m.constants.dropout_bytes
        * none.tokens
        * none.shape.hidden
        / m.bandwidth
        * m.constants.traffic
    )
    assert drawn == same
    for before, after in ((plain.forward, drawn.forward), (plain.backward, drawn.backward)):
        assert after - before == pytest.approx(branches)


@pytest.mark.parametrize(("norm", "length"), [("layernorm", 2048), ("rmsnorm", 128)])
def test_what_fused_kernels_leave_plain_on_processors_takes_what_eager_takes(
    norm: str, length: int
) -> None:
    """A small model's seams are all plain; of large ones layer norm is, and dropout."""
    sizes = {
        "layers": 2,
        "hidden": 512,
        "heads": 8,
        "ffn": 1024,
        "vocab": 512,
        "norm": norm,
        "mlp": "relu",
        "positions": "learned",
        "max_positions": 4096,
    }
    found = {}
    for kernels in ("eager", "fused", "compiled"):
        more = {
            "model": sizes,
            "strategy.kernels": kernels,
            "strategy.precision": "fp32",
            "training.dropout": 0.1,
        }
        more |= {"training.sequence_length": length, "training.micro_batch": 1}
        w = workload(Plan.of("tiny", gpu="local", gpus=1, strategy="single", set=more).resolve())
        found[kernels] = layer_pass(w, device_rates(w.fixed.gpu, "fp32", usual(w)), False)
    assert found["fused"].forward == pytest.approx(found["eager"].forward)
    assert found["fused"].backward == pytest.approx(found["eager"].backward)
    assert found["compiled"].backward < 0.99 * found["eager"].backward
