"""A search for a plan that trains adapters: stages differ where their layers do, and every
candidate is legal.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.planner.test_search import agree_on_memory
from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.methods.method_search import search_methods
from workbench.planner.search import search
from workbench.planner.search.cell_evaluation import CellEvaluator
from workbench.planner.search.cells import search_cells
from workbench.planner.search.constraints import narrow_space, parse_constraint
from workbench.planner.search.search_space import candidate_plan, search_space
from workbench.rehearsal.rehearse import rehearse

LAST: dict[str, Any] = {"lora": {"targets": ["blocks.1[45].*"]}}
FIRST: dict[str, Any] = {"lora": {"targets": ["blocks.[01].mlp.*"]}}


def tuned(model: str, gpus: int, **task: Any) -> Plan:
    batch = {"sequence_length": 1024, "global_batch": 4 * gpus}
    cluster = {"gpu": "h100-sxm-80gb", "gpus": gpus}
    return Plan.model_validate({"model": model, "cluster": cluster, "finetune": batch | task})


def test_a_plan_that_cannot_be_run_is_said() -> None:
    plan = tuned("llama-3.2-1b", 2, method="lora")
    assert search(plan, top=1).every_note == []
    fp8 = plan.replace(**{"strategy.precision": "fp8"})
    words = "is estimated only, for this version cannot run it: finetune.lora: is set, beside"
    (note,) = search(fp8, top=1).every_note
    assert note.startswith(f"the first plan {words}")
    assert f"LoRA rank 8: the plan of lowest cost {words}" in repr(search_methods(fp8))
    assert "cannot run" not in repr(search_methods(plan))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "dualpipe-v"])
@pytest.mark.parametrize("task", [LAST, FIRST], ids=["last", "first"])
def test_stages_of_other_layers_are_estimated_each(task: dict[str, Any], schedule: str) -> None:
    where = ["strategy.pipeline.size in 4,8", f"strategy.pipeline.schedule={schedule}"]
    where += ["strategy.tensor.size<=2", "strategy.data.zero<=1", "strategy.data.overlap=true"]
    plan = tuned("llama-3.2-1b", 16, **task)
    space = narrow_space(search_space(plan, "wide"), map(parse_constraint, where))
    evaluator, draw = CellEvaluator.of(space), random.Random(schedule)
    for cell in draw.sample(list(search_cells(space)), 2):
        e = evaluator(cell, cell.grid())
        legal = np.flatnonzero(np.broadcast_to(e.legal, e.shape)).tolist()
        numbers = np.array(draw.sample(legal, 4), dtype=int)
        for number, seconds, peak in zip(numbers, e.at(e.seconds, numbers), e.at(e.peak, numbers)):
            own = candidate_plan(space, cell.choice(number))
            found = estimate(own)
            assert found.step_seconds == pytest.approx(seconds, rel=1e-9)
            agree_on_memory(own.resolve(), peak, max(found.peak_bytes_by_rank.values()))


def test_tensor_ranks_leave_complete_groups() -> None:
    """Of 11,008 columns 8 ranks have 1,376, which 64 does not divide."""
    four_bit = search_space(tuned("llama-2-7b", 8, quantize={}))
    assert four_bit.tensor == (1, 2, 4)
    assert search_space(tuned("llama-2-7b", 8)).tensor == (1, 2, 4, 8)
    found = search(four_bit.asked, "gpus", where=["strategy.tensor.size>1"], top=50)
    assert len([one.plan.resolve() for one in found.top]) == 50


def test_no_grid_has_adapters() -> None:
    plan = tuned("llama-3.2-1b", 4)
    assert search_space(plan, "vast").algorithm == ("1d",)
    full = plan.replace(**{"finetune.method": "full"})
    assert "2d" in search_space(full, "vast").algorithm
    with pytest.raises(PlanError, match=r"is 'operators', .* finetune\.lora"):
        search(plan, space="operators")


def test_peaks_of_stages_with_and_without_adapters_are_the_engines() -> None:
    """Four stages of a layer, adapters in the last two; the largest is what a search counts. The
    first has no backward, and of its forward the estimate counts what is left alone.
    """
    cluster = {"gpu": "local", "gpus": 4}
    task = {"sequence_length": 128, "global_batch": 16, "micro_batch": 2}
    written = {
        "model": "tiny",
        "cluster": cluster,
        "strategy": {"pipeline": {"size": 4}, "precision": "fp32"},
        "finetune": task | {"lora": {"rank": 4, "targets": ["blocks.[2-3].*"]}},
    }
    plan = Plan.model_validate(written)
    rehearsed = rehearse(plan)
    peaks, states = rehearsed.peak_bytes_by_rank, rehearsed.memory
    trained = states[(states.moment == "peak") & (states.category == "optimizer")]
    assert set(trained["rank"]) == {2, 3}
    estimated = estimate(plan).peak_bytes_by_rank
    assert [estimated[rank] for rank in (1, 2, 3)] == pytest.approx(
        [peaks[rank] for rank in (1, 2, 3)], rel=0.02
    )
    where = [
        "strategy.pipeline.size=4",
        "strategy.pipeline.schedule=1f1b",
        "training.micro_batch=2",
    ]
    where += ["strategy.recompute=none", "strategy.data.zero=0"]
    found = search(plan, where=where, top=1).top[0]
    assert found.peak_bytes == pytest.approx(max(peaks.values()), rel=0.02)
