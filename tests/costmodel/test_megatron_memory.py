"""Memory of Megatron-core with Transformer Engine, counted tensor by tensor from their sources.

Widths are in elements of one token; what a module saves is named after the file that saves it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.costmodel.compute.kernel_rates import device_rates
from workbench.costmodel.compute.roofline import optimizer_seconds
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.loss_memory import head_memory
from workbench.costmodel.memory.model_states import model_states, owned_params
from workbench.costmodel.memory.optimizer_step import optimizer_step_buffers
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.rates.constants import constants
from workbench.costmodel.step_time import step_time
from workbench.plan.schema import Plan
from workbench.planner.validation import predict
from workbench.planner.validation.framework_names import find_framework
from workbench.planner.validation.measured_rows import parse_row
from workbench.planner.validation.row_to_plan import row_to_plan

STATISTIC = 4
"""Bytes of an RMSNorm's statistic of a token, and of attention's of a head and token."""


def load(model: str, stack: str = "megatron", gpu: str = "b200", **changes: Any) -> Workload:
    dotted = {path.replace("__", "."): value for path, value in changes.items()}
    plan = Plan.of(model, gpu=gpu, gpus=8, strategy="ddp", set={"strategy.stack": stack, **dotted})
    return workload(plan.resolve())


def saved(w: Workload, is_moe: bool = False) -> float:
    """Bytes a token that a layer saves."""
    return float(activation_memory.layer_activations(w, is_moe).saved / w.tokens)


def test_a_dense_layer_saves_inputs_of_its_modules() -> None:
    """LayerNormLinear (twice): its input and the norm's output; DotProductAttention: queries, keys,
    values, statistics; Linear: its input; bias_swiglu: gate and up; Linear: their product.
    """
    w = load("llama-3-8b")
    widths = 2 * (4096 + 4096) + (4096 + 1024 + 1024) + 4096 + 3 * 14336
    assert saved(w) == 2 * widths + STATISTIC * (2 + 32)


def test_an_moe_layer_saves_its_experts_input_once() -> None:
    """experts.py multiplies the activations by the router's weights, so that no output is saved:
    eight routed experts and a shared one, MLA's compressed queries and keys and their norms.
    """
    w = load("deepseek-v3")
    attention = 128 * (192 + 192 + 128 + 128) + 2 * (1536 + 512)
    routed = 8 * (7168 + 3 * 2048) + 3 * 2048
    widths = 2 * (7168 + 7168) + attention + routed
    assert saved(w, is_moe=True) == 2 * widths + STATISTIC * (2 + 128 + 256)


def test_experts_backward_holds_two_copies_of_the_routed_gradients() -> None:
    """The combination's permutation in backward: gradients of routed outputs before and after."""
    w = load("deepseek-v3")
    layer = activation_memory.layer_activations(w, is_moe=True)
    assert layer.feed_forward_backward == 2 * 8 * 7168 * 2 * w.tokens


@pytest.mark.parametrize(
    ("stack", "per_logit"), [("megatron", 6), ("megatron-fused-loss", 2), ("megatron-bridge", 2)]
)
def test_the_loss_works_in_place(stack: str, per_logit: int) -> None:
    """cross_entropy.py: 16-bit logits and one fp32 copy, saved in place of its exponentials, in
    forward and in backward; Transformer Engine's: the logits, which become their gradient.
    """
    w = load("llama-3-8b", stack)
    head, logits = head_memory(w), w.tokens * w.vocab_rows
    assert head.forward / logits == per_logit
    assert (head.logits + head.loss) / logits == per_logit


def test_the_heads_gemm_leaves_a_placeholder_for_its_gradient() -> None:
    """layers.py, grad_added_to_main_grad: beside the input's gradient and the logits'."""
    w = load("llama-3-8b")
    logits, table = 2 * w.tokens * w.vocab_rows, 2 * 128256 * 4096
    assert head_memory(w).projection == logits + table + w.hidden_activation_bytes


@pytest.mark.parametrize(
    ("gpu", "precision", "element"),
    [("h100-sxm-80gb", "fp8", 1.0), ("b200", "fp8", 1.0), ("b200", "mxfp8", 1 + 1 / 32)],
)
def test_fp8_gemms_save_their_inputs_in_8_bits(gpu: str, precision: str, element: float) -> None:
    """Both norms' outputs and the down projection's input shrink; attention's output is saved in 16
    bits for attention and in 8 for the projection. MXFP8 has an 8-bit scale for 32 elements.
    """
    w = load("llama-3-8b", gpu=gpu, strategy__precision=precision)
    sixteen = 4096 + 4096 + (4096 + 1024 + 1024) + 4096 + 2 * 14336
    eight = 4096 + 4096 + 4096 + 14336
    assert saved(w) == pytest.approx(2 * sixteen + element * eight + STATISTIC * (2 + 32))


@pytest.mark.parametrize(
    ("stack", "gpu", "precision", "per_weight"),
    [
        ("megatron", "h100-sxm-80gb", "fp8", 4),
        ("megatron", "b200", "fp8", 3),
        ("megatron", "b200", "mxfp8", 2 + 2 * (1 + 1 / 32)),
        ("megatron-bridge", "h100-sxm-80gb", "fp8", 2),
        ("megatron-bridge", "b200", "fp8", 1),
        ("megatron-bridge", "b200", "mxfp8", 2 * (1 + 1 / 32)),
        ("nemo", "h100-sxm-80gb", "fp8", 2),
    ],
)
def test_fp8_weights_are_kept_beside_or_in_place_of_16_bits(
    stack: str, gpu: str, precision: str, per_weight: float
) -> None:
    """Row- and column-wise copies of a step, or parameters in 8 bits, which fp8_param_gather makes
    and which keep their transposes (module/base.py, get_weight_workspace); tables stay in 16 bits.
    """
    w = load("llama-3-8b", stack, gpu, strategy__precision=precision, strategy__data__zero=1)
    tables = 2 * 128256 * 4096
    layers = float(w.param_counts.total[0]) - tables
    held = float(model_states(w, w.param_counts).parameters[0])
    assert held == pytest.approx(2 * tables + per_weight * layers, rel=1e-6)


@pytest.mark.parametrize(
    ("gpu", "precision", "per_weight"),
    [
        ("h100-sxm-80gb", "bf16", 4),
        ("h100-sxm-80gb", "fp8", 4 + 2),
        ("b200", "fp8", 4 + 2),
        ("b200", "mxfp8", 4),
    ],
)
def test_master_weights_are_rounded_at_once_to_become_8_bits(
    gpu: str, precision: str, per_weight: float
) -> None:
    """distrib_optimizer.py: fp32 gradients of the shard; tensor/utils.py: a 16-bit copy of every
    master weight before any is scaled, but for MXFP8, whose copies take the gradients' place.
    """
    changes = {"strategy__precision": precision, "strategy__data__zero": 1}
    w = load("llama-3-8b", "megatron-bridge", gpu, strategy__gradient_dtype="bf16", **changes)
    tables = 2 * 128256 * 4096
    layers = float(w.param_counts.total[0]) - tables
    found = float(optimizer_step_buffers(w, w.param_counts)["temporary"][0])
    assert found == pytest.approx((4 * tables + per_weight * layers) / 8, rel=1e-6)


def test_a_first_step_meets_no_moments_before_its_optimizer_runs() -> None:
    """Adam's state is allocated by the optimizer's first step: of long sequences the activations
    are the peak, without it, and of short ones that step.
    """
    for length, sharded in ((32768, 1), (128, 0)):
        changes = {"training__sequence_length": length, "strategy__data__zero": sharded}
        w = load("llama-3-8b", strategy__gradient_dtype="bf16", **changes)
        found = peak_memory(w, constants(w.fixed.gpu, "fused", "megatron"))
        states = found.moments["before_optimizer"]
        step = sum(float(states[name][0]) for name in ("parameters", "gradients", "master"))
        step += float(states["optimizer"][0])
        step += float(optimizer_step_buffers(w, w.param_counts)["temporary"][0])
        others = float((found.live - states["optimizer"])[0])
        assert (others > step) == (length == 32768)
        assert float(found.live_in_first_step[0]) == pytest.approx(max(others, step), rel=1e-4)


def test_all_to_all_context_ranks_keep_one_output() -> None:
    """context_parallel.py: backward exchanges attention's output again; this engine saves both."""
    ranks = {"strategy__context__size": 4, "strategy__context__algorithm": "ulysses"}
    more = [saved(load("llama-3-8b", stack, **ranks)) for stack in ("megatron", "textbook")]
    assert more[1] - more[0] == 2 * 4096


def test_adapters_of_attention_alone_save_no_input_of_a_frozen_feed_forward() -> None:
    """linear.py saves an input only where its weight has a gradient; what the four adapters' A make
    of theirs is saved for B, [tokens, rank] of each.
    """
    lora = {"finetune__lora": {"rank": 8, "targets": "attention"}}
    every, adapted = (
        activation_memory.last_layer_activations(w).saved / w.tokens
        for w in (load("llama-3-8b"), load("llama-3-8b", **lora))
    )
    assert float(np.max(every - adapted)) == 2 * (4096 + 14336) - 2 * 4 * 8


@pytest.mark.parametrize("stack", ["megatron", "textbook"])
def test_llama_405b_fits_as_it_was_trained(stack: str) -> None:
    """2407.21783, section 3.3: 16,384 H100, 8K tokens, tensor 8, pipeline 16, no recomputation;
    FSDP shards optimizer states and gradients and keeps parameters gathered.
    """
    changes = {
        "strategy.stack": stack,
        "strategy.tensor.size": 8,
        "strategy.tensor.sequence": True,
        "strategy.pipeline.size": 16,
        "strategy.data.zero": 2,
        "strategy.data.reduce": "microbatch",
        "strategy.gradient_dtype": "fp32",
        "strategy.recompute": "none",
        "training.global_batch": 2048,
        "training.sequence_length": 8192,
    }
    plan = Plan.of(
        "llama-3.1-405b", gpu="h100-sxm-80gb", gpus=16384, strategy="megatron-3d", set=changes
    )
    assert predict(plan.resolve()).peak_gib <= 79.3


def test_workspaces_are_those_of_the_libraries() -> None:
    """32 MiB each of torch's cuBLAS and of Transformer Engine on Hopper and Blackwell, and of four
    streams for grouped GEMMs.
    """
    dense, moe = load("llama-3-8b"), load("mixtral-8x7b")
    known = constants(dense.fixed.gpu, "fused", "megatron")
    assert known.workspace_mib == 64
    held = []
    for w in (dense, moe):
        ids = 2 * 8 * w.fixed.sequence_length * w.microbatches * w.searched.micro_batch
        overhead = peak_memory(w, known).moments["before_optimizer"]["overhead"]
        held.append(round(float((overhead - ids)[0]) / 2**20) - 64)
    assert held == [0, 128]


def test_gradients_of_16_bits_are_all_upcast_for_the_step() -> None:
    """distrib_optimizer.py: 4 bytes of every parameter of the shard; none where they are fp32."""
    for dtype, per_parameter in (("parameters", 4), ("fp32", 0)):
        w = load("llama-3-8b", strategy__data__zero=1, strategy__gradient_dtype=dtype)
        casts = optimizer_step_buffers(w, w.param_counts)["temporary"]
        owned = float(w.param_counts.total[0]) / 8
        assert float(np.ravel(casts)[0]) == pytest.approx(per_parameter * owned)


@pytest.mark.parametrize(
    ("stack", "master"), [("megatron", 2), ("nemo", 2), ("textbook", 4), ("fsdp", 0)]
)
def test_master_weights_do_not_grow_as_moments_shrink(stack: str, master: int) -> None:
    """Megatron-core's precision-aware optimizer keeps 16 bits of a master weight beside bf16
    parameters (optimizer_config.py, store_param_remainders), as NeMo's always does; FSDP has none.
    """
    w = load("llama-3-8b", stack, training__optimizer__moments="bf16")
    assert (w.fixed.moment_bytes, w.fixed.master_bytes) == (4, master)


NARROW_MOMENTS = {"strategy__gradient_dtype": "parameters", "training__optimizer__moments": "bf16"}


@pytest.mark.parametrize(
    ("precision", "gradient", "master"), [("bf16", 0, 2), ("fp16", 4, 4), ("fp8", 4, 4)]
)
def test_an_optimizer_is_precision_aware_in_bf16_runs(
    precision: str, gradient: int, master: int
) -> None:
    """optimizer_config.py: remainders complete bf16 parameters, and 8-bit GEMMs of current scaling
    keep fp32 master weights and gradients of Megatron's own; fused_adam.py: two moments are upcast
    in any case.
    """
    w = load("llama-3-8b", strategy__data__zero=1, strategy__precision=precision, **NARROW_MOMENTS)
    casts = float(np.ravel(optimizer_step_buffers(w, w.param_counts)["temporary"])[0])
    assert casts == pytest.approx((gradient + 4 + 4) * float(w.param_counts.total[0]) / 8)
    assert w.fixed.master_bytes == master


def test_moments_are_upcast_a_group_of_parameters_at_a_time() -> None:
    """fused_adam.py: the copies live in lists of one group; experts are a group of their own
    (Megatron-core optimizer/__init__.py, is_expert_parallel).
    """
    w = load("mixtral-8x7b", strategy__data__zero=1, strategy__expert__size=8, **NARROW_MOMENTS)
    p = w.param_counts
    casts = float(np.ravel(optimizer_step_buffers(w, p)["temporary"])[0])
    assert casts == pytest.approx(8 * float(p.experts[0]))  # each on one of the eight ranks alone
    assert p.experts[0] > p.dense[0] / 8


def test_an_expert_is_stepped_by_the_ranks_that_hold_it() -> None:
    """ZeRO shards it over those alone: all eight ranks without expert parallelism, one with."""
    for size in (1, 2, 8):
        w = load("mixtral-8x7b", strategy__data__zero=1, strategy__expert__size=size)
        dense, experts = owned_params(w, w.param_counts)
        assert dense[0] == w.param_counts.dense[0] / 8
        assert experts[0] == w.param_counts.experts[0] / (8 / size)
        seconds = step_time(w, constants(w.fixed.gpu, "fused", "megatron")).after["optimizer"]
        m = device_rates(w.fixed.gpu, "bf16", constants(w.fixed.gpu, "fused", "megatron"))
        assert seconds == pytest.approx(optimizer_seconds(w, m, dense + experts)[0])


def test_the_step_upcasting_moments_takes_its_time() -> None:
    """20 bytes more of each 16-bit moment pass through memory than of one taken as it is."""
    w = load("llama-3-8b", strategy__data__zero=1, **NARROW_MOMENTS)
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants(w.fixed.gpu, "fused", "megatron"))
    owned = w.param_counts.total / 8
    per_parameter = optimizer_seconds(w, m, owned) * m.bandwidth / owned
    assert float(per_parameter[0]) == pytest.approx(2 * (2 + 2 + 2) + 2 * 2 + 2 + 2 * 20)


ROW: dict[Any, Any] = {
    "id": "a-1",
    "source": "here",
    "kind": "measured",
    "framework": "Megatron-core 0.14 + Transformer Engine",
    "model": "llama-3-8b",
    "arch": "llama dense",
    "layers": "32",
    "hidden": "4096",
    "ffn": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq": "8192",
    "tied_emb": "no",
    "gated_ffn": "yes",
    "gpu": "B200",
    "gpu_mem_gb": "180",
    "n_gpus": "8",
    "cp": "4",
    "mbs": "1",
    "gbs": "8",
    "precision": "bf16",
}


@pytest.mark.parametrize(
    ("notes", "stack", "algorithm"),
    [
        ("fused TE cross entropy; cp a2a", "megatron-fused-loss", "ulysses"),
        ("--cross-entropy-loss-fusion", "megatron-fused-loss", "ring"),
        ("cross entropy fusion, cp_comm_type p2p", "megatron-fused-loss", "ring"),
        ("MoE a2a overlap, fused swiglu", "megatron", "ring"),
    ],
)
def test_rows_say_how_their_loss_and_context_ranks_work(
    notes: str, stack: str, algorithm: str
) -> None:
    row = parse_row(ROW | {"notes": notes})
    plan = row_to_plan(row).plan
    assert plan.strategy.stack == stack and row_to_plan(row).profile == "megatron"
    assert plan.strategy.context.algorithm == algorithm


def test_an_option_is_no_other_framework() -> None:
    found = find_framework("Megatron-LM", False, True, fused_loss=True)
    assert (found.name, found.family) == ("megatron-fused-loss", "megatron")
    assert find_framework("Megatron-LM", False, False, fused_loss=True).name == "megatron-2021"
