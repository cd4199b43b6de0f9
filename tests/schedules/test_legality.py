"""What a plan may ask and what the generators make are the same."""

from __future__ import annotations

import pytest

from workbench.plan.rules.check import check
from workbench.plan.schema import Pipeline, Plan
from workbench.schedules import generate, names


def refused(name: str, ranks: int, microbatches: int, chunks: int) -> bool:
    try:
        generate(name, ranks, microbatches, chunks)
    except ValueError:
        return True
    return False


def plan(name: str, ranks: int, microbatches: int, chunks: int) -> Plan:
    pipeline = {"size": ranks, "schedule": name, "chunks": chunks}
    sections = {
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "gpus": ranks},
        "strategy": {"pipeline": pipeline},
        "training": {"global_batch": microbatches, "micro_batch": 1},
    }
    return Plan.model_validate(sections)


def test_the_plan_field_names_every_schedule() -> None:
    description = str(Pipeline.model_fields["schedule"].description)
    assert set(names()) <= set(description.split(" "))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_plan_takes_what_the_generator_takes(name: str, ranks: int) -> None:
    for chunks in (1, 2, 3):
        for microbatches in (1, 2, 3, 4, 6, 7, 8):
            problems = check(plan(name, ranks, microbatches, chunks))
            assert bool(problems) == refused(name, ranks, microbatches, chunks), (
                microbatches,
                chunks,
                problems,
            )
