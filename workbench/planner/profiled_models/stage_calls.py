"""Calls of a rank of planned stages: what it exchanges with other stages, and its all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.plan.rank_placement import RankPlace, tied_stages_of_profile
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import pair_groups
from workbench.plan.schema import STORED
from workbench.plan.stage_replicas import overlaps
from workbench.planner.profiled_models.planned_stages import PlannedStages


def stage_calls(planned: PlannedStages, full: ResolvedPlan, at: RankPlace) -> list[CollectiveCall]:
    """Calls of the rank at a place, of one step."""
    return [
        *_boundary_transfers(planned, full, at),
        *_tied_exchanges(planned, full, at),
        *_all_reduce(planned, full, at),
    ]


def _boundary_transfers(
    planned: PlannedStages, full: ResolvedPlan, at: RankPlace
) -> Iterator[CollectiveCall]:
    """Of the sequences of a microbatch that this replica and one of a stage beside have."""
    own, parts = planned.stages[at.stage], planned.parts
    dtype = STORED.get(full.strategy.precision, full.strategy.precision)
    mine, count = parts[at.stage][at.replica], planned.batch.microbatches
    for beside, first in ((at.stage - 1, own.first), (at.stage + 1, own.end)):
        one = planned.profile.crossing[first] / planned.profile.profile_batch
        for _, (start, stop) in overlaps(mine, parts[beside]) if 0 <= beside < len(parts) else ():
            size, group = one * (stop - start), _group_size(full, at.stage, beside)
            for kind in ("send", "recv"):
                yield CollectiveCall("pipeline", kind, group, dtype, size, count, "P2P")


def _tied_exchanges(
    planned: PlannedStages, full: ResolvedPlan, at: RankPlace
) -> Iterator[CollectiveCall]:
    """Gradients of parameters that another stage has a copy of: each replica gets those of one of
    the other stage, of which the one with fewer replicas sends several times.
    """
    dtype, own = full.strategy.gradient_dtype, planned.stages[at.stage].replicas
    for other, parameters in tied_stages_of_profile(full, at.stage):
        size = planned.batch.gradient_factor * parameters
        replicas = planned.stages[other].replicas
        shared = own + replicas if full.strategy.pipeline.replicas else None
        group = shared or _group_size(full, at.stage, other)
        if sends := len(range(at.holder, replicas, own)):
            yield CollectiveCall("pipeline", "send", group, dtype, size, sends, "P2P")
        yield CollectiveCall("pipeline", "recv", group, dtype, size, 1, "P2P")


def _all_reduce(
    planned: PlannedStages, full: ResolvedPlan, at: RankPlace
) -> Iterator[CollectiveCall]:
    """Gradients of the stage over its replicas."""
    own = planned.stages[at.stage]
    if own.replicas > 1:
        size = planned.batch.gradient_factor * planned.parameter_bytes(own)
        dtype = full.strategy.gradient_dtype
        yield CollectiveCall("data", "all_reduce", own.replicas, dtype, size, 1, "REDUCE_GRAD")


def _group_size(full: ResolvedPlan, one: int, other: int) -> int:
    """Ranks of the process group over which two stages exchange."""
    pipeline = full.strategy.pipeline
    each = pipeline.replicas or [1] * pipeline.size
    return each[one] + each[other] if pair_groups(full) else sum(each)
