"""A rank whose stages are like those of one that has been rehearsed: its own order of actions, each
of them replayed from there.

What an action does follows from its stage, and from whether it is the first or the last of its kind
in the step. What is in flight, and so the peak of memory, follows from the order, which is of each
pipeline rank alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workbench.engine.measure.recorded_collective import RecordedCollective
from workbench.engine.measure.step_sampler import StepSampler
from workbench.engine.session import Session
from workbench.parallel.pipeline.schedule_executor import MicrobatchState, Observer
from workbench.plan.rank_placement import rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import pair_groups, transport
from workbench.rehearsal.action_replayer import ActionReplayer
from workbench.rehearsal.memory_curve import Held, Stretch, difference
from workbench.rehearsal.operators.operator_trace import OperatorTrace
from workbench.rehearsal.replayed_memory import MOMENT, SCHEDULE, Around, ReplayedLiveBytes
from workbench.rehearsal.replayed_steps import LAST, NotAlikeError, Occurrences, ReplayingExecutor
from workbench.rehearsal.running_actions import last_actions
from workbench.schedules import Action, send_ends


class LabelledSampler(StepSampler):
    """Tells the counter of live bytes which action runs."""

    live: ReplayedLiveBytes

    @contextmanager
    def action(self, label: str, action: Action | None) -> Iterator[None]:
        """Count one action."""
        self.live.curve.label = label
        with super().action(label, action):
            yield
        self.live.curve.label = ""


@dataclass(frozen=True)
class StepRecording:
    """What a rank did in a step.

    Attributes:
        start: What it held as the step began.
        end: And as it ended.
        around: What it did before and after the actions of its schedule.
        calls: Its collectives there.
        actions: The actions that ran.
    """

    start: Held
    end: Held
    around: Sequence[Around]
    calls: Counter[RecordedCollective]
    actions: Occurrences

    @classmethod
    def of(cls, live: ReplayedLiveBytes, executor: ReplayingExecutor) -> StepRecording:
        """Of the step that has just ended."""
        return cls(
            live.start,
            difference(live.curve.held, {}),
            list(live.around),
            live.calls - live.scheduled_calls,
            dict(executor.occurrences),
        )


@dataclass
class RankRecording:
    """What a rank did, for others to follow.

    Attributes:
        session: Its session.
        executor: That ran it.
        building: Peak of the session's building, bytes by category.
        steps: Its steps.
        trace: Operators of the last one, where they are counted.
    """

    session: Session
    executor: ReplayingExecutor
    building: dict[str, int]
    steps: list[StepRecording] = field(default_factory=list)
    trace: OperatorTrace | None = None

    def following(self, plan: ResolvedPlan, rank: int) -> Iterator[tuple[LabelledSampler, Replays]]:
        """The steps of another rank, of which each is (its sampler, which actions were replayed how
        often).

        Raises:
            NotAlikeError: The microbatches of this rank are not alike, so that actions follow from
                more than their stage; or the other would hold something else after a step.
        """
        if not self.executor.is_replaying:
            raise NotAlikeError(f"microbatches of the rank that rank {rank} follows are not alike")
        if any([kind for kind, _ in step.around].count(SCHEDULE) > 1 for step in self.steps):
            raise NotAlikeError(
                "a step has a schedule of a reference's forward passes beside its own"
            )
        live = ReplayedLiveBytes(self.session.device)
        executor = FollowingExecutor(self.executor, live, plan, rank)
        for recorded in self.steps:
            sampler = LabelledSampler(self.session, None, live)
            sampler.stage = min(executor.followed)
            _replay_step(recorded, sampler, executor)
            yield sampler, executor.replays


Replays = Mapping[tuple[str, int, int], int]
"""(kind, stage, microbatch) of an action that ran -> how often it was replayed."""


class FollowingExecutor(ActionReplayer):
    """Replays every action of a rank, from those of one whose stages are alike.

    Args:
        of: Ran the other rank.
        recorder: Counts.
        plan: The plan.
        rank: The rank that follows.
    """

    def __init__(
        self, of: ReplayingExecutor, recorder: ReplayedLiveBytes, plan: ResolvedPlan, rank: int
    ) -> None:
        super().__init__(of, recorder)
        at, table = rank_place(plan, rank).stage, of.table
        self.axis, self.row = replace(of.axis, index=at), table.rows[at]
        self.followed = dict(zip(table.stages_of(at), table.stages_of(of.axis.index), strict=True))
        """Stage of this rank -> the one of the other rank that it is like."""
        self.keeps = {
            stage: of.keeps[other] for stage, other in self.followed.items() if other in of.keeps
        }
        if of.hooks.sends_end is not None:
            ends = send_ends(table, at, transport(plan.gpu), pair_groups(plan))
            self.hooks = replace(of.hooks, sends_end=ends)
        self.recorded: Occurrences = {}
        self._ends = last_actions(self.row)
        self._before: Counter[tuple[str, int]] = Counter()

    def follow(self, recorded: Occurrences, observe: Observer) -> None:
        """Replay the row from what the other rank did."""
        self.recorded, nothing = recorded, torch.empty(0)
        self.replays.clear()
        self._before.clear()
        self._run(self.row, nothing, nothing, None, observe)

    def _perform(self, at: int, action: Action, state: MicrobatchState, *_: Any) -> None:
        kind, stage = action.kind, self.followed[action.stage]
        number = LAST if at in self._ends else self._before[kind, stage]
        self._before[kind, stage] += 1
        while (kind, stage, number) not in self.recorded:
            number -= 1
        recording, microbatch = self.recorded[kind, stage, number]
        self._say_again(recording, (kind, stage, microbatch), action, state)


def _replay_step(
    recorded: StepRecording, sampler: LabelledSampler, executor: FollowingExecutor
) -> None:
    live = sampler.live
    live.pending.append((_held(difference(recorded.start, live.curve.held)), 0))
    live.restart()
    for kind, what in recorded.around:
        if kind == MOMENT:
            sampler.moment(what)
        elif kind == SCHEDULE:
            executor.follow(recorded.actions, sampler.action)
        elif kind:
            with sampler.action(kind, None):
                live.pending.append((Stretch.of(what), 0))
        else:
            live.pending.append((Stretch.of(what), 0))
    live.calls.update(recorded.calls)
    if sum(live.current.values()) and difference(live.curve.held, recorded.end):
        raise NotAlikeError("a rank that follows another one holds something else after a step")


def _held(held: Held) -> Stretch:
    return Stretch.of([(category, size, origin) for (category, origin), size in held.items()])
