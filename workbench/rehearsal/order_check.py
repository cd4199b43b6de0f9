"""Check that no rank can hang: the order of every rank's collectives and P2P calls, replayed.

Each rank's session is built and stepped on fake tensors, as a rehearsal does, and its calls are
recorded. The traces of all ranks are then replayed on the strictest transport (`strict_replay`).
In a large world one rank of each class of equal ranks is traced, the others' calls follow from it,
and ranks drawn by seed are traced as well and compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch

from workbench.parallel.mesh import Mesh, build_mesh, every_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schedule_table import drawn
from workbench.plan.schema import Plan
from workbench.planned_device import rehearsed_device
from workbench.rehearsal.building import build_session
from workbench.rehearsal.call_trace import STORE, Call, CallRecorder, changed
from workbench.rehearsal.fake_process_group import fake_tensors, fake_world
from workbench.rehearsal.rehearse import python_model, with_microbatches
from workbench.rehearsal.replayed_steps import NotAlikeError, ReplayingExecutor
from workbench.rehearsal.running_actions import RUN_FIRST
from workbench.rehearsal.strict_replay import replay
from workbench.rehearsal.symmetric_ranks import Axes, rank_classes, translated

TRACED_WHOLE = 16
"""Ranks of the largest world of which every rank is traced."""
DRAWN = 32
"""Ranks drawn of a larger world, whose traces are compared with what symmetry says of them."""


@dataclass(frozen=True)
class OrderCheck:
    """What was found.

    Attributes:
        world_size: Ranks of the plan.
        traced: Ranks whose calls were recorded; the others' follow by symmetry.
        calls: Calls of all ranks.
        microbatches: Microbatches of a traced step.
        problems: In words; empty where no rank can hang.
    """

    world_size: int
    traced: int
    calls: int
    microbatches: int
    problems: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"problems": list(self.problems)}


def check_order(
    plan: Plan,
    progress: Callable[[int, int], None] | None = None,
    allow_code: bool = False,
    seed: int = 0,
) -> OrderCheck:
    """Trace and replay a plan's ranks.

    Args:
        plan: The plan.
        progress: Called with (ranks traced, ranks to trace).
        allow_code: Build a model that is Python.
        seed: Of the ranks drawn in a world of more than `TRACED_WHOLE`.

    Raises:
        PlanError: The plan is illegal, or this version cannot rehearse it.
    """
    full = plan.resolve()
    require(full, "rehearse", allow_code)
    full = _with_few_microbatches(full)
    meshes = every_mesh(full)
    classes = rank_classes(full, meshes)
    ranks, compared = _chosen(classes, seed)
    traces: dict[int, list[Call]] = {}
    for done, rank in enumerate(sorted({*ranks, *compared}), 1):
        traces[rank] = trace(full, rank)
        if progress:
            progress(done, len({*ranks, *compared}))
    every, problems = _every_trace(meshes, classes, ranks, traces)
    problems += replay(every)
    calls = sum(map(len, every.values()))
    return OrderCheck(full.world_size, len(traces), calls, full.num_microbatches, tuple(problems))


def _with_few_microbatches(plan: ResolvedPlan) -> ResolvedPlan:
    """The plan with as many microbatches as fill its pipeline and repeat its pattern."""
    p = plan.strategy.pipeline
    enough = 2 * (sum(p.replicas or []) if p.is_round_robin else p.size)
    if plan.num_microbatches <= enough or drawn(plan) is not None:  # a table has its number
        return plan
    return with_microbatches(plan, enough)


def _chosen(classes: Sequence[tuple[int, ...]], seed: int) -> tuple[list[int], list[int]]:
    """(one rank of each class, ranks drawn to compare); all ranks of a small world."""
    world = range(len(classes))
    if len(world) <= TRACED_WHOLE:
        return list(world), []
    first: dict[tuple[int, ...], int] = {}
    for rank, its_class in enumerate(classes):
        first.setdefault(its_class, rank)
    return list(first.values()), random.Random(seed).sample(world, min(DRAWN, len(world)))


def _every_trace(
    meshes: Sequence[Axes],
    classes: Sequence[tuple[int, ...]],
    ranks: list[int],
    traces: dict[int, list[Call]],
) -> tuple[dict[int, list[Call]], list[str]]:
    """(rank -> its calls, of the whole world; ranks that symmetry is wrong about)."""
    if len(meshes) <= TRACED_WHOLE:
        return traces, []
    example_of = {classes[rank]: rank for rank in ranks}
    examples = {rank: changed(traces[rank], _with_any_rows) for rank in ranks}
    every, problems = {}, []
    for rank, axes in enumerate(meshes):
        example = example_of[classes[rank]]
        follows = translated(examples[example], meshes[example], axes, example, rank)
        own = changed(traces[rank], _with_any_rows) if rank in traces else follows
        if (wrong := _first_difference(own, follows)) is not None:
            problems.append(f"rank {rank} does not call what rank {example} does: {wrong}")
        every[rank] = own
    return every, problems


def _first_difference(calls: list[Call], expected: list[Call]) -> str | None:
    """The first call in which two traces differ, in words."""
    for number, (one, other) in enumerate(zip_longest(calls, expected), 1):
        if one is not other and one != other:
            return f"call {number} is {one or 'none'}, not {other or 'none'}"
    return None


def _with_any_rows(call: Call) -> Call:
    """An expert has the rows that there are: how many go to which rank may differ by one."""
    return call if call.kind != "all_to_all" else call._replace(numel=0, sent=(), received=())


def trace(plan: ResolvedPlan, rank: int) -> list[Call]:
    """The calls of one rank: making its groups, a step or two, and an evaluation. Microbatches that
    repeat each other are replayed.
    """
    for run_first in RUN_FIRST:
        with suppress(NotAlikeError):
            return _trace(plan, rank, run_first)
    raise AssertionError("microbatches that all run need not be alike")


def _trace(plan: ResolvedPlan, rank: int, run_first: int) -> list[Call]:
    recorder = CallRecorder()
    with fake_world(rank, plan.world_size):
        with recorder.recording():
            mesh = build_mesh(plan, rank)
        recorder.device = rehearsed_device(plan.gpu.device)
        model = python_model(plan)
        with fake_tensors():
            session, _ = build_session(plan, mesh, model)
            session.executor = ReplayingExecutor(session.executor, recorder, run_first)
            share, length = session.share, plan.training.sequence_length
            shape = (share.microbatches, share.sequences, length)
            batch = [torch.zeros(shape, dtype=torch.long, device=recorder.device) for _ in range(2)]
            with recorder.recording():
                # ZeRO-3 gathers in the order that its first step found.
                for step in range(2 if plan.strategy.data.zero == 3 else 1):
                    session.step(step, batch[0], batch[1])
                session.evaluate(batch[0], batch[1])
        names = _group_names(mesh)
    names[STORE] = STORE
    return changed(recorder.calls, lambda call: call._replace(group=names.get(call.group, "world")))


def _group_names(mesh: Mesh) -> dict[str, str]:
    """torch's name of a process group -> the axis that it is of, the same on every rank."""
    names: dict[str, str] = {}
    for axis in mesh.axes.values():
        if axis.group is not None:
            names.setdefault(str(axis.group.group_name), axis.name)
        for peer, group in axis.pair_groups.items():
            low, high = sorted((axis.index, peer))
            names[str(group.group_name)] = f"{axis.name} {low}-{high}"
    return names
