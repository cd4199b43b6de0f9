"""Legality of a pipeline schedule: its microbatches, how many are in flight, and which replica of a
stage takes which.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from workbench.errors import Problem
from workbench.plan import schedule_table
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.rules.strategy.stage_rules import has_own_stages
from workbench.plan.schema import Pipeline
from workbench.schedules.generators import SCHEDULES, bounded_names
from workbench.schedules.round_robin import takers
from workbench.units import counted


def schedule(plan: ResolvedPlan) -> Iterator[Problem]:
    """A name or a table that is known, with chunks and microbatches that it takes."""
    pipeline, microbatches = plan.strategy.pipeline, plan.num_microbatches
    name, chunks, p = pipeline.schedule, pipeline.chunks, pipeline.size
    if name not in SCHEDULES and not name.endswith(".csv"):
        yield Problem(
            "strategy.pipeline.schedule",
            f"'{name}' is not known; legal: {', '.join(SCHEDULES)}, or a .csv",
        )
    elif broken := schedule_table.problem(plan):
        yield from broken.problems
    if (schedule := SCHEDULES.get(name)) is None:
        return
    low, most = schedule.min_chunks, schedule.max_chunks
    if chunks < low or (most is not None and chunks > most):
        yield Problem(
            "strategy.pipeline.chunks",
            f"is {chunks}, but schedule {name} takes {f'{low} or more' if most is None else low}",
        )
    if schedule.takes_microbatches(p, microbatches):
        return
    made = f"{plan.training.global_batch} makes {counted(microbatches, 'microbatch')}"
    if schedule.needs_multiple_of_ranks:
        needs = f", which schedule {name} needs in multiples of pipeline.size = {p}; legal: "
        legal = _batches(plan, legal_sizes.multiples(microbatches, p))
    else:
        each = schedule.min_microbatches_per_rank
        needs = f"; schedule {name} needs {each} for each pipeline rank; legal: at least "
        legal = _batches(plan, [each * p])
    yield Problem("training.global_batch", made + needs + legal)


def in_flight(plan: ResolvedPlan) -> Iterator[Problem]:
    """Microbatches in flight can be bounded where a warm-up of forwards decides them."""
    p, field = plan.strategy.pipeline, "strategy.pipeline.in_flight"
    if p.in_flight is None:
        return
    if p.schedule not in bounded_names():
        yield Problem(
            field,
            f"is {p.in_flight}, but schedule {p.schedule} keeps what its order asks for; legal: "
            f"null, or schedule {' or '.join(bounded_names())}",
        )
    elif p.size == 1:
        yield Problem(
            field,
            f"is {p.in_flight}, but pipeline.size is 1, and one stage runs each microbatch back "
            "before the next; legal: null, or pipeline.size 2 or more",
        )
    elif isinstance(p.in_flight, list):
        yield from _in_flight_by_stage(p, p.in_flight)
    if not has_own_stages(plan.strategy.stack):
        yield Problem(
            field,
            f"is {p.in_flight}, but how many {plan.strategy.stack} keeps is its own; legal: null, "
            "or strategy.stack: workbench",
        )


def _in_flight_by_stage(p: Pipeline, held: list[int]) -> Iterator[Problem]:
    """A stage gets its microbatches from the one before, which keeps them until they come back."""
    field = "strategy.pipeline.in_flight"
    if len(held) != p.size:
        yield Problem(
            field,
            f"{held} gives {counted(len(held), 'stage')}; legal: {p.size} numbers, or one for all "
            "stages",
        )
        return
    replicas = (p.replicas if p.is_round_robin else None) or [1] * p.size
    sums = [most * count for most, count in zip(held, replicas)]
    for stage, (before, after) in enumerate(pairwise(sums), 1):
        if after > before:
            own = " on all its replicas" if p.is_round_robin else ""
            yield Problem(
                field,
                f"{held} lets stage {stage} keep {after}{own}, but stage {stage - 1} keeps "
                f"{before}; legal: not above that of the stage before",
            )


def distribution(plan: ResolvedPlan) -> Iterator[Problem]:
    """Replicas of a stage that take microbatches in turn: they need a schedule for it, and a
    microbatch each.
    """
    p, field = plan.strategy.pipeline, "strategy.pipeline.distribution"
    if p.distribution == "split":
        return
    if p.replicas is None:
        yield Problem(
            field,
            "is round_robin, but no stage has replicas of its own; legal: split, or "
            "pipeline.replicas",
        )
        return
    if p.schedule not in takers():
        yield Problem(
            field,
            f"is round_robin, which schedule {p.schedule} has no order for; legal: split, or "
            f"schedule {', '.join(takers())}",
        )
    if plan.num_microbatches < (most := max(p.replicas)):
        yield Problem(
            "training.global_batch",
            f"{plan.training.global_batch} makes {counted(plan.num_microbatches, 'microbatch')}, "
            f"but the {most} replicas of stage {p.replicas.index(most)} take one each in turn; "
            f"legal: at least {_batches(plan, [most])}, or pipeline.distribution: split",
        )


def _batches(plan: ResolvedPlan, microbatches: list[int]) -> str:
    return ", ".join(str(m * plan.training.micro_batch * plan.sizes["data"]) for m in microbatches)
