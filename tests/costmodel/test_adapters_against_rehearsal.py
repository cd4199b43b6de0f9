"""Adapters beside a frozen base: the estimate against the real engine on fake tensors, peaks,
states and every collective.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.costmodel.test_against_rehearsal import LATENT, ODD, SHARED, small, traffic
from tests.costmodel.test_zero_against_rehearsal import assert_is_the_engines
from workbench.plan.schema import Plan
from workbench.planner import estimate

S, D = "strategy.", "strategy.data."
FULL = {S + "recompute": "full"}
TWO_BY_TWO = {S + "tensor.size": 2, S + "pipeline.size": 2}
SHARDED_STAGES = {S + "pipeline.size": 2, D + "zero": 3, D + "reduce": "microbatch"}
ALL: dict[str, Any] = {"rank": 8}
SOME: dict[str, Any] = {"rank": 4, "targets": ["attention.[qv]", "mlp.up"]}
LATE: dict[str, Any] = {"rank": 4, "targets": ["blocks.[2-3].*"]}
ONE: dict[str, Any] = {"rank": 4, "targets": ["blocks.1.mlp.up"]}
DROPPED: dict[str, Any] = {"rank": 8, "dropout": 0.1}
NF4 = {"finetune.quantize": {"group": 32}}
INT4 = {"finetune.quantize": {"format": "int4", "group": 32, "double": False}}
PAIRS: dict[str, Any] = {
    "finetune.preference": {},
    "corpus.format": "preferences",
    "corpus.packing": False,
}
RING: dict[str, Any] = {S + "context.size": 2, S + "context.algorithm": "ring"}
Case = tuple[Any, str, str, int, dict[str, Any], dict[str, Any]]
FEW: list[Case] = [
    ("tiny", "fp32", "zero-3", 2, LATE, {}),
    ("tiny", "bf16", "megatron-sp", 4, ALL, {S + "tensor.size": 2, D + "zero": 1}),
    ("tiny", "bf16", "zero-bubble", 4, SOME, TWO_BY_TWO),
    ("tiny", "bf16", "zero-3", 2, ALL, NF4),
    ("tiny", "fp32", "zero-3", 2, LATE, PAIRS),
    ("tiny-gpt", "bf16", "zero-3", 2, ALL, {**PAIRS, S + "kernels": "fused"}),
    ("tiny-gpt", "bf16", "megatron-tp", 2, ALL, {}),
    ("tiny", "bf16", "single", 1, DROPPED, {S + "kernels": "fused"}),
    ("tiny", "fp32", "dapple", 2, LATE, {}),
    ("tiny", "bf16", "ddp", 2, ONE, {}),
    ("tiny-gpt", "fp32", "megatron-sp", 2, ONE, {}),
    ("tiny-moe", "bf16", "zero-3", 2, {"rank": 8, "targets": "attention"}, {}),
]
OF_PAIRS: list[Case] = [
    (ODD, "fp32", "megatron-sp", 2, ALL, PAIRS),
    ("tiny", "bf16", "zero-bubble", 4, SOME, {**PAIRS, **TWO_BY_TWO}),
    (ODD, "bf16", "dapple", 4, ALL, {**PAIRS, **SHARDED_STAGES}),
    ("tiny", "fp32", "zb-v", 2, LATE, PAIRS),
    ("tiny", "bf16", "ddp", 4, ALL, {**PAIRS, **RING, S + "pipeline.size": 2}),
    ("tiny-moe", "fp32", "ddp", 2, ALL, {**PAIRS, S + "context.size": 2}),
    ("tiny-moe", "bf16", "zero-3", 2, ALL, {**PAIRS, S + "expert.size": 2}),
    ("tiny", "bf16", "zero-3", 2, ALL, {**PAIRS, D + "keep_gathered": True}),
]
CASES: list[Case] = [
    ("tiny", "bf16", "ddp", 2, SOME, {}),
    (ODD, "bf16", "single", 1, {"rank": 8, "targets": ["mlp.down"]}, {}),
    ("tiny", "fp32", "ddp", 2, DROPPED, {}),
    ("tiny", "fp32", "single", 1, DROPPED, FULL),
    ("tiny-gpt", "bf16", "zero-2", 4, ALL, {D + "shard": 2}),
    (ODD, "bf16", "fsdp", 2, ALL, {}),
    ("tiny", "fp32", "zero-3", 2, LATE, {D + "in_flight": 1}),
    ("tiny", "bf16", "zero-3", 2, ALL, {**FULL, D + "shard": 2}),
    ("tiny", "bf16", "zero-infinity", 2, ALL, {}),
    (SHARED, "fp32", "megatron-tp", 4, ALL, {}),
    ("tiny", "fp32", "megatron-sp", 2, ALL, FULL),
    (LATENT, "fp32", "megatron-sp", 2, ALL, {}),
    (ODD, "fp32", "dapple", 2, ALL, {}),
    (ODD, "bf16", "dapple", 4, ALL, SHARDED_STAGES),
    ("tiny", "fp32", "zb-v", 2, LATE, {}),
    ("tiny", "bf16", "interleaved", 2, ALL, {}),
    ("tiny", "fp32", "ddp", 2, ALL, {S + "context.size": 2, S + "context.algorithm": "ulysses"}),
    ("tiny-moe", "bf16", "zero-3", 2, ALL, {S + "expert.size": 2}),
    ("tiny-moe", "fp32", "megatron-sp", 2, ALL, {}),
    ("tiny-moe", "fp32", "megatron-tp", 2, {"rank": 8, "targets": "attention"}, {}),
    ("tiny", "bf16", "tensor-pipeline", 4, ALL, {S + "kernels": "fused"}),
    ("tiny", "bf16", "megatron-tp", 2, ALL, NF4),
    ("tiny", "bf16", "zero-infinity", 2, SOME, {**INT4, **FULL}),
    ("tiny-moe", "bf16", "zero-3", 2, ALL, {**NF4, S + "expert.size": 2}),
]


def tuned(case: Case) -> Plan:
    model, precision, strategy, gpus, lora, changes = case
    return (
        small(model, strategy, gpus, precision)
        .replace(**changes)
        .replace(**{"finetune.lora": lora})
    )


@pytest.mark.parametrize("case", FEW, ids=str)
def test_peaks_and_collectives_of_adapters_are_the_engines(case: Case) -> None:
    assert_is_the_engines(tuned(case))


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_so_they_are_on_every_axis(case: Case) -> None:
    assert_is_the_engines(tuned(case))


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", OF_PAIRS, ids=str)
def test_and_with_the_passes_of_a_reference(case: Case) -> None:
    assert_is_the_engines(tuned(case))


def test_weights_that_are_all_trained_have_no_reference_passes() -> None:
    """The step's scalars have the metrics of pairs, and context ranks sum log-probabilities."""
    settings = {"finetune.method": "full", **PAIRS, **RING}
    before = small("tiny", "ddp", 2, "fp32").replace(**RING)
    plain, pairs = (traffic(estimate(plan)) for plan in (before, before.replace(**settings)))
    sums = {key[1:6]: calls for key, calls in (pairs - plain).items()}
    assert sums == {
        ("world", "all_reduce", 2, "fp32", 24): 1,
        ("context", "all_reduce", 2, "fp32", 8): 4,
    }
