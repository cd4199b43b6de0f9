"""A microbatch through every stage of each rank that is evaluated, and what it adds to a step."""

from __future__ import annotations

from functools import lru_cache

from workbench.costmodel.inputs.operator_stages import rank_stages
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.stage_pass import StagePass, stage_pass


@lru_cache(maxsize=8)
def rank_passes(w: Workload) -> tuple[tuple[StagePass, ...], ...]:
    """Passes of the stages of each of `w.places`."""
    assert w.fixed.operators is not None
    found = {}
    for place in w.places:
        if place.stage not in found:
            stages = rank_stages(w.fixed, place.stage)
            found[place.stage] = tuple(stage_pass(w, w.fixed.operators, x) for x in stages)
    return tuple(found[place.stage] for place in w.places)
