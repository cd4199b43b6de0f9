"""The estimate against the real engine on fake tensors: peak memory per rank, and every collective
of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse
from workbench.vocabulary import NOT_ALLOCATED

ODD = {
    "layers": 5,
    "hidden": 96,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 160,
    "vocab": 3000,
    "max_positions": 128,
    "norm": "layernorm",
    "mlp": "relu",
    "positions": "learned",
    "biases": "all",
    "tied": True,
}
SHARED = {
    "layers": 3,
    "hidden": 96,
    "heads": 8,
    "kv_heads": 2,
    "ffn": 160,
    "vocab": 3000,
    "biases": "qkv",
}
"""Fewer key-value heads than tensor ranks."""

CASES = [
    ("tiny", "fp32", "single", 1),
    ("tiny", "bf16", "ddp", 2),
    ("tiny", "fp32", "megatron-tp", 2),
    ("tiny", "bf16", "tensor-pipeline", 4),
    ("tiny-gpt", "fp32", "dapple", 3),
    ("tiny-gpt", "fp32", "gpipe", 2),
    (ODD, "fp32", "single", 1),
    (ODD, "fp32", "dapple", 2),
    (ODD, "fp32", "tensor-pipeline", 4),
    ("tiny", "bf16", "megatron-tp", 4),
    (SHARED, "fp32", "megatron-tp", 4),
    ("tiny", "bf16", "interleaved", 2),
    ("tiny", "fp32", "zero-bubble", 2),
    ("tiny", "bf16", "zero-bubble", 4),
    (ODD, "fp32", "zero-bubble", 3),
    ("tiny", "fp32", "zb-v", 2),
    ("tiny-gpt", "fp32", "dualpipe-v", 2),
]


def small(model: Any, strategy: str, gpus: int, precision: str) -> Plan:
    changes = {
        "model": model,
        "strategy.precision": precision,
        "strategy.data.bucket_mib": 1.0,
        "training.sequence_length": 128,
        "training.micro_batch": 2,
        "training.global_batch": 4 * gpus,
    }
    return Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=changes)


def traffic(profile: Profile) -> Counter[tuple[Any, ...]]:
    """Calls of the last step by everything that names a collective."""
    rows = profile.collectives[profile.collectives.step == profile.collectives.step.max()]
    names = ["rank", "axis", "kind", "group_size", "dtype", "bytes", "action"]
    count: Counter[tuple[Any, ...]] = Counter()
    for key, calls in zip(rows[names].itertuples(index=False), rows["count"]):
        count[tuple(key)] += int(calls)
    return count


@pytest.mark.slow
@pytest.mark.drawn(7)
@pytest.mark.parametrize(("model", "precision", "strategy", "gpus"), CASES)
def test_peaks_and_collectives_are_the_engines(
    model: Any, precision: str, strategy: str, gpus: int
) -> None:
    plan = small(model, strategy, gpus, precision)
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed)
    assert estimated.representative == rehearsed.representative


LATENT = {
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "ffn": 160,
    "vocab": 3000,
    "mla": {"kv_rank": 32, "q_rank": 48, "rope_dim": 8, "nope_dim": 16, "value_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "gpus", "more"),
    [
        ("megatron-tp", 2, {"strategy.recompute": "full"}),
        ("megatron-sp", 2, {}),
        ("zero-bubble", 2, {}),
        ("ddp", 2, {"strategy.context.size": 2}),
        ("zero-3", 2, {"strategy.attention": "math"}),
    ],
)
def test_latent_attention_is_estimated_within_half_a_per_cent(
    strategy: str, gpus: int, more: dict[str, Any]
) -> None:
    plan = small(LATENT, strategy, gpus, "fp32").replace(**more)
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.005)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("model", "precision", "strategy", "gpus", "kernels"),
    [
        ("tiny", "fp32", "single", 1, "compiled"),
        ("tiny", "fp16", "single", 1, "fused"),
        ("tiny", "bf16", "tensor-pipeline", 4, "fused"),
        ("tiny-gpt", "fp32", "gpipe", 2, "fused"),
        (ODD, "bf16", "single", 1, "fused"),
        (ODD, "fp32", "zero-bubble", 3, "compiled"),
        (SHARED, "fp32", "megatron-tp", 4, "fused"),
        ("tiny", "bf16", "zero-2", 2, "fused"),
        ("tiny", "bf16", "colossal-2d", 4, "fused"),
        ("tiny-moe", "fp32", "ddp", 2, "fused"),
    ],
)
def test_so_they_are_with_replaced_seams(
    model: Any, precision: str, strategy: str, gpus: int, kernels: str
) -> None:
    plan = small(model, strategy, gpus, precision).replace(**{"strategy.kernels": kernels})
    for length in (128, 1024):  # a processor leaves small seams plain
        plan = plan.replace(
            **{"training.sequence_length": min(length, plan.resolve().shape.max_positions)}
        )
        estimated, rehearsed = estimate(plan), rehearse(plan)
        assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
        assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "strategy", "recompute"),
    [
        ("tiny", "zb-v", "full"),
        ("tiny-gpt", "zero-bubble", "full"),
        (ODD | {"ffn": 384}, "dapple", "none"),
    ],
)
def test_peaks_are_exact_where_one_tensor_of_a_layer_decides(
    model: Any, strategy: str, recompute: str, precision: str
) -> None:
    plan = small(model, strategy, 2, precision).replace(**{"strategy.recompute": recompute})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=5e-4)


FIVE = ODD | {"layers": 2, "heads": 5, "kv_heads": 5, "head_dim": 20, "mlp": "gelu", "ffn": 161}
THREE = SHARED | {"layers": 2, "heads": 9, "kv_heads": 3, "head_dim": 10, "ffn": 158}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "tensor", "pipeline", "sequence"),
    [
        (FIVE, "fp32", 2, 1, True),
        (FIVE, "bf16", 3, 1, False),
        (THREE, "fp32", 2, 2, False),
        (THREE, "bf16", 4, 1, True),
        (THREE | {"moe": {"experts": 4, "top_k": 2, "ffn": 97}}, "fp32", 2, 1, False),
    ],
)
def test_heads_and_widths_that_tensor_ranks_do_not_divide(
    model: Any, precision: str, tensor: int, pipeline: int, sequence: bool
) -> None:
    """Every rank has room for what the widest has."""
    form = {
        "strategy.tensor": {"size": tensor, "sequence": sequence},
        "strategy.pipeline.size": pipeline,
    }
    plan = small(model, "ddp", tensor * pipeline, precision).replace(
        **{"strategy.preset": None, **form}
    )
    estimated, last = estimate(plan), plan.world_size - 1
    stages = set(estimated.representative.values())
    rehearsed = rehearse(plan, sorted({*stages, last}))
    peaks = {rank: estimated.peak_bytes_by_rank[rank] for rank in rehearsed.peak_bytes_by_rank}
    assert last in peaks and peaks == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    calls = {key: count for key, count in traffic(rehearsed).items() if key[0] in stages}
    assert traffic(estimated) == calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "schedule", "tensor"),
    [
        ("tiny", "fp32", "zb-h1", {"size": 2}),
        (ODD, "fp32", "zb-h1", {"size": 2, "sequence": True}),
        ("tiny", "bf16", "zb-h2", {"size": 2}),
        ("tiny-gpt", "fp32", "zb-h1", {"size": [2, 2], "algorithm": "2d"}),
    ],
    ids=str,
)
def test_tensor_ranks_under_a_split_backward(
    model: Any, precision: str, schedule: str, tensor: dict[str, Any]
) -> None:
    size = tensor["size"]
    gpus = 2 * (math.prod(size) if isinstance(size, list) else size)
    form: dict[str, Any] = {
        "strategy.tensor": tensor,
        "strategy.pipeline": {"size": 2, "schedule": schedule},
    }
    form |= {"training.micro_batch": 4, "training.global_batch": 32}
    plan = small(model, "ddp", gpus, precision).replace(**{"strategy.preset": None, **form})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.parametrize("algorithm", ["ring", "ulysses", "usp"])
@pytest.mark.parametrize(
    ("model", "precision", "gpus"),
    [pytest.param("tiny", "bf16", 4, marks=pytest.mark.slow), (ODD, "fp32", 2)],
)
def test_sequences_spread_over_ranks(model: Any, precision: str, gpus: int, algorithm: str) -> None:
    """With fewer key-value heads than ranks too, which Ulysses repeats."""
    spread = {
        "strategy.context": {"size": gpus, "algorithm": algorithm, "ulysses_size": 2},
        "training.global_batch": 4,
    }
    plan = small(model, "ddp", gpus, precision).replace(**{"strategy.preset": None, **spread})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("what", ["selective", "full", [0, 2]], ids=str)
@pytest.mark.parametrize(
    ("model", "precision", "strategy", "gpus"),
    [
        ("tiny", "bf16", "tensor-pipeline", 4),
        (ODD, "fp32", "single", 1),
        ("tiny", "fp32", "ring-attention", 2),
        ("tiny", "bf16", "usp", 4),
    ],
)
def test_recomputation(model: Any, precision: str, strategy: str, gpus: int, what: Any) -> None:
    plan = small(model, strategy, gpus, precision).replace(**{"strategy.recompute": what})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "pipeline", "tensor"),
    [
        (ODD, "fp32", 2, {"size": 2, "sequence": True}),
        ("tiny", "bf16", 1, {"size": 2, "sequence": True}),
        (ODD, "bf16", 1, {"size": [2, 2], "algorithm": "2d"}),
        ("tiny-gpt", "fp32", 1, {"size": [2, 2, 2], "algorithm": "2.5d"}),
        (ODD, "fp32", 1, {"size": [2, 2, 2], "algorithm": "3d"}),
    ],
    ids=str,
)
def test_tensor_ranks_of_every_form(
    model: Any, precision: str, pipeline: int, tensor: dict[str, Any]
) -> None:
    size = tensor["size"]
    gpus = pipeline * (math.prod(size) if isinstance(size, list) else size)
    form = {"strategy.tensor": tensor, "strategy.pipeline.size": pipeline}
    form |= {"training.micro_batch": 4, "training.global_batch": 16}
    plan = small(model, "ddp", gpus, precision).replace(**{"strategy.preset": None, **form})
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "size"), [("2d", [2, 2]), ("3d", [2, 2, 2])])
def test_dropout_on_grids(algorithm: str, size: list[int]) -> None:
    """It moves nothing, and keeps nothing: masks are drawn again."""
    form = {"strategy.tensor": {"size": size, "algorithm": algorithm}, "training.dropout": 0.1}
    form |= {"training.micro_batch": 4, "training.global_batch": 16}
    plan = small("tiny", "ddp", math.prod(size), "bf16").replace(
        **{"strategy.preset": None, **form}
    )
    estimated, rehearsed = estimate(plan), rehearse(plan)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.02)
    assert traffic(estimated) == traffic(rehearsed) != Counter()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_split_backward_beside_split_sequences(schedule: str) -> None:
    """What is gathered does not wait for its weights' gradients."""
    split = {
        "strategy.tensor": {"size": 2, "sequence": True},
        "strategy.pipeline": {"size": 2, "schedule": schedule},
    }
    plan = small(SHARED | {"layers": 4}, "ddp", 4, "fp32").replace(
        **{"strategy.preset": None, **split}
    )
    assert estimate(plan).peak_bytes_by_rank == pytest.approx(
        rehearse(plan).peak_bytes_by_rank, rel=0.02
    )


GROUPED = {
    "layers": 3,
    "hidden": 96,
    "heads": 8,
    "kv_heads": 2,
    "ffn": 160,
    "vocab": 400,
    "head_dim": 16,
}


def on_gpus(gpu: str, precision: str, kv_heads: int = 2, gpus: int = 1, **more: Any) -> Plan:
    changes = {"model": GROUPED | {"kv_heads": kv_heads}, "strategy.precision": precision, **more}
    changes |= {
        "training.sequence_length": 128,
        "training.micro_batch": 2,
        "training.global_batch": 8,
    }
    return Plan.of(
        "tiny", gpu=gpu, gpus=gpus, strategy="ddp", set={"strategy.preset": None} | changes
    )


def tensors_at_the_peak(profile: Profile) -> dict[int, int]:
    """Rank -> bytes of tensors at its peak: what a GPU's driver and libraries take is no
    rehearsal's to see.
    """
    rows = profile.memory[(profile.memory.moment == "peak") & (profile.memory.tier == "device")]
    rows = rows[
        ~rows.category.isin(["overhead", "allocated", *NOT_ALLOCATED])
        & (rows.step == rows.step.max())
    ]
    return {int(rank): int(size) for rank, size in rows.groupby("rank").bytes.sum().items()}


def slowly(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


SMALL_FFN = {"heads": 32, "kv_heads": 4, "head_dim": 32, "ffn": 16, "vocab": 256}


@pytest.mark.parametrize(
    ("precision", "attention", "shape", "recompute"),
    [
        ("bf16", "flash", {"head_dim": 12}, "none"),
        ("bf16", "flash", SMALL_FFN, [0]),
        ("bf16", "efficient", SMALL_FFN | {"kv_heads": 32}, "none"),
        ("bf16", "math", {"head_dim": 16}, "selective"),
        *slowly(
            ("bf16", "flash", {"head_dim": 16}, "none"),
            ("bf16", "flash", SMALL_FFN, "none"),
            ("bf16", "flash", SMALL_FFN, "full"),
            ("bf16", "efficient", {"head_dim": 16}, "selective"),
            ("fp32", "efficient", {"head_dim": 16, "kv_heads": 8}, "none"),
            ("bf16", "math", {"head_dim": 16}, "none"),
            ("bf16", "math", {"head_dim": 16}, [0, 1]),
            ("fp32", "math", {"head_dim": 16}, "full"),
        ),
    ],
    ids=str,
)
def test_what_each_attention_kernel_keeps(
    precision: str, attention: str, shape: dict[str, Any], recompute: Any
) -> None:
    """A rehearsal of a GPU takes its branches: what kernels save, and allocate inside."""
    plan = on_gpus(
        "h100-sxm-80gb",
        precision,
        **{"strategy.attention": attention, "strategy.recompute": recompute},
    )
    model = GROUPED | {"hidden": 128, "kv_heads": 2} | shape
    plan = plan.replace(model=model, **{"training.sequence_length": 256})
    assert tensors_at_the_peak(estimate(plan)) == pytest.approx(
        tensors_at_the_peak(rehearse(plan)), rel=0.002
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "precision", "gpus", "form"),
    [
        ("h100-sxm-80gb", "fp32", 1, {}),
        ("h100-sxm-80gb", "fp32", 1, {"strategy.recompute": "selective"}),
        ("h100-sxm-80gb", "fp32", 1, {"strategy.recompute": "full"}),
        ("t4", "fp16", 2, {"strategy.tensor.size": 2}),
        ("h100-sxm-80gb", "tf32", 2, {"strategy.context": {"size": 2, "algorithm": "ulysses"}}),
        ("h100-sxm-80gb", "tf32", 2, {"strategy.context": {"size": 2, "algorithm": "ring"}}),
        ("v100-sxm2-16gb", "fp16", 2, {"strategy.pipeline": {"size": 2, "schedule": "zb-h1"}}),
    ],
    ids=str,
)
def test_heads_repeated_where_a_gpu_takes_no_groups(
    gpu: str, precision: str, gpus: int, form: dict[str, Any]
) -> None:
    plan = on_gpus(gpu, precision, gpus=gpus, **form)
    assert tensors_at_the_peak(estimate(plan)) == pytest.approx(
        tensors_at_the_peak(rehearse(plan)), rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("instrument", [estimate, rehearse])
@pytest.mark.parametrize(
    ("gpu", "precision", "repeated"),
    [("h100-sxm-80gb", "fp32", True), ("t4", "fp16", True), ("h100-sxm-80gb", "fp16", False)],
)
def test_attention_keeps_repeated_heads_for_backward(
    gpu: str, precision: str, repeated: bool, instrument: Callable[[Plan], Profile]
) -> None:
    """A GPU's only fused operator for fp32, and for fp16 before it had bf16, takes a key-value head
    a query head.
    """
    every, groups = (
        instrument(on_gpus(gpu, precision, n)).by_category["activations"] for n in (8, 2)
    )
    layers, keys_and_values, heads, head_dim, tokens = 3, 2, 8 - 2, 16, 2 * 128
    element = 2 if precision == "fp16" else 4
    more = 0 if repeated else layers * keys_and_values * heads * head_dim * tokens * element
    assert every - groups == more


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_receives_posted_early_are_held_as_the_engine_holds_them(schedule: str) -> None:
    fields: dict[str, Any] = {
        "model.layers": 8,
        "training.micro_batch": 2,
        "training.global_batch": 16,
        "strategy.recompute": "full",
        "strategy.pipeline.schedule": schedule,
    }
    if schedule == "zb-v":
        fields["strategy.pipeline.chunks"] = 2
    plan = small("tiny", "dapple", 2, "fp32").replace(**fields)
    assert estimate(plan).peak_bytes_by_rank == pytest.approx(
        rehearse(plan).peak_bytes_by_rank, rel=1e-3
    )
