"""Bytes of memory-bound operators, the size that GEMMs need, what recomputation leaves out, and
each against what its source says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.compute.engine_traffic.engine_operators import norm_bytes
from workbench.costmodel.compute.kernel_launches import adds_expert_biases, routing_launches
from workbench.costmodel.compute.kernel_rates import device_rates, fused_attention, gemm_seconds
from workbench.costmodel.compute.memory_bound import memory_bound_pass
from workbench.costmodel.compute.roofline import layer_pass, layer_times, microbatch_compute
from workbench.costmodel.compute.seam_bytes import seam_bytes
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import constants
from workbench.costmodel.rates.fitted_constants import FittedConstants
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile

PLAIN = FittedConstants()


def asked(model: str, stack: str = "workbench", **sets: Any) -> Workload:
    written = {name.replace("__", "."): value for name, value in sets.items()}
    plan = Plan.of(model, gpu="a100-sxm-80gb", gpus=8, strategy="zero-3", set=written)
    return workload(plan.replace(**{"strategy.stack": stack}).resolve())


def rates(w: Workload) -> Any:
    s = w.fixed
    return device_rates(s.gpu, s.precision, constants(s.gpu, s.kernels, s.stack, PLAIN))


def test_a_layer_of_gpt2_moves_each_operand_once() -> None:
    """Two layer norms 4, two residual additions 6 and GELU 4 bytes an element, forward; 10, 6 and
    6 backward: torch has a kernel of its own for each of them.
    """
    w = asked("gpt2-xl", "llm-foundry", strategy__kernels="eager")
    m = rates(w)
    found = memory_bound_pass(w, m, False)
    h, f = w.shape.hidden, w.shape.ffn
    tokens = float(w.tokens)
    assert found.forward * m.bandwidth == pytest.approx(tokens * (2 * h * (4 + 6) + 4 * f))
    assert found.backward * m.bandwidth == pytest.approx(tokens * (2 * h * (10 + 6) + 6 * f))


def test_a_chain_of_kernels_moves_several_times_what_one_does() -> None:
    eager, one = seam_bytes("eager", False), seam_bytes("eager", True)
    assert one.rmsnorm == one.layernorm == eager.layernorm
    assert eager.rmsnorm[0] > 8 * one.rmsnorm[0]
    assert seam_bytes("fused", False) == seam_bytes("fused", True)


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "h100-sxm-80gb", "rtx-4090", "b200"])
def test_a_gemm_must_be_larger_where_a_multiprocessor_is_faster(gpu: str) -> None:
    entry = gpu_catalog.gpus()[gpu].gpu
    each = entry.tflops["bf16"] / entry.multiprocessors
    usual = replace(constants(entry, "fused", fitted=PLAIN), gemm_misaligned=0.0)
    m = replace(device_rates(entry, "bf16", usual), bandwidth=float("inf"))
    side = 3 * 44.3 * each
    square = float(gemm_seconds(m, side, side, side, 2))
    long = 2 * side**3 / (entry.tflops["bf16"] * 1e12 * usual.gemm_share)
    assert square == pytest.approx(2 * long)


@pytest.mark.parametrize(("stack", "last"), [("llm-foundry", 0), ("deepspeed-zero", 1)])
def test_recomputation_ends_at_the_last_saved_tensor(stack: str, last: int) -> None:
    """torch's checkpoint without reentrance stops early, so that the down-projection of a layer is
    not run again; DeepSpeed's runs the layer to its end.
    """
    w = asked("gpt2-xl", stack, strategy__recompute="full")
    none = asked("gpt2-xl", stack, strategy__recompute="none")
    m = rates(w)
    k = layer_times(w, m)
    down = float(gemm_seconds(m, w.tokens, w.shape.hidden, w.shape.ffn, 2))
    again = microbatch_compute(w, m, k).backward - microbatch_compute(none, m, k).backward
    left_out = w.layers * k.dense.forward - again
    assert float(left_out.sum()) == pytest.approx((1 - last) * w.shape.layers * down, abs=1e-9)


def test_an_expert_layer_is_recomputed_whole() -> None:
    """Combine multiplies the experts' outputs by the router's weights: its gradient needs both."""
    w = asked("mixtral-8x7b", "llm-foundry")
    assert layer_pass(w, rates(w), True).last_gemm == 0.0


def test_biases_of_experts_are_added_one_by_one() -> None:
    """Megatron-core's `_apply_bias`: for each expert a product with the router's weights and a sum,
    then a copy that joins all, 12 bytes an element of 16 bits; backward splits the gradient's copy
    from two products and their sums, 16. Transformer Engine's fused operators have them inside.
    """
    sets = {"strategy__expert__size": 8, "strategy__data__zero": 1, "strategy__precision": "bf16"}
    w = asked("gpt-oss-20b", "megatron", **sets)
    inside = replace(w.fixed.framework.experts, adds_biases=False)
    framework = replace(w.fixed.framework, experts=inside)
    without = replace(w, fixed=replace(w.fixed, framework=framework))
    m = rates(w)
    found, other = (memory_bound_pass(one, m, True) for one in (w, without))
    rows = float(w.tokens) * 4 * w.shape.hidden * m.constants.plain_traffic / m.bandwidth
    assert found.forward - other.forward == pytest.approx(12 * rows)
    assert found.backward - other.backward == pytest.approx(16 * rows)
    local = 32 / 8
    counts = np.subtract(routing_launches(w), routing_launches(without))
    assert list(counts) == [2 * local, 4 * local]
    assert memory_bound_pass(w, m, False) == memory_bound_pass(without, m, False)
    plain = asked("mixtral-8x7b", "megatron", **sets)
    assert not adds_expert_biases(plain, True) and adds_expert_biases(w, True)


def test_a_ring_attends_to_one_block_at_a_time() -> None:
    # Not this engine, whose merging of blocks is counted with attention.
    alone = asked("llama-3-8b", "textbook", training__micro_batch=1)
    ring = asked(
        "llama-3-8b",
        "textbook",
        training__micro_batch=1,
        strategy__context__size=4,
        strategy__data__zero=1,
    )
    m, shape = rates(alone), alone.shape
    whole, part = (layer_times(w, m).attention.forward / float(w.tokens) for w in (alone, ring))
    length, width = ring.fixed.sequence_length, shape.head_dim or 128
    expected = fused_attention(m, 1.0, width, length / 4).forward
    assert part / whole == pytest.approx(expected / fused_attention(m, 1.0, width, length).forward)


def test_a_gpu_without_its_multiprocessors_has_the_usual_number() -> None:
    entry = gpu_catalog.gpus()["a100-sxm-80gb"].gpu
    unknown = constants(entry.model_copy(update={"multiprocessors": None}), "fused", fitted=PLAIN)
    assert unknown.gemm_half_dim == pytest.approx(44.3 * 312 / 128)


def test_weights_gathered_in_fp8_are_half_the_bytes() -> None:
    """llmq's README: sharded weights need half the bandwidth in fp8; gradients do not."""

    def gathered(precision: str) -> dict[str, float]:
        plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="zero-3").replace(
            **{"strategy.stack": "llmq", "strategy.precision": precision}
        )
        calls = [c for c in step_collectives(workload(plan.resolve())) if c.axis == "data"]
        return {
            kind: float(sum(np.sum(c.bytes * c.count) for c in calls if c.kind == kind))
            for kind in ("all_gather", "reduce_scatter")
        }

    narrow, wide = gathered("fp8"), gathered("bf16")
    assert narrow["all_gather"] == pytest.approx(0.5 * wide["all_gather"])
    assert narrow["reduce_scatter"] == wide["reduce_scatter"]


@pytest.mark.parametrize("kernels", ["compiled", "fused"])
@pytest.mark.parametrize("model", ["gpt2-xl", "llama-3-8b"])
@pytest.mark.parametrize("gpu", ["ascend-910", "ascend-910b", "h100-sxm-80gb", "mi300x"])
def test_this_engines_fused_seams_move_less_than_eager_ones(
    gpu: str, model: str, kernels: str
) -> None:
    def estimated(kernels: str) -> Profile:
        changes = {"strategy.kernels": kernels, "strategy.precision": "fp16"}
        return estimate(Plan.of(model, gpu=gpu, gpus=8, strategy="zero-3", set=changes))

    found, eager = estimated(kernels), estimated("eager")
    assert found.notes["time"]["compute"] < 0.999 * eager.notes["time"]["compute"]
    assert "kernels" not in eager.notes and "factor" not in found.notes["kernels"]


def test_textbook_bytes_of_this_engines_norms_are_those_counted() -> None:
    """An addition with its norm reads two tensors and writes two, in either direction."""
    own, eager = seam_bytes("own", True), seam_bytes("eager", True)
    w = asked("gpt2-xl", "workbench", strategy__kernels="fused")
    counted = norm_bytes(w, True)
    for norm in (own.layernorm, own.rmsnorm):
        joined = [a + b for a, b in zip(norm, own.residual)]
        assert joined == [counted.forward, counted.backward] == [8, 8]
    assert eager.layernorm[1] + eager.residual[1] == 16
