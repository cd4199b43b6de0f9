"""Memory: against the published figures, against the papers' closed forms, and monotone where it
must be.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from workbench.costmodel.frameworks.framework_profile import framework_table
from workbench.costmodel.inputs.rank_parameters import count_params
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory import activation_memory
from workbench.costmodel.memory.live_sets.stage_phases import total_bytes
from workbench.costmodel.memory.peak_memory import PeakMemory, largest_peaks, peak_memory
from workbench.costmodel.rates.constants import constants
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile

STATES = ("parameters", "gradients", "optimizer", "master")


def memory_of(plan: Plan) -> PeakMemory:
    full = plan.resolve()
    return peak_memory(
        workload(full), constants(full.gpu, full.strategy.kernels, full.strategy.stack)
    )


def on_cards(model: str, gpus: int = 8, strategy: str = "single", /, **changes: Any) -> Plan:
    return Plan.of(model, gpu="a100-sxm-80gb", gpus=gpus, strategy=strategy, set=changes)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_on_64_cards_is_the_papers_table(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, table 1: 7.5 billion parameters, 16 bytes each, 64 ranks."""
    initialised = memory_of(on_cards("gpt-7.5b", 64, f"zero-{zero}")).moments["initialised"]
    states = sum(float(initialised[name].max()) for name in STATES)
    assert states / 1e9 == pytest.approx(gigabytes, rel=0.01, abs=0.05)


@pytest.mark.parametrize(("gigabytes", "cards"), [(16, 75), (32, 38)])
def test_a_hundred_billion_parameters_with_fp32_adam_take_1200_gigabytes(
    gigabytes: int, cards: int
) -> None:
    """4 bytes of parameters and 8 of moments each; gradients, 400 GB more, are not in that
    figure.
    """
    shape = {
        "layers": 80,
        "hidden": 10176,
        "heads": 96,
        "ffn": 40704,
        "vocab": 51200,
        "mlp": "gelu",
        "biases": "none",
    }
    plan = on_cards(shape, 1, "single", **{"strategy.precision": "fp32"})
    initialised = memory_of(plan).moments["initialised"]
    each = count_params(workload(plan.resolve())).total.sum()
    states = sum(float(initialised[name].max()) for name in ("parameters", "optimizer", "master"))
    per_hundred_billion = states / each * 100e9
    assert each == pytest.approx(100e9, rel=0.02)
    assert per_hundred_billion / 1e9 == pytest.approx(1200)
    assert math.ceil(per_hundred_billion / (gigabytes * 1e9)) == cards


@pytest.mark.parametrize(
    ("recompute", "zero", "gigabytes"),
    [("full", 1, 10.0), ("full", 0, 27.5), ("none", 1, 27.5), ("none", 0, 45.0)],
)
def test_pangu_200b_is_the_papers(recompute: str, zero: int, gigabytes: float) -> None:
    """2104.12369: about 10 GB with optimizer sharding and recomputing, 27 to 28 with either, 45
    with neither.

    Of a stage in the middle: the first also has the embedding. Attention keeps scores and masks
    there.
    """
    plan = Plan.of(
        "pangu-200b",
        gpu="ascend-910",
        gpus=2048,
        strategy="pangu-5d",
        set={
            "strategy.recompute": recompute,
            "strategy.data.zero": zero,
            "training.sequence_length": 1024,
            "training.micro_batch": 1,
            "training.global_batch": 16 * 16,
            "strategy.gradient_dtype": "fp16",
            "strategy.stack": "mindspore",
        },
    )
    live = memory_of(plan).live / 1e9
    assert float(live[1]) == pytest.approx(gigabytes, rel=0.08)
    assert (float(live.max()) > 32) == (recompute == "none" and zero == 0)


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute", "expected"),
    [
        (1, False, "none", 34 + 80),
        (1, False, "selective", 34),
        (8, False, "none", 10 + 24 / 8 + 80 / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "none", (34 + 80) / 8),
        (8, True, "selective", 34 / 8),
    ],
)
def test_activations_are_korthikantis(
    tensor: int, sequence: bool, recompute: str, expected: float
) -> None:
    """Table 2 of 2205.05198 in units of sbh, GPT-3: 5as/h is 80; 16-bit, unfused attention,
    dropout.
    """
    plan = on_cards(
        "gpt3-175b",
        64,
        "megatron-3d",
        **{
            "strategy.stack": "megatron-2021",
            "strategy.tensor": {"size": tensor, "sequence": sequence},
            "strategy.pipeline.size": 8,
            "strategy.recompute": recompute,
        },
    )
    w = workload(plan.resolve())
    assert activation_memory.layer_activations(w).saved / (
        w.tokens * w.shape.hidden
    ) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("model", "share"), [("gpt3-175b", 0.70), ("mt-nlg-530b", 0.65)])
def test_scores_are_korthikantis_share_of_activations(model: str, share: float) -> None:
    changes = {
        "strategy.stack": "megatron-2021",
        "strategy.tensor": {"size": 8, "sequence": True},
        "training.sequence_length": 2048,
        "strategy.recompute": "none",
    }
    none, selective = (
        activation_memory.layer_activations(
            workload(on_cards(model, 64, "megatron-tp", **{**changes, **more}).resolve())
        ).saved
        for more in ({}, {"strategy.recompute": "selective"})
    )
    assert 1 - selective / none == pytest.approx(share, abs=0.01)


def test_adapters_train_their_own_parameters_alone() -> None:
    """LoRA (2106.09685): the base keeps 2 bytes; gradients, master and moments are those of rank x
    (in + out).
    """
    whole, tuned = (
        memory_of(on_cards("llama-3-8b", 1, "single", **more)).moments["initialised"]
        for more in ({}, {"finetune.lora": {"rank": 8, "targets": "attention"}})
    )
    adapters = 32 * 8 * ((4096 + 4096) * 2 + (4096 + 1024) * 2)
    assert float(tuned["master"].max()) == pytest.approx(4 * adapters)
    assert float(tuned["parameters"].max() - whole["parameters"].max()) == pytest.approx(
        2 * adapters
    )
    assert float(tuned["gradients"].max()) < 1e-3 * float(whole["gradients"].max())


def gpt3(tensor: int, sequence: bool) -> ResolvedPlan:
    changes = {
        "strategy.tensor": {"size": tensor, "sequence": sequence},
        "strategy.pipeline.size": 8,
    }
    return on_cards(
        "gpt3-175b", 64, "megatron-3d", **changes, **{"strategy.recompute": "none"}
    ).resolve()


def test_a_gpt_layer_keeps_what_korthikanti_counts() -> None:
    """34 sbh less the dropout masks that we do not have (2 sbh), less scores, plus fused
    attention's log-sum-exp.
    """
    w = workload(gpt3(1, sequence=False))
    s, h, a = w.fixed.sequence_length, w.shape.hidden, w.shape.heads
    assert activation_memory.layer_activations(w).saved == pytest.approx(
        32 * s * h + 4 * a * s, rel=1e-3
    )


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_sequence_parallel_divides_all_of_a_layer(tensor: int) -> None:
    """34 sbh / t of 2205.05198: norms and residuals are split too."""
    one, whole, split = (
        workload(gpt3(t, sequence=on)) for t, on in ((1, False), (tensor, False), (tensor, True))
    )
    assert activation_memory.layer_activations(split).saved == pytest.approx(
        activation_memory.layer_activations(one).saved / tensor
    )
    assert (
        activation_memory.layer_activations(whole).saved
        > activation_memory.layer_activations(split).saved
    )


@pytest.mark.parametrize(
    "model", ["tiny", "gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "bloom-7b1"]
)
def test_ranks_together_hold_the_models_parameters(model: str) -> None:
    """Without tensor parallelism nothing is replicated: the stages' counts add up to the
    shape's.
    """
    from workbench.plan.model.parameter_count import parameters

    plan = on_cards(
        model, 4, "single", **{"strategy.pipeline.size": 4, "strategy.pipeline.schedule": "1f1b"}
    ).resolve()
    count = parameters(plan.shape)
    tied_twice = count.embedding if plan.shape.tied else 0
    assert float(count_params(workload(plan)).total.sum()) == pytest.approx(
        count.total + tied_twice
    )


def worst(**changes: Any) -> float:
    plan = on_cards(
        "llama-3-8b",
        32,
        "ddp",
        **{"training.global_batch": 128, "training.sequence_length": 2048, **changes},
    )
    return float(memory_of(plan).peak.max())


@given(
    st.sampled_from(
        [
            ("training.micro_batch", (1, 2, 4)),
            ("training.sequence_length", (512, 1024, 4096)),
            ("strategy.recompute", ("full", "selective", "none")),
            ("strategy.data.zero", (1, 0)),
            ("strategy.tensor.size", (8, 4, 2, 1)),
            ("strategy.pipeline.schedule", ("1f1b", "gpipe")),
        ]
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "full"]),
)
@settings(max_examples=examples(40), deadline=None)
def test_memory_never_falls_along_a_knob(
    knob: tuple[str, tuple[Any, ...]], pipeline: int, recompute: str
) -> None:
    field, values = knob
    base = {
        "strategy.pipeline.size": pipeline,
        "strategy.recompute": recompute,
        "strategy.gradient_dtype": "fp32",
    }
    largest = [worst(**{**base, field: value}) for value in values]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(largest)), (field, largest)


@given(
    st.sampled_from(
        ["ddp", "zero-1", "zero-3", "dapple", "gpipe", "megatron-tp", "megatron-3d", "zero-offload"]
    ),
    st.sampled_from(["tiny", "gpt3-6.7b", "llama-3-8b", "mixtral-8x7b"]),
)
@settings(max_examples=examples(20), deadline=None)
def test_moments_are_ordered(strategy: str, model: str) -> None:
    """Nothing exceeds the peak, states last through it, and no category exceeds its own maximum."""
    m = memory_of(on_cards(model, 8, strategy))
    for moment in ("initialised", "forward_end", "before_optimizer", "after_optimizer"):
        assert (total_bytes(m.moments[moment]) <= m.peak * (1 + 1e-9)).all(), moment
    for category, size in m.moments["peak"].items():
        assert (size <= m.moments["maximum"][category] + 1e-6).all(), category
    states = np.sum([m.moments["initialised"][name] for name in STATES], axis=0)
    assert (states <= m.peak).all()


@pytest.mark.parametrize("stack", sorted(framework_table()))
@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero-3", {}),
        ("megatron-3d", {"strategy.precision": "fp16"}),
        ("zero-offload", {}),
        ("megatron-tp", {"finetune.lora": {"rank": 8}, "training.global_batch": 1}),
    ],
)
def test_the_searchs_short_cut_says_the_same_of_every_stack(
    stack: str, strategy: str, changes: dict[str, Any]
) -> None:
    plan = on_cards(
        "llama-3-8b",
        8,
        strategy,
        **{"strategy.stack": stack, "strategy.kernels": "fused", **changes},
    )
    full = plan.resolve()
    w, k = workload(full), constants(full.gpu, full.strategy.kernels, stack)
    assert float(largest_peaks(w, k)[0]) == pytest.approx(
        float(peak_memory(w, k).peak.max()), rel=1e-9
    )


def test_offload_moves_states_to_the_host() -> None:
    profile = estimate(on_cards("llama-3-8b", 8, "zero-offload"))
    host = profile.memory[(profile.memory.tier == "host") & (profile.memory.moment == "peak")]
    device = profile.memory[(profile.memory.tier == "device") & (profile.memory.moment == "peak")]
    assert {"optimizer", "master", "gradients"} <= set(host.category)
    assert not {"optimizer", "master", "gradients"} & set(device.category)


@pytest.mark.parametrize("strategy", ["zero-offload", "zero-infinity"])
def test_a_disk_tier_takes_the_states_and_their_time(strategy: str) -> None:
    on_host, on_disk = (
        estimate(on_cards("llama-3-8b", 8, strategy, **{"strategy.data.offload_tier": tier}))
        for tier in ("host", "disk")
    )

    def of(profile: Profile, tier: str) -> dict[str, int]:
        rows = profile.memory
        rows = rows[(rows["rank"] == 0) & (rows.moment == "peak") & (rows.tier == tier)]
        return dict(zip(rows.category, rows.bytes))

    states = {"optimizer", "master", *(["parameters"] if strategy == "zero-infinity" else [])}
    assert set(of(on_disk, "disk")) == states
    assert {name: of(on_host, "host")[name] for name in states} == of(on_disk, "disk")
    assert not states & set(of(on_disk, "host"))
    assert of(on_host, "device") == of(on_disk, "device")
    assert on_disk.step_seconds > 2 * on_host.step_seconds  # 1.6 GB/s instead of 25
