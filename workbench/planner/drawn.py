"""A schedule that a user drew: read from its CSV, and held against the plan that names it."""

from __future__ import annotations

from workbench.plan.errors import refuse
from workbench.plan.schema import Plan
from workbench.schedules import Table, read_csv, validate

FIELD = "strategy.pipeline.schedule"


def drawn(plan: Plan) -> Table | None:
    """The table that a complete plan's schedule names; None where it is a named one.

    Raises `PlanError` where the file cannot be read, is no valid schedule, or is one of other ranks, stages or
    microbatches.
    """
    pipeline = plan.strategy.pipeline
    if not pipeline.schedule.endswith(".csv"):
        return None
    try:
        table = read_csv(pipeline.schedule)
        validate(table)
    except (OSError, ValueError) as error:
        raise refuse(FIELD, f"'{pipeline.schedule}' cannot be used: {error}") from None
    wanted = (pipeline.size, pipeline.size * pipeline.chunks, plan.num_microbatches)
    has = (table.ranks, table.stages, table.microbatches)
    for what, count, want in zip(("ranks", "stages", "microbatches"), has, wanted):
        if count != want:
            raise refuse(FIELD, f"'{pipeline.schedule}' has {count} {what}, the plan {want}; legal: a table of "
                         f"{wanted[0]} ranks, {wanted[1]} stages and {wanted[2]} microbatches")  # fmt: skip
    return table
