"""Memory of framework profiles: what each one's own source code keeps, gathers, makes for a step or
leaves to a full card.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.communication.collective_volume import num_zero3_units, step_collectives
from workbench.costmodel.frameworks.framework_profile import framework_table
from workbench.costmodel.frameworks.model_state_behavior import ModelStateBehavior
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.live_sets.live_by_phase import live_by_phase
from workbench.costmodel.memory.loss_memory import head_memory as head_of
from workbench.costmodel.memory.model_states import model_states
from workbench.costmodel.memory.optimizer_step import optimizer_step_buffers
from workbench.costmodel.memory.peak_memory import PeakMemory, num_communicators, peak_memory
from workbench.costmodel.memory.reported_memory import reported_memory
from workbench.costmodel.memory.step_buffers import step_buffers, zero_working_set
from workbench.costmodel.rates.constants import constants
from workbench.plan.model.four_bit_base import four_bit_notes
from workbench.plan.schema import Plan
from workbench.planner.validation.framework_names import find_framework
from workbench.planner.validation.measured_rows import parse_row
from workbench.planner.validation.row_to_plan import PlannedRow, row_to_plan
from workbench.vocabulary import OUTSIDE

LIT: dict[Any, Any] = {
    "id": "a-1",
    "source": "here",
    "kind": "measured",
    "framework": "litgpt full finetune",
    "model": "llama-2-7b",
    "arch": "llama dense",
    "params_b": "6.74",
    "layers": "32",
    "hidden": "4096",
    "ffn": "11008",
    "heads": "32",
    "kv_heads": "32",
    "vocab": "32000",
    "seq": "512",
    "tied_emb": "yes",
    "gated_ffn": "yes",
    "gpu": "A10G",
    "gpu_mem_gb": "24",
    "n_gpus": "4",
    "dp": "4",
    "mbs": "4",
    "precision": "bf16-true",
}


def load(
    stack: str, gpus: int = 8, strategy: str = "zero-3", model: str = "llama-3-8b", **changes: Any
) -> Workload:
    dotted = {path.replace("__", "."): value for path, value in changes.items()}
    plan = Plan.of(
        model,
        gpu="h100-sxm-80gb",
        gpus=gpus,
        strategy=strategy,
        set={"strategy.stack": stack, **dotted},
    )
    return workload(plan.resolve())


def live(w: Workload) -> PeakMemory:
    s = w.fixed
    return peak_memory(w, constants(s.gpu, s.kernels, s.stack))


FROZEN_BASES: dict[str, Any] = {"lora": {}, "nf4": {"format": "nf4"}, "int4": {"format": "int4"}}
"""Base -> `finetune.quantize`."""


@pytest.mark.parametrize("zero", ["single", "zero-1", "zero-3"])
@pytest.mark.parametrize("base", FROZEN_BASES)
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_a_frozen_base_stays_as_it_was_loaded(model: str, base: str, zero: str) -> None:
    """Under every framework profile: its bytes of a parameter are those of adapters alone."""
    changes: dict[str, Any] = {
        "finetune.lora": {"rank": 16, "targets": "all"},
        "finetune.quantize": FROZEN_BASES[base] or None,
    }
    gpus = 1 if zero == "single" else 8
    shard = gpus if zero == "zero-3" else 1
    for stack in framework_table():
        plan = Plan.of(
            model,
            gpu="h100-sxm-80gb",
            gpus=gpus,
            strategy=zero,
            set={"strategy.stack": stack, "strategy.precision": "bf16", **changes},
        ).resolve()
        w = workload(plan)
        notes = four_bit_notes(plan).get("four_bit_base")
        adapters = float(w.param_counts.trained[0])
        loaded = 2 * float(w.param_counts.total[0] - adapters)
        if notes:
            loaded = notes["bytes"] + notes["unquantized_bytes"]
        trained = w.fixed.framework.model_states.parameter_bytes(2) * adapters
        stored = model_states(w, w.param_counts).parameters
        assert float(stored[0]) == pytest.approx((loaded + trained) / shard, rel=1e-4), stack
        if zero == "zero-3":
            gathers = (c for c in step_collectives(w) if (c.kind, c.action) == ("all_gather", "F"))
            moved = sum(float(np.sum(c.bytes * c.count)) for c in gathers) / float(w.microbatches)
            assert moved == pytest.approx(loaded + 2 * adapters, rel=1e-4), stack


def lit(**changes: Any) -> PlannedRow:
    return row_to_plan(parse_row(LIT | changes))


@pytest.mark.parametrize(("kernels", "down"), [("fused", 1), ("compiled", 0)])
def test_torchtitan_keeps_attention_and_every_second_product(kernels: str, down: int) -> None:
    """Input, queries, values, attention's output and its log-sum-exp, the gate, and eagerly the
    down projection.
    """
    w = load("torchtitan", strategy__recompute="selective", strategy__kernels=kernels)
    widths = 4096 + 4096 + 1024 + 4096 + 14336 + down * 4096
    layer = activation_memory.layer_activations(w)
    assert layer.saved == pytest.approx(w.tokens * (2 * widths + 4 * 32))
    assert layer.needed > layer.saved


@pytest.mark.parametrize(
    ("stack", "kernels", "per_logit"),
    [
        ("torchtitan", "fused", 12),
        ("torchtitan", "compiled", 4),
        ("torchtitan-2024", "compiled", 12),
        ("torchtune-whole-loss", "eager", 12),
        ("torchtune-whole-loss", "compiled", 8),
    ],
)
def test_a_compiled_loss_keeps_logits_and_their_gradient(
    stack: str, kernels: str, per_logit: int
) -> None:
    """In 16 bits where the loss's cast is compiled too, in fp32 where the head casts before it."""
    w = load(stack, strategy__kernels=kernels)
    head = head_of(w)
    assert (head.logits + head.loss) / (w.tokens * w.vocab_rows) == pytest.approx(per_logit)


@pytest.mark.parametrize(
    ("stack", "kernels", "per_logit"),
    [
        ("torchtitan", "fused", 16),
        ("torchtitan", "compiled", 4),
        ("torchtitan-2024", "compiled", 16),
        ("megatron", "fused", 6),
    ],
)
def test_a_split_loss_of_torch_keeps_four_fp32_tensors(
    stack: str, kernels: str, per_logit: int
) -> None:
    """torch distributed/tensor/parallel/loss.py makes log-softmax's gradient out of place: it holds
    log-softmax, its exponential, the gradient of nll_loss, and their sum. Megatron's works in
    place, split or not.
    """
    w = load(stack, strategy="zero-1", strategy__kernels=kernels, strategy__tensor__size=4)
    head = head_of(w)
    assert w.vocab_rows == 128256 / 4
    assert (head.logits + head.loss) / (w.tokens * w.vocab_rows) == pytest.approx(per_logit)


def test_a_report_of_2024_means_the_torchtitan_of_then() -> None:
    then, now = (
        find_framework("torchtitan (FSDP2)", True, True, year) for year in (2024.12, 2025.06)
    )
    assert (then.name, now.name) == ("torchtitan-2024", "torchtitan")
    assert then.family == now.family == "torchtitan"


@pytest.mark.parametrize(
    ("framework", "zero", "pipeline", "reduce"),
    [
        ("torchtitan (FSDP2)", 3, 1, "microbatch"),
        ("torchtitan (FSDP2)", 3, 2, "step"),
        ("NeMo AutoModel (PyTorch FSDP2)", 3, 1, "microbatch"),
        ("NeMo AutoModel (PyTorch FSDP2)", 3, 2, "step"),
        ("InternEvo", 3, 2, "step"),
        ("Megatron-core", 3, 1, "microbatch"),
        ("Megatron-core", 3, 2, "step"),
        ("Megatron-core", 2, 1, "step"),
        ("NeMo", 2, 2, "step"),
        ("Megatron-Bridge", 2, 1, "step"),
    ],
)
def test_gradients_that_no_backward_shards_stay_whole(
    framework: str, zero: int, pipeline: int, reduce: str
) -> None:
    """torch distributed/pipelining/stage.py: set_requires_gradient_sync(False) but in the last
    backward, so that gradients accumulate unsharded, as for Megatron's distributed optimizer.
    """
    changes = {"framework": framework, "pp": str(pipeline), "dp": str(4 // pipeline)}
    plan = lit(**changes, gbs="64", zero_stage=str(zero), tied_emb="no").plan
    assert plan.strategy.data.reduce == reduce
    w = workload(plan)
    data = [c for c in step_collectives(w) if c.axis == "data"]
    reductions = {float(np.max(c.count)) for c in data if c.kind == "reduce_scatter"}
    gathers = max(float(np.max(c.count)) for c in data if c.kind == "all_gather")
    held = model_states(w, w.param_counts).gradients
    whole = w.param_counts.total * float(w.stored_gradient_bytes)
    assert held == pytest.approx(whole if reduce == "step" else whole / 4)
    units = float(np.max(num_zero3_units(w)))
    if zero == 3 and pipeline == 2:  # parameters stay gathered too
        assert (reductions, gathers) == ({units}, units)
    elif zero == 3:
        assert (reductions, gathers) == ({4 * units}, 4 * units)
    else:
        buckets = float(np.max(np.ceil(whole / w.searched.bucket_bytes)))
        assert (reductions, gathers) == ({buckets}, 1.0)


def test_litgpt_keeps_gradients_whole_between_steps_and_a_head_of_its_own() -> None:
    """fabric.no_backward_sync: FSDP holds unsharded gradients until the step's last microbatch."""
    plan = lit().plan
    assert (plan.strategy.data.reduce, plan.training.global_batch, plan.shape.tied) == (
        "step",
        64,
        False,
    )
    w = workload(plan)
    held = float(live(w).moments["initialised"]["gradients"].max())
    assert held == pytest.approx(2 * float(w.param_counts.total.max()))
    assert lit(gbs="16").plan.training.global_batch == 16
    assert float(
        live(workload(lit(gbs="16").plan)).moments["initialised"]["gradients"].max()
    ) == pytest.approx(held / 4)


def test_litgpts_root_stays_gathered() -> None:
    w = workload(lit().plan)
    both = 2 * 32000 * 4096
    assert float(zero_working_set(w, w.param_counts)["gathered"].max()) == pytest.approx(
        2 * (both + 2 * w.param_counts.layer)
    )


def test_a_seven_billion_model_does_not_fit_four_cards_of_24_gb_under_litgpt() -> None:
    plan = lit().plan
    assert float(live(workload(plan)).peak.max()) / 2**30 > plan.gpu.memory_gib


def test_every_axis_longer_than_one_has_a_communicator() -> None:
    assert num_communicators(load("workbench", 1, "single")) == 0
    assert num_communicators(load("workbench", 8)) == 2
    eight = load("workbench", 8, "megatron-tp", strategy__tensor__size=8)
    assert num_communicators(eight) == 2
    both = load("workbench", 8, "megatron-tp", strategy__tensor__size=2)
    assert num_communicators(both) == 3
    outside = (
        live(both).moments["initialised"][OUTSIDE] - live(eight).moments["initialised"][OUTSIDE]
    )
    c = constants(both.fixed.gpu, "fused", "workbench")
    assert float(outside.max()) == pytest.approx(c.communicator_mib * 2**20)


def test_a_v100_needs_for_its_driver_what_tools_read_of_it() -> None:
    """transformers, model memory anatomy: 1,343 MiB before a process has allocated anything."""
    plan = Plan.of("gpt2", gpu="v100-sxm2-32gb", gpus=1, strategy="single").resolve()
    w, k = workload(plan), constants(plan.gpu, plan.strategy.kernels, plan.strategy.stack)
    memory = peak_memory(w, k)
    assert memory.moments["peak"][OUTSIDE] == pytest.approx(1343 * 2**20)
    assert reported_memory(w, memory, k).outside == pytest.approx(1343 * 2**20)


def test_internevos_step_makes_flat_gradients_and_the_second_moments_root() -> None:
    """2 + 2 + 12 bytes that stay; 2 + 4 of flat gradients and 4 + 4 of one flat tensor's root and
    quotient.
    """
    w = load(
        "internevo", 1, "single", strategy__recompute="full", strategy__gradient_dtype="parameters"
    )
    assert float(live(w).live.max()) / float(w.param_counts.total.max()) == pytest.approx(
        30, rel=1e-3
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("stack", "strategy", "bytes_each"),
    [
        ("deepspeed-zero", "zero-1", 2 + 4),
        ("deepspeed-zero", "zero-2", 2 + 4),
        ("deepspeed-zero", "zero-3", 2 + 4),
        ("colossalai", "zero-1", 4),
    ],
)
def test_a_rank_upcasts_the_gradients_of_its_partition_for_the_step(
    stack: str, strategy: str, bytes_each: int, precision: str
) -> None:
    """DeepSpeed stage_1_and_2.py and stage3.py: flatten(averaged_gradients).to(fp32), beside the
    reduced ones.
    """
    changes = {"strategy__precision": precision, "strategy__gradient_dtype": "parameters"}
    w = load(stack, 8, strategy, "llama-2-7b", **changes)
    found = float(optimizer_step_buffers(w, w.param_counts)["temporary"][0])
    assert found == pytest.approx(bytes_each * float(w.param_counts.total[0]) / 8)


def test_zero_3_of_deepspeed_steps_a_sub_group_after_the_other() -> None:
    """sub_group_size: 1e9 parameters of a rank's partition."""
    w = load("deepspeed-zero", 8, "zero-3", model="llama-3-70b")
    assert float(optimizer_step_buffers(w, w.param_counts)["temporary"][0]) == 6e9


def test_what_the_host_steps_it_upcasts_itself() -> None:
    w = load("deepspeed-zero", 8, "zero-offload")
    assert float(optimizer_step_buffers(w, w.param_counts)["temporary"][0]) == 0


def test_nanotron_keeps_two_gathered_sequences_and_frees_others_that_wait() -> None:
    """MemoryBuffer's allgather and allgather2; reserved memory may also hold the outputs of row-
    and, in backward, the input gradients of column-parallel GEMMs, which NCCL's stream still uses.
    """

    def plan(sequence: bool, **changes: Any) -> Workload:
        return load(
            "nanotron",
            64,
            "megatron-3d",
            strategy__tensor__sequence=sequence,
            training__global_batch=256,
            training__micro_batch=1,
            strategy__pipeline__schedule="1f1b",
            **changes,
        )

    w = plan(True, strategy__tensor__size=8, strategy__pipeline__size=2)
    one = w.hidden_activation_bytes
    assert np.max(step_buffers(w, w.param_counts)["communication"]) == 2 * one
    shown = reported_memory(w, live(w), constants(w.fixed.gpu, "fused", "nanotron"))
    # Two microbatches in flight on the first stage, one on the second, and a backward.
    assert shown.held == pytest.approx(2 * w.layers * np.array([3, 2]) * one)
    bare, waiting = (shown.readings(0.0, waiting=share)["reserved"] for share in (0.0, 1.0))
    assert waiting - bare == pytest.approx(shown.held)
    whole = plan(False, strategy__tensor__size=1, strategy__pipeline__size=2)
    alone = reported_memory(whole, live(whole), constants(w.fixed.gpu, "fused", "nanotron"))
    assert not alone.held.any()


@pytest.mark.parametrize(("recompute", "full"), [("selective", False), ("none", True)])
def test_an_allocator_gives_its_slack_back_where_the_card_is_full(
    recompute: str, full: bool
) -> None:
    w = load(
        "torchtitan",
        strategy__recompute=recompute,
        training__sequence_length=8192,
        training__micro_batch=1,
    )
    shown = reported_memory(w, live(w), constants(w.fixed.gpu, w.fixed.kernels, "torchtitan"))
    read = shown.readings(0.1)
    allocated, reserved, whole = (
        float(read[kind].max()) for kind in ("allocated", "reserved", "nvidia-smi")
    )
    assert allocated < reserved < whole
    if full:
        assert reserved < 1.1 * allocated
        assert whole == pytest.approx(w.fixed.gpu.memory_gib * 2**30)
    else:
        assert reserved == pytest.approx(1.1 * allocated)
        assert whole < w.fixed.gpu.memory_gib * 2**30


def test_transformer_engine_keeps_a_placeholder_of_every_weight_shape() -> None:
    """Six GiB of Llama 3.1 405B on one tensor rank; tensor ranks hold their share, and one of
    each shape whatever the number of layers.
    """

    def held(tensor: int, pipeline: int, stack: str = "megatron", **more: Any) -> float:
        changes = {
            "strategy.tensor.size": tensor,
            "strategy.pipeline.size": pipeline,
            "strategy.stack": stack,
            **more,
        }
        plan = Plan.of("llama-3.1-405b", gpu="b200", gpus=64, strategy="megatron-3d", set=changes)
        return float(
            np.max(activation_memory.dummy_weight_gradient_bytes(workload(plan.resolve())))
        )

    assert held(1, 8) / 2**30 == pytest.approx(5.94, abs=0.01)
    assert held(8, 8) == pytest.approx(held(1, 8) / 8, rel=0.01)
    assert held(1, 2) == held(1, 8)
    assert held(1, 8, "torchtitan") == 0.0 == held(1, 8, **{"finetune.lora": {"rank": 8}})


def test_gemms_that_accumulate_leave_no_weight_gradient_in_flight() -> None:
    plan = Plan.of("llama-3-70b", gpu="h100-sxm-80gb", gpus=64, strategy="megatron-3d")
    w = workload(plan.replace(**{"strategy.stack": "megatron"}).resolve())
    framework = replace(w.fixed.framework, model_states=ModelStateBehavior())
    apart = replace(w, fixed=replace(w.fixed, framework=framework))
    accumulated = activation_memory.accumulated_gradient_bytes
    assert accumulated(w, 1e9) == 0.0 < accumulated(apart, 1e9)
    during = [float(np.max(live_by_phase(one)["feed_forward"]["temporary"])) for one in (w, apart)]
    assert during[0] < during[1]


def test_buffers_are_freed_by_frameworks_whose_operators_are_not_counted() -> None:
    """At the phase of the peak fewer of ZeRO-3's buffers live than at the most."""
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=16, strategy="zero-3").resolve()
    w, c = workload(plan), constants(plan.gpu, "eager", "textbook")
    kernels = replace(w.fixed.framework.kernels, counts_operators=False)
    peaks = []
    for frees in (True, False):
        exchange = replace(w.fixed.framework.data_parallel, frees_buffers=frees)
        framework = replace(w.fixed.framework, kernels=kernels, data_parallel=exchange)
        one = replace(w, fixed=replace(w.fixed, framework=framework))
        peaks.append(float(peak_memory(one, c).peak.max()))
    assert 0 < peaks[0] < peaks[1]
