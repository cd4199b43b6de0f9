"""Stages that hold the embedding or the head alone, as Megatron-core counts them
(account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split).
"""

from __future__ import annotations

import pytest

from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import build_plan
from workbench.planner.validation.predictions import predict


def planned(partition: list[int], size: int, chunks: int = 1) -> ResolvedPlan:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    pipeline = {"size": size, "chunks": chunks, "partition": partition, "schedule": schedule}
    return build_plan(
        {
            "model": {
                "layers": sum(partition),
                "hidden": 1024,
                "heads": 16,
                "ffn": 4096,
                "vocab": 131072,
            },
            "strategy": {"pipeline": pipeline, "precision": "bf16", "stack": "textbook"},
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": size},
            "training": {"sequence_length": 4096, "micro_batch": 4, "global_batch": 32 * size},
        }
    ).resolve()


def test_embedding_and_head_may_stand_alone() -> None:
    """6 layers on 8 stages, in two chunks a rank."""
    plan = planned([0, 1, 1, 1, 1, 1, 1, 0], size=4, chunks=2)
    assert plan.strategy.pipeline.partition == [0, 1, 1, 1, 1, 1, 1, 0]


def test_a_head_alone_takes_its_work_from_the_rank_before_it() -> None:
    """The head costs here as much as 8 layers, so it decides where the layers go."""
    beside, alone = predict(planned([4, 4, 4, 4], 4)), predict(planned([5, 5, 6, 0], 4))
    assert beside.seconds and alone.seconds and alone.seconds < beside.seconds
    assert sum(alone.parts[part] for part in ("compute s", "bubble s")) < sum(
        beside.parts[part] for part in ("compute s", "bubble s")
    )


@pytest.mark.parametrize("partition", [[4, 0, 4, 4], [0, 0, 6, 6], [6, 6, 0, 0]])
def test_no_other_stage_is_empty(partition: list[int]) -> None:
    with pytest.raises(PlanError, match=r"no layer; legal: a layer or more, but for the first"):
        planned(partition, size=4)


def test_the_engine_says_that_it_builds_none() -> None:
    problems = unsupported(planned([0, 4, 4, 4], size=4), "run")
    assert "strategy.pipeline.partition" in {problem.field for problem in problems}
    said = [str(problem) for problem in problems if problem.field == "strategy.pipeline.partition"]
    assert said[0].endswith(
        "gives stage 0 no layer, which this version cannot run; legal: a layer or more on each"
    )
    assert not unsupported(planned([0, 4, 4, 4], size=4), "estimate")
