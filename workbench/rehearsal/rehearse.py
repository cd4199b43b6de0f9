"""Rehearse a plan: build and step the same session that a run would, rank by rank, without
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from workbench.costmodel.compute.operator_roofline import Operator
from workbench.engine.measure.step_sampler import StepSampler
from workbench.engine.session import rank_share
from workbench.models.python_model import build_python_model
from workbench.parallel.mesh import Mesh, build_mesh
from workbench.plan.rank_placement import rank_place, representative_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schedule_table import stages_in_flight
from workbench.plan.schema import Plan
from workbench.planned_device import rehearsed_device
from workbench.profile import Profile, frame
from workbench.rehearsal.building import build_session, with_building
from workbench.rehearsal.fake_process_group import fake_tensors, fake_world, without_cached_results
from workbench.rehearsal.operator_report import operator_report
from workbench.rehearsal.operator_trace import OperatorTrace, traced_step
from workbench.units import GIB

STEADY = 2
"""Microbatches rehearsed beyond those that fill the pipeline."""
STEPS = 2
"""The first step, and the first of the steady state."""


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    allow_code: bool = False,
    operators: bool = False,
) -> Profile:
    """Peak memory by category and every collective of `ranks`; default: one of each
    pipeline stage, and of each kind of its replicas where they share a microbatch unevenly.

    With `operators` also every computing operator, in `notes`.

    The first step's peak includes that of building the session.

    Ranks that do the same are represented by the first of them. Raises
    `PlanError` where the engine cannot run the plan yet, ValueError for a rank outside the world.
    `progress(done, of)` is called after each rank.
    """
    plan = plan.resolve()
    require(plan, "rehearse", allow_code)
    representative = representative_ranks(plan)
    chosen = sorted(set(representative.values()) if ranks is None else set(ranks))
    for rank in chosen:
        if not 0 <= rank < plan.world_size:
            raise ValueError(f"--ranks: {rank} is not one of 0 to {plan.world_size - 1}")
    memory: list[dict[str, Any]] = []
    collectives: list[dict[str, Any]] = []
    counted: dict[int, Counter[Operator]] | None = {} if operators else None
    for done, rank in enumerate(chosen, 1):
        _rehearse_rank(plan, rank, memory, collectives, counted)
        if progress:
            progress(done, len(chosen))
    return Profile(
        plan.name,
        "rehearsed",
        plan.world_size,
        memory=frame("memory", memory),
        collectives=frame("collectives", collectives),
        representative=_stand_ins(representative, chosen),
        capacity_bytes=int(plan.gpu.memory_gib * GIB),
        notes=_notes(plan, counted),
    )


def _notes(plan: ResolvedPlan, counted: dict[int, Counter[Operator]] | None) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if not plan.code and plan.shape.unmodelled:
        notes["not_modelled"] = plan.shape.unmodelled
    if counted is not None:
        notes["operators"] = operator_report(plan, counted)
    return notes


def _stand_ins(representative: dict[int, int], chosen: list[int]) -> dict[int, int]:
    """Rank -> the rehearsed rank that does the same: itself, or the first that does; ranks that
    have none left out.

    `representative` maps ranks that do the same to one of them.
    """
    first: dict[int, int] = {}
    for rank in chosen:
        first.setdefault(representative[rank], rank)
    own = {rank: rank for rank in chosen}
    return {rank: own.get(rank, first[rep]) for rank, rep in representative.items() if rep in first}


def with_fewer_microbatches(plan: ResolvedPlan, stage: int) -> ResolvedPlan:
    """The plan with as few microbatches as show all that this stage does: its pipeline fills, runs
    and drains.

    With early backward a stage holds as many microbatches as its warm-up has, however many there
    are, and every further one repeats what the former did. GPipe holds them all, and is not
    shortened; nor are other schedules, nor is ZeRO-3 with a norm behind the embedding, or of a
    model that is code, which backward leaves gathered for the next microbatch.
    """
    left_whole = plan.strategy.data.zero == 3 and bool(plan.code or plan.shape.embedding_norm)
    held = stages_in_flight(plan)
    if held is None or left_whole:
        return plan
    # One more than the stage before keeps, whose outputs may arrive ahead.
    enough = max(held[stage] + STEADY, held[max(0, stage - 1)] + 1)
    if plan.strategy.pipeline.is_round_robin:  # every replica has one, those of a stage as many
        replicas = plan.strategy.pipeline.replicas or []
        own = replicas[stage]
        enough = max(enough + (own - 1) * STEADY, max(replicas))
        enough = -(-enough // own) * own
    return with_microbatches(plan, min(plan.num_microbatches, enough))


def python_model(plan: Plan) -> nn.Module | None:
    """The module of a plan whose model is code, without bytes. Built outside the fake mode: copying
    a fake tensor, as torch's own layers do, would copy its mode.
    """
    if plan.code is None:
        return None
    with torch.device("meta"):
        return build_python_model(plan.code, plan.training.seed)


def _rehearse_rank(
    plan: ResolvedPlan,
    rank: int,
    memory: list[dict[str, Any]],
    collectives: list[dict[str, Any]],
    counted: dict[int, Counter[Operator]] | None,
) -> None:
    """Two steps of one rank; operators of the second are `counted`, where they are asked for."""
    with fake_world(rank, plan.world_size):
        mesh = build_mesh(plan, rank)
        few = with_fewer_microbatches(plan, rank_place(plan, rank).stage)
        seen, of = (rank_share(each, mesh).microbatches for each in (few, plan))
        traces: list[OperatorTrace] | None = None if counted is None else []
        samplers, building = _steps(few, mesh, of, traces)
        if counted is not None and traces:
            counted[rank] = traces[-1].of_step(seen, of)
        calls = _calls_of_whole_steps(few, mesh, samplers, of)
        for step, (sampler, rows) in enumerate(zip(samplers, calls)):
            head = {"run": plan.name, "source": "rehearsed", "rank": rank, "step": step}
            held = sampler.memory_rows()
            held = with_building(held, building, sampler.stage) if step == 0 else held
            memory += [head | row for row in held]
            collectives += [head | row for row in rows]


def _calls_of_whole_steps(
    few: ResolvedPlan, mesh: Mesh, samplers: Sequence[StepSampler], of: int
) -> list[list[dict[str, Any]]]:
    """Collectives of each whole step, from `samplers` that saw a `few` of the `of` microbatches
    that the rank takes.

    Below ZeRO-2 the action of a call says whether microbatches repeat it; beyond, what one
    microbatch more adds.
    """
    seen = rank_share(few, mesh).microbatches
    if few.strategy.data.zero < 2:
        return [sampler.collective_rows(seen, of) for sampler in samplers]
    calls = [sampler.collective_rows() for sampler in samplers]
    if seen == of:
        return calls
    longer, _ = _steps(with_microbatches(few, seen + 1), mesh, of)
    return [grown(rows, more.collective_rows(), of - seen) for rows, more in zip(calls, longer)]


def _steps(
    plan: ResolvedPlan, mesh: Mesh, microbatches: int, traces: list[OperatorTrace] | None = None
) -> tuple[list[StepSampler], dict[str, int]]:
    """What was seen of the steps of a rank, which holds the tokens of so many `microbatches`; the
    peak of building its session, by category. Operators of the last step are added to `traces`.
    """
    device, model = rehearsed_device(plan.gpu.device), python_model(plan)
    found = []
    with fake_tensors() as mode:
        with without_cached_results(mode):
            session, building = build_session(plan, mesh, model)
        shape = (microbatches, session.share.sequences, plan.training.sequence_length)
        batch = [torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2)]
        for step in range(STEPS):
            found.append(StepSampler(session, None))
            with found[-1].step(batch):
                if traces is None or step < STEPS - 1:
                    session.step(step, batch[0], batch[1], found[-1])
                else:
                    traces.append(traced_step(session, step, batch, found[-1]))
    return found, building


def grown(
    rows: list[dict[str, Any]], longer: list[dict[str, Any]], more: int
) -> list[dict[str, Any]]:
    """Collectives of a step of `more` further microbatches than `rows`: each adds what `longer`, of
    one more, has.
    """
    few, many = (
        {tuple((k, v) for k, v in row.items() if k != "count"): row["count"] for row in x}
        for x in (rows, longer)
    )
    counts = {
        key: few.get(key, 0) + more * (many.get(key, 0) - few.get(key, 0))
        for key in {**few, **many}
    }
    return [{**dict(key), "count": count} for key, count in counts.items() if count]


def with_microbatches(plan: ResolvedPlan, number: int) -> ResolvedPlan:
    """The plan with another number of microbatches a step."""
    return plan.with_fields(
        **{"training.global_batch": number * plan.training.micro_batch * plan.sizes["data"]}
    )
