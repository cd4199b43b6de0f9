"""Compute of a step: how GEMMs join, what the loss moves, what hosts of MoE layers cost, what
attention's kernel and length are worth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.compute.kernel_launches import kernel_launches, replayed_kernels
from workbench.costmodel.compute.kernel_rates import (
    DeviceRates,
    device_rates,
    fused_attention,
    unfused_attention,
)
from workbench.costmodel.compute.roofline import (
    attention_pass,
    head_pass,
    layer_pass,
    optimizer_seconds,
)
from workbench.costmodel.inputs.layer_gemms import LayerGemm, attention_flops, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import Constants, constants
from workbench.costmodel.rates.fitted_constants import FittedConstants
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan, build_plan
from workbench.planner.estimate import estimate


def asked(model: str = "llama-3-8b", strategy: str = "zero-1", **sets: Any) -> Workload:
    written = {name.removesuffix("__").replace("__", "."): value for name, value in sets.items()}
    return workload(
        Plan.of(model, gpu="h100-sxm-80gb", gpus=8, strategy=strategy, set=written).resolve()
    )


TEXTBOOK = {"strategy__stack": "textbook"}
"""A framework whose memory-bound operators are a textbook count, not this engine's own."""


def usual(w: Workload, **changes: Any) -> Constants:
    return replace(constants(w.fixed.gpu, w.fixed.kernels), **changes)


def behaving(w: Workload, part: str, **switches: Any) -> Workload:
    """`w` under a framework of which one part behaves otherwise."""
    framework = w.fixed.framework
    changed = replace(framework, **{part: replace(getattr(framework, part), **switches)})
    return replace(w, fixed=replace(w.fixed, framework=changed))


def joined(w: Workload) -> Workload:
    return behaving(w, "kernels", fused_qkv=True)


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
    w = asked(**TEXTBOOK)
    times = []
    for size in (0.0, 28.0):
        head = head_pass(w, device_rates(w.fixed.gpu, "bf16", usual(w, loss_bytes=size)))
        times.append(float(head.forward + head.backward))
    bandwidth = w.fixed.gpu.bandwidth_gbs * 1e9 * usual(w).memory_share
    assert times[1] - times[0] == pytest.approx(float(w.tokens * w.vocab_rows) * 28 / bandwidth)


def test_a_dispatcher_on_the_host_slows_moe_layers_alone() -> None:
    """Launches of a microsecond dwarf the GPU here, so that a pass takes what its host does."""
    w = asked("mixtral-8x7b", training__micro_batch=1, **TEXTBOOK)
    m = device_rates(w.fixed.gpu, "bf16", usual(w, launch_us=1e5))
    plain, host, apart = (
        behaving(w, "experts", **switches)
        for switches in ({}, {"dispatches_from_host": True}, {"grouped_gemm": False})
    )
    moe = [float(layer_pass(one, m, True).forward) for one in (plain, host, apart)]
    dense = [float(layer_pass(one, m, False).forward) for one in (plain, host, apart)]
    assert len(set(dense)) == 1 and dense[0] < moe[0]
    assert moe[1] - moe[0] == pytest.approx((130 - 24) * 0.1)
    assert moe[2] - moe[0] == pytest.approx(2 * 8 * 0.25 * 0.1)  # two GEMMs of eight experts


def test_a_capacity_spares_the_host_the_counts() -> None:
    shape = asked("mixtral-8x7b").shape.model_dump()
    shape["moe"]["capacity"] = 1
    w = behaving(asked("tiny", model__=shape), "experts", dispatches_from_host=True)
    m = device_rates(w.fixed.gpu, "bf16", usual(w, launch_us=1e5))
    assert layer_pass(w, m, True) == layer_pass(
        behaving(w, "experts", dispatches_from_host=False), m, True
    )


@pytest.mark.parametrize(
    ("graphs", "dense", "sparse"),
    [
        ("none", 0, 0),
        ("attn", 6 / 11 * 20, 6 / 11 * 20),
        ("attn mlp", 20, 6 / 11 * 20),  # rows of experts have no fixed shape
        ("attn moe_router moe_preprocess", 6 / 11 * 20, 6 / 11 * 20 + 8 + 6),
        ("full_iteration", 20, 20 + 24),
    ],
)
def test_the_host_launches_what_no_graph_replays(graphs: str, dense: float, sparse: float) -> None:
    """Parts as Megatron-core's --cuda-graph-modules names them, of 20 kernels of a fused layer and
    24 of a router and its dispatch; launches of a tenth of a second dwarf the GPU.
    """
    asked_for = {"training__micro_batch": 1, "strategy__kernels": "fused", **TEXTBOOK}
    w = behaving(asked("mixtral-8x7b", **asked_for), "kernels", graphs=graphs)
    m = device_rates(w.fixed.gpu, "bf16", usual(w, launch_us=1e5, graph_kernel_us=0.0))
    found = [float(layer_pass(w, m, is_moe).forward) for is_moe in (False, True)]
    ran = [float(layer_pass(w, without_host(m), is_moe).forward) for is_moe in (False, True)]
    expected = [max(ran[0], 0.1 * (20 - dense)), max(ran[1], 0.1 * (20 + 24 - sparse))]
    assert found == pytest.approx(expected)


def without_host(m: DeviceRates) -> DeviceRates:
    return replace(m, constants=replace(m.constants, launch_us=0.0))


def test_the_gpu_takes_up_replayed_kernels_one_by_one() -> None:
    """Without a host to wait for, a tiny layer takes the least time of each of its kernels."""
    w = behaving(
        asked("tiny", strategy__kernels="fused", training__sequence_length=16, **TEXTBOOK),
        "kernels",
        graphs="full_iteration",
    )
    m = device_rates(w.fixed.gpu, "bf16", usual(w))
    found = layer_pass(w, m, False)
    assert float(found.forward) == pytest.approx(20 * 1.3e-6)
    assert float(found.backward) == pytest.approx(40 * 1.3e-6)


def test_heads_that_fill_no_vectors_slow_unfused_attention_alone() -> None:
    """GEMMs load whole vectors where dims are multiples of 16 bytes (NVIDIA, Matrix Multiplication
    Background): 108 in 16 bits is none, 112 is one.
    """
    w = asked()
    m = device_rates(w.fixed.gpu, "bf16", usual(w, memory_share=1e9))
    odd, even = (unfused_attention(m, 1e12, d, 0.0, 0.0).forward for d in (108, 112))
    slower = odd * 108 / (even * 112)  # both fill tiles of 128 in part
    assert slower == pytest.approx(1 + m.constants.gemm_misaligned)
    assert fused_attention(m, 1e12, 108, 4096) == fused_attention(m, 1e12, 112, 4096)


def test_short_sequences_reach_less_of_attentions_rate() -> None:
    m = device_rates(gpu_catalog.gpus()["h100-sxm-80gb"].gpu, "bf16", usual(asked()))
    half = int(m.constants.attention_half_length)
    short, long = (float(fused_attention(m, 1e12, 128, n).forward) for n in (half, 10**9))
    assert short == pytest.approx(2 * long)


@pytest.mark.parametrize(
    ("name", "measured"),
    [("a100-sxm-80gb", 1.70), ("h100-sxm-80gb", 2.97), ("h200-sxm-141gb", 4.15)],
)
def test_memory_is_as_fast_as_babelstream_finds_it(name: str, measured: float) -> None:
    """Azure AI-benchmarking-guide, triads: TB/s."""
    gpu = gpu_catalog.gpus()[name].gpu
    m = device_rates(gpu, "bf16", constants(gpu, "fused"))
    assert m.bandwidth == pytest.approx(measured * 1e12, rel=0.015)


@pytest.mark.parametrize(
    ("name", "measured"), [("h100-sxm-80gb", 327.9), ("gb200", 373.9), ("gb300", 399.7)]
)
def test_flash_attention_2_is_as_fast_as_its_benchmark(name: str, measured: float) -> None:
    """Azure AI-benchmarking-guide: TFLOP/s of forward and backward, causal, 8,192 tokens, heads of
    128. On H100 the share is that of 2407.08608, which is another's measurement.
    """
    gpu = gpu_catalog.gpus()[name].gpu
    m = device_rates(gpu, "bf16", constants(gpu, "fused", "torchtitan", FittedConstants()))
    passes = fused_attention(m, 1e12, 128, 8192)
    found = 3.5 / float(passes.forward + passes.backward)
    assert found == pytest.approx(measured, rel=0.03 if name == "h100-sxm-80gb" else 0.005)


def test_exponentials_bound_narrow_heads_of_blackwell_in_forward() -> None:
    """FlashAttention-4: a multiprocessor of B200 takes 8,192 FLOPs and 16 exponentials a clock, and
    a score of a head d wide is 4 d FLOPs and one exponential: both take as long at d = 128. Hopper
    has half of the FLOPs, Blackwell Ultra twice the exponentials; backward has 2.5 times the FLOPs.
    """
    cycles = {"h100-sxm-80gb": (4096, 16), "b200": (8192, 16), "gb200": (8192, 16)}
    cycles |= {"b300": (8192, 32), "gb300": (8192, 32), "a100-sxm-80gb": (2048, 16)}
    for name, (flops, exponentials) in cycles.items():
        gpu = gpu_catalog.gpus()[name].gpu
        balanced = constants(gpu, "fused").attention_balanced_dim
        assert 4 * balanced / flops == pytest.approx(1 / exponentials)
        m = device_rates(gpu, "bf16", constants(gpu, "fused"))
        # As many scores of heads half as wide: half of the FLOPs.
        narrow, wide = fused_attention(m, 64.0, 64, 4096), fused_attention(m, 128.0, 128, 4096)
        slower = max(1 / m.constants.attention_narrow, balanced / 64)
        assert narrow.forward / wide.forward == pytest.approx(slower / 2)
        assert narrow.backward / wide.backward == pytest.approx(
            1 / m.constants.attention_narrow / 2
        )


def test_heads_of_latent_attention_are_as_wide_as_their_products() -> None:
    """DeepSeek-V3 (2412.19437, 4.2): 128 + 64 elements of queries and keys, 128 of values."""
    w = asked("deepseek-v3", training__micro_batch=1, **TEXTBOOK)
    m = device_rates(w.fixed.gpu, "bf16", usual(w))
    expected = fused_attention(m, attention_flops(w), 160, w.fixed.sequence_length)
    found = attention_pass(behaving(w, "kernels", attention="flash-2"), m)
    assert float(found.forward) == pytest.approx(float(expected.forward))


def test_latent_attention_adds_its_kernels_to_a_layer() -> None:
    """Without its latents a model of the same layers launches 23 and 34 fewer; all are of the graph
    of attention.
    """
    w = asked("deepseek-v3", training__micro_batch=1, **TEXTBOOK)
    plain = replace(w, fixed=replace(w.fixed, shape=w.shape.model_copy(update={"mla": None})))
    with_latents, without = (kernel_launches(one, False) for one in (w, plain))
    assert [a - b for a, b in zip(with_latents, without)] == [23, 34]
    graphed = [behaving(one, "kernels", graphs="attn") for one in (w, plain)]
    replayed = [replayed_kernels(one, False, kernel_launches(one, False)) for one in graphed]
    assert [a - b for a, b in zip(*replayed)] == pytest.approx([23, 34])


def test_attention_runs_at_the_rate_of_its_kernels_generation() -> None:
    gpu = gpu_catalog.gpus()["h100-sxm-80gb"].gpu
    first, second, cudnn = (
        constants(gpu, "fused", stack).attention_share
        for stack in ("llm-foundry", "torchtitan", "megatron")
    )
    assert first < second < cudnn


def test_gb300_exceeds_gb200_as_sustained_gemms_of_both_do() -> None:
    """Azure AI-benchmarking-guide, cuBLASLt in fp8 on random data after 10,000 calls, TFLOP/s of
    square GEMMs of 8192, 16384 and 32768: both peaks are the same.
    """
    measured = {"gb200": (2781.5, 2819.5, 2755.3), "gb300": (3286.3, 3308.5, 3271.3)}
    gpus = {name: gpu_catalog.gpus()[name].gpu for name in measured}
    assert gpus["gb200"].tflops["fp8"] == gpus["gb300"].tflops["fp8"]
    ratios = [after / before for before, after in zip(measured["gb200"], measured["gb300"])]
    shares = {name: constants(gpu, "fused") for name, gpu in gpus.items()}
    for share in ("gemm_share", "narrow_share"):
        found = getattr(shares["gb300"], share) / getattr(shares["gb200"], share)
        assert min(ratios) - 0.005 <= found <= max(ratios)


def test_a_stack_scales_a_cards_shares_and_never_hides_them() -> None:
    """Two GPUs of one peak and different power keep their ratio under every framework profile that
    says nothing of its own.
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
    assert ratios["workbench"] < 1


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


def test_a_layer_takes_what_its_paper_measured() -> None:
    """Table 4 of 2205.05198: of the 22B model, seconds of a layer beside the baseline's."""
    shape = {"name": "gpt-22b", "layers": 48, "hidden": 6144, "heads": 64, "ffn": 24576}
    shape |= {"vocab": 51200, "max_positions": 2048, "positions": "learned", "tied": True}
    shape |= {"norm": "layernorm", "mlp": "gelu", "biases": "all"}

    def seconds(sequence: bool, recompute: str) -> float:
        parallel = {"tensor": {"size": 8, "sequence": sequence}, "recompute": recompute}
        training = {"sequence_length": 2048, "micro_batch": 4, "global_batch": 4, "dropout": 0.1}
        plan = build_plan(
            {
                "model": shape,
                "cluster": {"gpu": "a100-sxm-80gb", "gpus": 8},
                "strategy": {"stack": "megatron-2022", "precision": "bf16", **parallel},
                "training": training,
            }
        )
        parts = estimate(plan).notes["time"]
        return float(parts["compute"] + parts["tensor_comm"]) / 48

    baseline = seconds(False, "none")
    assert baseline == pytest.approx(19.6e-3, rel=0.1)
    published = {(True, "none"): -3, (False, "selective"): 10, (True, "selective"): 6}
    for asked, percent in {**published, (False, "full"): 39}.items():
        assert 100 * (seconds(*asked) / baseline - 1) == pytest.approx(percent, abs=4)


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
    assert found["compiled"].backward < found["eager"].backward


FP32 = 4
ADAM_OPERATORS = {
    "exp_avg.mul_": 2,
    "exp_avg.add_": 3,
    "exp_avg_sq.mul_": 2,
    "exp_avg_sq.addcmul_": 3,
    "sqrt": 2,
    "/ bias": 2,
    "add_(eps)": 2,
    "param.addcdiv_": 4,
}
"""fp32 tensors that each operator of an Adam written out reads and writes (torch 1.13
optim/adamw.py, _single_tensor_adamw; Composer optim/decoupled_weight_decay.py,
DecoupledAdamW.adamw).
"""


def test_an_adam_written_out_moves_its_operands_operator_by_operator() -> None:
    adam = FP32 * sum(ADAM_OPERATORS.values())
    decay, unscale, clip, norm = FP32 * 2, FP32 * 2, FP32 * 2, FP32
    flatten, upcast, weights, narrow_norm = 2 + 2, 2 + FP32, FP32 + 2, 2
    counted = {
        "llm-foundry": (adam + norm + clip, "zero-3"),
        "internevo": (adam + decay + narrow_norm + flatten + upcast + unscale + weights, "zero-1"),
    }
    for stack, (each, strategy) in counted.items():
        w = asked("llama-2-7b", strategy, strategy__stack=stack)
        m = device_rates(w.fixed.gpu, "bf16", usual(w))
        copies = 8 * w.param_counts.trained if stack == "internevo" else 0.0
        seconds = optimizer_seconds(w, m, np.asarray(1e9))
        assert seconds * m.bandwidth == pytest.approx(1e9 * each + copies)
        sgd = asked("llama-2-7b", strategy, strategy__stack=stack, training__optimizer__name="sgd")
        assert float(np.max(optimizer_seconds(sgd, m, np.asarray(1e9)))) < float(np.max(seconds))
