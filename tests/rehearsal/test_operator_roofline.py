"""The operators that a rehearsal counts, summed on the planned GPU, against the estimate's compute:
twenty-five plans over models, precisions, kernels, axes, ZeRO, recomputation and GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.plan.catalog import catalog
from workbench.plan.schema import Plan
from workbench.rehearsal.rehearse import rehearse

TOLERANCE = 0.03
A, H, B = "a100-sxm-80gb", "h100-sxm-80gb", "b200"
SEQUENCE = {"tensor.sequence": True}

QUICK: dict[str, tuple[Any, ...]] = {
    "llama, eager": ("llama-3-8b", 3, H, 8, (1, 4, 4096), {}),
    "mixture, experts split": (
        "mixtral-8x7b",
        2,
        H,
        8,
        (1, 3, 4096),
        {"expert.size": 8, "recompute": "selective"},
    ),
    "tied, fused, recomputed": (
        "llama-3.2-1b",
        3,
        A,
        8,
        (4, 2, 2048),
        {"kernels": "fused", "recompute": "full", "data.zero": 2},
    ),
    "ring": (
        "llama-3-8b",
        3,
        H,
        8,
        (1, 4, 16384),
        {"context.size": 4, "context.algorithm": "ring"},
    ),
    "sequence parallel, two stages, recomputed": (
        "llama-3-70b",
        4,
        H,
        16,
        (1, 8, 4096),
        {"tensor.size": 8, **SEQUENCE, "pipeline.size": 2, "recompute": "full"},
    ),
    "fp8": ("llama-3-8b", 2, H, 8, (1, 3, 4096), {"precision": "fp8"}),
    "plain attention": ("llama-3-8b", 2, H, 8, (1, 3, 2048), {"attention": "math"}),
}
"""Name -> model, layers, GPU, GPUs, (micro-batch, microbatches, tokens), fields of the strategy."""
MORE: dict[str, tuple[Any, ...]] = {
    "sequence parallel, fused": (
        "llama-3-8b",
        3,
        H,
        8,
        (2, 4, 4096),
        {"kernels": "fused", "tensor.size": 4, **SEQUENCE},
    ),
    "fp16, ZeRO-1": ("gpt2-xl", 3, A, 8, (8, 2, 1024), {"precision": "fp16", "data.zero": 1}),
    "biases, two stages, tensor ranks": (
        "qwen2-7b",
        4,
        B,
        8,
        (2, 6, 4096),
        {"pipeline.size": 2, "tensor.size": 2},
    ),
    "ZeRO-3, recomputed": (
        "gpt3-13b",
        3,
        A,
        8,
        (2, 1, 2048),
        {"data.zero": 3, "recompute": "full"},
    ),
    "Ulysses, fused": (
        "llama-3-8b",
        3,
        B,
        8,
        (1, 4, 16384),
        {"kernels": "fused", "context.size": 4, "context.algorithm": "ulysses"},
    ),
    "fp32": ("gpt2-xl", 3, A, 8, (4, 2, 1024), {"precision": "fp32"}),
    "layer norm, fused, tensor ranks": (
        "gpt3-6.7b",
        3,
        B,
        8,
        (4, 2, 2048),
        {"kernels": "fused", "tensor.size": 2},
    ),
    "mixture, fused, sequence parallel": (
        "mixtral-8x7b",
        2,
        B,
        8,
        (2, 2, 4096),
        {"kernels": "fused", "expert.size": 4, "tensor.size": 2, **SEQUENCE},
    ),
    "mixture, fp32, recomputed": (
        "mixtral-8x7b",
        2,
        A,
        8,
        (1, 2, 2048),
        {"precision": "fp32", "expert.size": 2, "recompute": "full"},
    ),
    "fp16, four stages, fused": (
        "llama-2-13b",
        4,
        A,
        8,
        (2, 8, 4096),
        {"precision": "fp16", "pipeline.size": 4, "kernels": "fused"},
    ),
    "relu, sequence parallel, attention recomputed": (
        "opt-6.7b",
        3,
        A,
        8,
        (4, 2, 2048),
        {"tensor.size": 4, **SEQUENCE, "recompute": "selective"},
    ),
    "tied, ZeRO-3, fused": (
        "qwen2.5-1.5b",
        3,
        H,
        8,
        (4, 2, 4096),
        {"data.zero": 3, "kernels": "fused"},
    ),
    "ring, tensor ranks, compiled": (
        "llama-3-8b",
        3,
        B,
        8,
        (1, 2, 8192),
        {
            "kernels": "compiled",
            "context.size": 2,
            "context.algorithm": "ring",
            "tensor.size": 2,
            "recompute": "selective",
        },
    ),
    "fp32, sequence parallel, fused": (
        "gpt3-6.7b",
        2,
        H,
        8,
        (2, 2, 2048),
        {
            "precision": "fp32",
            "kernels": "fused",
            "tensor.size": 2,
            **SEQUENCE,
            "recompute": "full",
        },
    ),
    "launches bound": (
        "llama-3.2-1b",
        4,
        B,
        8,
        (4, 2, 1024),
        {"pipeline.size": 4, "pipeline.schedule": "gpipe"},
    ),
    "fp8, sequence parallel, fused, recomputed": (
        "llama-3-8b",
        2,
        H,
        8,
        (1, 2, 4096),
        {"precision": "fp8", "kernels": "fused", "tensor.size": 4, **SEQUENCE, "recompute": "full"},
    ),
    "fp8, biases, tensor ranks": (
        "gpt3-6.7b",
        2,
        B,
        8,
        (4, 2, 2048),
        {"precision": "fp8", "tensor.size": 2},
    ),
    "plain attention recomputed, Ulysses": (
        "llama-3-8b",
        2,
        A,
        8,
        (2, 2, 2048),
        {
            "attention": "math",
            "context.size": 2,
            "context.algorithm": "ulysses",
            "recompute": "selective",
        },
    ),
}


def planned(model: str, layers: int, gpu: str, gpus: int, batch: Any, strategy: Any) -> Plan:
    """A plan of some layers of a model at its own widths."""
    shape = catalog.models()[model].shape.model_dump(exclude_none=True)
    shape.pop("unmodelled", None)
    micro, microbatches, length = batch
    ranks = 1
    for axis in ("tensor", "pipeline", "context"):
        ranks *= strategy.get(f"{axis}.size", 1)
    own = {f"strategy.{name}": value for name, value in ({"precision": "bf16"} | strategy).items()}
    return Plan.of(
        "tiny",
        gpu=gpu,
        gpus=gpus,
        strategy="ddp",
        set=own
        | {
            "model": shape | {"layers": layers},
            "training.micro_batch": micro,
            "training.global_batch": gpus // ranks * micro * microbatches,
            "training.sequence_length": length,
        },
    )


def check(name: str) -> None:
    """Every rehearsed rank's operators add up to the estimate of its stage."""
    plan = planned(*({**QUICK, **MORE}[name]))
    if plan.strategy.precision == "fp8":
        pytest.importorskip("torchao")
    found = rehearse(plan, operators=True).notes["operators"]
    assert len(found["ranks"]) == plan.resolve().strategy.pipeline.size
    for rank in found["ranks"]:
        assert abs(rank["difference"]) <= TOLERANCE, rank
        rows = [row for row in found["rows"] if row["rank"] == rank["rank"]]
        shown = sum(row["seconds"] for row in rows if row["phase"] != "optimizer")
        assert shown + rank["waits_seconds"] == pytest.approx(rank["compute_seconds"])


@pytest.mark.parametrize("name", QUICK)
def test_the_sum_over_operators_is_the_estimates_compute(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", MORE)
def test_so_it_is_over_all_axes(name: str) -> None:
    check(name)


def test_there_are_twenty_five_plans() -> None:
    assert len({**QUICK, **MORE}) == 25
