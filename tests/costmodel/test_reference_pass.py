"""An estimate counts the forward passes of a preference's reference."""

from typing import Any

import pytest

from workbench.plan.schema import Plan
from workbench.planner.estimate import estimate
from workbench.profile import Profile


def estimated(strategy: str, **changes: Any) -> Profile:
    fields = {f"finetune.{name}": value for name, value in changes.items()}
    fields |= {"finetune.micro_batch": 2, "finetune.global_batch": 64}
    kind = "preferences" if "preference" in changes else "completions"
    fields |= {"corpus.format": kind, "corpus.packing": False}
    plan = Plan.of("llama-3.2-1b", gpu="h100-sxm-80gb", gpus=4, strategy=strategy, set=fields)
    return estimate(plan)


def forward_span(found: Profile) -> float:
    """Seconds from the first forward's start to the last one's end, of a GPipe step."""
    rows = list(found.rows("timeline", "action", "start", "end"))
    forwards = [(start, end) for action, start, end in rows if action == "F"]
    return float(max(end for _, end in forwards) - min(start for start, _ in forwards))


def test_adapters_pay_a_forward_pass_and_no_memory() -> None:
    """GPipe runs all forwards first: the reference takes as long as they do without adapters."""
    lora, dpo = estimated("gpipe", lora={}), estimated("gpipe", lora={}, preference={})
    assert lora.step_seconds is not None and dpo.step_seconds is not None
    reference = dpo.notes["time"]["reference"]
    assert dpo.step_seconds - lora.step_seconds == pytest.approx(reference, rel=1e-6)
    assert reference < 0.97 * forward_span(dpo)
    bare = estimated("gpipe", lora={"rank": 1, "targets": ["blocks.15.mlp.down"]}, preference={})
    assert reference == pytest.approx(forward_span(bare), rel=0.01)
    assert dpo.peak_bytes_by_rank == lora.peak_bytes_by_rank


def test_all_weights_know_their_reference_before_the_first_step() -> None:
    plain = estimated("zero-3", method="full")
    assert estimated("zero-3", method="full", preference={}).step_seconds == plain.step_seconds
