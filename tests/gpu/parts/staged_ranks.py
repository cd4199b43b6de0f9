"""Two to four ranks on one GPU through the staged group: every axis equals one device."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

from tests.gpu.checks import Check, Evidence
from tests.gpu.ranks import compared, expect_equal, tolerance
from tests.gpu.staged_group import StagedGroup, StagedWork
from tests.parallel.small import GPT, LLAMA, plan
from workbench.plan.schema import Plan

DELAY_SECONDS = 2e-4
"""By which every transfer is late: nothing may depend on one that is quick."""
FAULT_SECONDS = 5e-3
FOUR_BIT_WIDTHS: dict[str, Any] = {**LLAMA, "layers": 2, "hidden": 64, "ffn": 128}
"""Rows of whole groups of 32."""
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "ffn": 24, "shared": 1, "first_dense": 1}
OPERATORS = {
    "embedding.tokens": "((1,1),(2,))",
    "blocks.*.attention.[qkv]": "((2,1),(1,1))",
    "blocks.*.mlp.up": "((2,1),(1,1))",
    "blocks.*.mlp.down": "((2,1),(1,1))",
    "head": "((2,1),(1,1))",
}


def zero(stage: int, ranks: int = 2, **how: Any) -> Plan:
    """Data parallelism of a ZeRO stage."""
    by_path = {f"strategy.data.{name}": value for name, value in {"zero": stage, **how}.items()}
    return plan(data=ranks, shape=GPT, tied=True, microbatches=2, changes=by_path)


def context(algorithm: str, ranks: int = 2) -> Plan:
    """Context parallelism."""
    how = {"size": ranks, "algorithm": algorithm, "ulysses_size": 2}
    changes = {"strategy.context": how, "cluster.gpus": ranks}
    return plan(microbatches=1, changes=changes)


def pipeline(schedule: str, chunks: int = 1, ranks: int = 2) -> Plan:
    """A pipeline schedule, on tied embeddings."""
    by_path = {"strategy.pipeline.schedule": schedule, "strategy.pipeline.chunks": chunks}
    return plan(pipeline=ranks, tied=True, changes=by_path)


def experts(ranks: int) -> Plan:
    """Experts sharded over data ranks."""
    return plan(data=ranks, moe=MOE, changes={"strategy.expert.size": 2}, microbatches=1)


def grid(algorithm: str, sides: list[int]) -> Plan:
    """A tensor grid with tied embeddings."""
    how: dict[str, Any] = {"strategy.tensor.algorithm": algorithm, "strategy.tensor.size": sides}
    how |= {"training.micro_batch": 4, "training.global_batch": 4, "cluster.gpus": 4}
    return plan(shape=GPT, tied=True, layers=1, changes=how)


def tensor(sequence: bool, shape: dict[str, Any] = LLAMA) -> Plan:
    """Megatron-LM's tensor parallelism."""
    changes = {"strategy.tensor.sequence": sequence}
    return plan(2, shape=shape, tied=True, microbatches=2, changes=changes)


def lora(tensor: int = 1, pipeline: int = 1, data: int = 1, **how: Any) -> Plan:
    """Adapters of rank 3; `a__b` names the plan field `a.b`."""
    by_path = {name.replace("__", "."): value for name, value in how.items()}
    changes = {"finetune.lora": {"rank": 3, "alpha": 5.0}, **by_path}
    return plan(tensor, pipeline, data, shape=FOUR_BIT_WIDTHS, microbatches=2, changes=changes)


PLANS = {
    "ddp": zero(0),
    "ring": context("ring"),
    "megatron-tp": tensor(False),
    "zero-3 each microbatch": zero(3, reduce="microbatch"),
    "pipeline 1f1b": pipeline("1f1b"),
    "moe": experts(2),
    "ulysses": context("ulysses"),
    "megatron-tp with sequence": tensor(True),
    "zero-1": zero(1),
    "zero-2": zero(2, reduce="microbatch"),
    "zero-3 keep gathered": zero(3, keep_gathered=True, reduce="step"),
    "zero-3 offload parameters": zero(3, reduce="microbatch", offload="parameters"),
    "zero-1 offload optimizer": zero(1, offload="optimizer"),
    "pipeline zb-v": pipeline("zb-v", 2),
    "pipeline interleaved": pipeline("interleaved", 2),
    "2-D tied": grid("2d", [2, 2]),
    "operators": plan(2, microbatches=2, changes={"strategy.operators": OPERATORS}),
    "hybrid zero-3": zero(3, 4, shard=2, reduce="microbatch"),
    "usp": context("usp", 4),
    "tensor x pipeline": plan(2, 2, microbatches=2),
}
PLANS |= {
    "lora zero-3": lora(data=2, strategy__data__zero=3, finetune__lora__dropout=0.2),
    "lora megatron-tp with sequence": lora(2, strategy__tensor__sequence=True),
    "lora pipeline zb-h1": lora(1, 2, strategy__pipeline__schedule="zb-h1"),
    "nf4 zero-3 offload parameters": lora(
        data=2,
        strategy__data__zero=3,
        strategy__data__offload="parameters",
        strategy__recompute="full",
        finetune__quantize={"group": 32},
    ),
    "int4 megatron-tp": lora(2, finetune__quantize={"format": "int4", "group": 32}),
    "dpo zero-2": lora(
        data=2,
        strategy__data__zero=2,
        finetune__preference={"beta": 0.3},
        corpus__format="preferences",
    ),
}
FAULTS = ("ddp", "pipeline 1f1b", "ring")


def equals_one_device(name: str, evidence: Evidence) -> None:
    """Loss, gradients and weights after three steps."""
    with patch.object(StagedGroup, "delay_seconds", DELAY_SECONDS):
        expect_equal(PLANS[name], evidence)


def dropped_wait_shows(name: str, evidence: Evidence) -> None:
    """The same plan, where no wait waits, is wrong: what is checked above can fail."""
    with (
        patch.object(StagedGroup, "delay_seconds", FAULT_SECONDS),
        patch.object(StagedWork, "wait", lambda work, timeout=None: True),
    ):
        answer = compared(PLANS[name], evidence)
    gap = max(answer["max_relative_diff"].values())
    evidence.expect("the fault is seen", gap > 100 * tolerance(evidence), gap=gap)


FORKS = True
CHECKS = [
    *(Check(name, partial(equals_one_device, name), 100) for name in PLANS),
    *(Check(f"dropped wait: {name}", partial(dropped_wait_shows, name), 100) for name in FAULTS),
]
