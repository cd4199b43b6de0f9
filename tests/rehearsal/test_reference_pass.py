"""The reference's forward passes of DPO: rehearsed as they run, and at no memory of their own."""

from typing import Any

import pytest

from tests.rehearsal.measured import measure, total, traffic
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.rehearsal import order_check
from workbench.rehearsal.rehearse import rehearse

BATCH = 8
REPLICAS = {"zero-3": 2}
"""Data-parallel ranks of a preset, where they are not one."""


def made(strategy: str, preference: dict[str, Any] | None, gpus: int = 2) -> ResolvedPlan:
    changes = {
        "strategy.precision": "fp32",
        "strategy.data.bucket_mib": 1.0,
        "finetune.lora": {"rank": 4},
        "finetune.preference": preference,
        "corpus.format": "completions" if preference is None else "preferences",
        "corpus.packing": False,
        "finetune.sequence_length": 48,
        "finetune.micro_batch": 2,
        "finetune.global_batch": BATCH * REPLICAS.get(strategy, 1),
    }
    return Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=changes).resolve()


@pytest.mark.parametrize("strategy", ["zero-3", pytest.param("dapple", marks=pytest.mark.slow)])
def test_a_rehearsal_counts_what_ranks_measure(strategy: str) -> None:
    plan = made(strategy, {"beta": 0.1})
    found = rehearse(plan)
    for rank, (_, memory, collectives) in enumerate(measure(plan)):
        if rank != found.representative[rank]:
            continue
        rows = found.memory[found.memory["rank"] == rank].to_dict("records")
        for moment in ("forward_end", "peak", "after_optimizer"):
            assert total(rows, 1, moment) == total(memory, 1, moment)
        calls = found.collectives[found.collectives["rank"] == rank]
        assert traffic(calls.to_dict("records")) == traffic(collectives)
    if strategy == "zero-3":  # the frozen weights are gathered for the reference too
        again = calls[(calls.step == 1) & (calls["kind"] == "all_gather")]
        bytes_of = (again.bytes * again["count"]).groupby(again.action).sum()
        assert bytes_of["REFERENCE"] > 0.9 * bytes_of["F"]


def test_the_reference_takes_a_number_a_sequence() -> None:
    """Reference, its metrics, and the step's scalars: no activations, no copy of the weights."""
    without, beside = (
        rehearse(made("dapple", preference)).peak_bytes_by_rank
        for preference in (None, dict[str, Any]())
    )
    assert all(0 < beside[rank] - without[rank] <= 16 * BATCH for rank in without)


@pytest.mark.slow
def test_no_rank_waits_for_ever_in_the_reference() -> None:
    assert not order_check.check_order(made("interleaved", {})).problems
