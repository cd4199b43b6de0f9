"""Rehearse a plan: build and step the same session that a run would, rank by rank, without
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workbench.costmodel.compute.operator_roofline import Operator
from workbench.engine.measure.step_sampler import StepSampler
from workbench.engine.session import Session
from workbench.models.python_model import build_python_model
from workbench.models.torch_dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from workbench.models.traced.export_trace import one_module
from workbench.models.traced.value_dependence import place_and_error, value_dependent
from workbench.parallel.mesh import Mesh, build_mesh
from workbench.plan.model.four_bit_base import four_bit_notes
from workbench.plan.rank_placement import representative_ranks
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.planned_device import rehearsed_device
from workbench.profile import Profile, frame
from workbench.rehearsal.building import build_session, with_building
from workbench.rehearsal.fake_process_group import fake_tensors, fake_world, without_cached_results
from workbench.rehearsal.memory_curve import Held, MemoryCurve, difference, origin_rows
from workbench.rehearsal.module_tracker import ModuleTracker
from workbench.rehearsal.operators.operator_report import operator_report
from workbench.rehearsal.operators.operator_trace import traced_step
from workbench.rehearsal.rank_recording import LabelledSampler, RankRecording, StepRecording
from workbench.rehearsal.replayed_memory import ReplayedLiveBytes
from workbench.rehearsal.replayed_steps import NotAlikeError, ReplayingExecutor
from workbench.rehearsal.running_actions import RUN_FIRST, STEPS, RunCounter
from workbench.rehearsal.symmetric_ranks import followed_ranks
from workbench.units import GIB

BESIDE_ALLOCATED = "a GPU's context, workspaces and fragmentation, which an estimate counts"
"""Of its peak memory: a rehearsal counts what torch allocates."""
MOST_LIVING = 20
"""Rows of a rank that say what lives at its peak, and what leaks."""


@one_module()
def rehearse(
    plan: Plan,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    allow_code: bool = False,
    operators: bool = False,
    over_time: bool = False,
) -> Profile:
    """Peak memory by category and every collective of `ranks`; default: one of each
    pipeline stage, and of each kind of its replicas where they share a microbatch unevenly.

    With `operators` also every computing operator, in `notes`. With `over_time` the frame `levels`:
    memory over the second step; and in `notes` what lives at its peak, and what lives after it that
    did not live after the first (`leaks`), by module and action.

    The first step's peak includes that of building the session.

    Ranks that do the same are represented by the first of them. Of pipeline ranks whose stages are
    alike the first runs, and the others' schedules are replayed from it, but `over_time`. Raises
    `PlanError` where the engine cannot run the plan yet, ValueError for a rank outside the world.
    `progress(done, of)` is called after each action that runs.
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
    levels: list[dict[str, Any]] = []
    living: dict[str, list[dict[str, Any]]] = {"peak_allocations": [], "leaks": []}
    followed = {} if over_time else followed_ranks(plan, chosen)
    counter = RunCounter(plan, [rank for rank in chosen if rank not in followed], progress)
    recordings: dict[int, RankRecording] = {}
    for rank in chosen:
        found = _followed_steps(plan, rank, recordings.get(followed.get(rank, -1)))
        if found is None:
            on_run = (lambda: None) if rank in followed else counter.of_rank()
            found = rank_steps(plan, rank, operators, over_time, on_run=on_run)
        if rank in followed.values() and found.recording:
            recordings[rank] = found.recording
        head = {"run": plan.name, "source": "rehearsed", "rank": rank}
        memory += [head | row for row in found.memory]
        collectives += [head | row for row in found.collectives]
        levels += [head | row for row in found.levels]
        for name, rows in found.living.items():
            living[name] += [{"rank": rank, **row} for row in rows]
        if counted is not None:
            counted[rank] = found.operators
    counter.end()
    return Profile(
        plan.name,
        "rehearsed",
        plan.world_size,
        memory=frame("memory", memory),
        collectives=frame("collectives", collectives),
        levels=frame("levels", levels),
        representative=_stand_ins(representative, chosen),
        capacity_bytes=int(plan.gpu.memory_gib * GIB),
        notes=_notes(plan, counted) | (living if over_time else {}),
    )


def _notes(plan: ResolvedPlan, counted: dict[int, Counter[Operator]] | None) -> dict[str, Any]:
    notes: dict[str, Any] = four_bit_notes(plan)
    if plan.gpu.device != "cpu":
        notes["left_out"] = [BESIDE_ALLOCATED]
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


def python_model(plan: Plan) -> nn.Module | None:
    """The module of a plan whose model is code, without bytes. Built outside the fake mode: copying
    a fake tensor, as torch's own layers do, would copy its mode.
    """
    if plan.code is None:
        return None
    with torch.device("meta"):
        return build_python_model(plan.code, plan.training.seed)


@dataclass(frozen=True)
class RankSteps:
    """What was seen of a rank's steps.

    Attributes:
        memory: Rows of the memory frame; the first step's peak includes that of the building.
        collectives: Rows of the collectives frame.
        operators: Of the last step, where they are asked for.
        levels: Rows of the levels frame of the last step, where they are asked for.
        living: Then also what lives at its peak, and what it leaves behind that the step before
            did not.
        recording: For ranks that do the same in another order.
    """

    memory: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    operators: Counter[Operator] = field(default_factory=Counter)
    levels: list[dict[str, Any]] = field(default_factory=list)
    living: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    recording: RankRecording | None = None

    def add(self, step: int, sampler: StepSampler, building: dict[str, int] | None) -> None:
        """Add a step, before the next one begins."""
        rows = sampler.memory_rows()
        rows = rows if building is None else with_building(rows, building, sampler.stage)
        self.memory.extend({"step": step, **row} for row in rows)
        self.collectives.extend({"step": step, **row} for row in sampler.collective_rows())

    def add_levels(self, curve: MemoryCurve, before: Held) -> None:
        """Add the curve of the last step; `before` it what was held at the end of the first."""
        self.levels.extend({"step": STEPS - 1, **row} for row in curve.rows())
        self.living["peak_allocations"] = origin_rows(curve.at_peak)[:MOST_LIVING]
        self.living["leaks"] = origin_rows(difference(curve.held, before))[:MOST_LIVING]


def rank_steps(
    plan: ResolvedPlan,
    rank: int,
    operators: bool = False,
    over_time: bool = False,
    run_first: Sequence[int] = RUN_FIRST,
    on_run: Callable[[], None] = lambda: None,
) -> RankSteps:
    """Two steps of one rank.

    Args:
        plan: The plan.
        rank: The rank.
        operators: Whether to count the operators of the second step.
        over_time: Whether to follow memory over it, by module.
        run_first: How many microbatches run before others are replayed: the first of these numbers
            after which they are alike.
        on_run: Called after each action that has run.

    Raises:
        PlanError: The user's module asks for values, which fake tensors do not have.
    """
    with fake_world(rank, plan.world_size):
        mesh = build_mesh(plan, rank)
        for first in run_first:
            try:
                with suppress(NotAlikeError):
                    return _steps(plan, mesh, (operators, over_time), first, on_run)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise value_dependent("rehearsed", place_and_error(error)) from error
    raise AssertionError("microbatches that all run need not be alike")


def _steps(
    plan: ResolvedPlan,
    mesh: Mesh,
    wanted: tuple[bool, bool],
    run_first: int,
    on_run: Callable[[], None],
) -> RankSteps:
    operators, over_time = wanted
    device, model = rehearsed_device(plan.gpu.device), python_model(plan)
    with fake_tensors() as mode:
        sharded = plan.strategy.data.zero == 3
        with without_cached_results(mode) if sharded else nullcontext():
            session, building = build_session(plan, mesh, model)
        share, live = session.share, ReplayedLiveBytes(device)
        executor = ReplayingExecutor(session.executor, live, run_first, on_run)
        session.executor = executor
        recording = RankRecording(session, executor, building)
        found = RankSteps(recording=recording)
        shape = (share.microbatches, share.sequences, plan.training.sequence_length)
        batch = [torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2)]
        before: Held = {}
        with _followed(session, live) if over_time else nullcontext():
            for step in range(STEPS):
                last = step == STEPS - 1
                sampler = LabelledSampler(session, None, live)
                live.curve.is_drawn = over_time and last
                with sampler.step(batch):
                    if operators and last:
                        recording.trace = traced_step(session, step, batch, sampler, executor)
                        found.operators.update(recording.trace.of_step())
                    else:
                        session.step(step, batch[0], batch[1], sampler)
                found.add(step, sampler, building if step == 0 else None)
                recording.steps.append(StepRecording.of(live, executor))
                before = before if last else dict(live.curve.held)
        if over_time:
            found.add_levels(live.curve, before)
    return found


def _followed_steps(
    plan: ResolvedPlan, rank: int, recording: RankRecording | None
) -> RankSteps | None:
    """The steps of a rank that follows the recorded one; None where it does not."""
    if recording is None:
        return None
    found = RankSteps()
    with suppress(NotAlikeError):
        for step, (sampler, replays) in enumerate(recording.following(plan, rank)):
            found.add(step, sampler, recording.building if step == 0 else None)
            if recording.trace and step == STEPS - 1:
                found.operators.update(recording.trace.of_replays(replays))
        return found
    return None


@contextmanager
def _followed(session: Session, live: ReplayedLiveBytes) -> Iterator[None]:
    """A context in which allocations have their module."""
    tracker = ModuleTracker(session.part.stages.values())
    live.module = tracker.current
    with tracker.following():
        yield


def with_microbatches(plan: ResolvedPlan, number: int) -> ResolvedPlan:
    """The plan with another number of microbatches a step."""
    return plan.with_fields(
        **{"training.global_batch": number * plan.training.micro_batch * plan.sizes["data"]}
    )
