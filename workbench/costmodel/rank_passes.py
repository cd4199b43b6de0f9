"""One microbatch through every stage of each rank, whatever the model is given as."""

from __future__ import annotations

from functools import lru_cache

from workbench.costmodel.inputs.operator_stages import rank_stages, stages_of
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.stage_pass import StagePass, stage_pass
from workbench.costmodel.traced.traced_pass import traced_pass


@lru_cache(maxsize=8)
def rank_passes(w: Workload) -> tuple[tuple[StagePass, ...], ...]:
    """A microbatch through every stage of each of `w.places`."""
    ranks = {place.stage for place in w.places}
    found = {rank: tuple(_of_rank(w, rank)) for rank in ranks}
    return tuple(found[place.stage] for place in w.places)


def _of_rank(w: Workload, pipeline_rank: int) -> list[StagePass]:
    if w.fixed.traced is not None:
        own = stages_of(w.fixed, pipeline_rank)
        return [traced_pass(w, w.fixed.traced, stage) for stage in own]
    assert w.fixed.operators is not None
    return [
        stage_pass(w, w.fixed.operators, parts) for parts in rank_stages(w.fixed, pipeline_rank)
    ]
