"""A pipeline schedule of which identical microbatches are replayed, not run.

The first microbatches of every stage run, and the last, whose backward ends the step. What lies
between repeats the one before it, which is checked: two recordings of an action must agree in every
event.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.parallel.pipeline.schedule_executor import MicrobatchState, ScheduleExecutor
from workbench.rehearsal.action_replayer import ActionRecorder, ActionReplayer
from workbench.rehearsal.running_actions import microbatch_of_each, running_microbatches
from workbench.schedules import Action
from workbench.schedules.action import matching

LAST = -1
Occurrences = dict[tuple[str, int, int], tuple[Any, int]]
"""(kind, stage, how many of these ran before in the step, or LAST) -> an action's recording, and
its microbatch.
"""


class NotAlikeError(Exception):
    """Microbatches that were to be replayed do not repeat each other."""


class ReplayingExecutor(ActionReplayer):
    """Runs some microbatches of a schedule and replays the others.

    Args:
        of: The session's executor, whose stages this one runs.
        recorder: Of the actions.
        run_first: Microbatches that run at the start of the first step.
        on_run: Called after each action of the model that has run.
    """

    def __init__(
        self,
        of: ScheduleExecutor,
        recorder: ActionRecorder,
        run_first: int,
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(of, recorder)
        self.on_run = on_run
        self._run_first = {True: run_first, False: run_first}
        """Of the next run, with gradients and without."""
        self.actions: dict[Hashable, list[Any]] = {}
        """What an action is recorded under -> its recordings."""
        self.occurrences: Occurrences = {}
        """Actions that ran in this run."""
        self._ran: Counter[tuple[str, int]] = Counter()
        """(kind, stage) -> how many of them."""
        self.is_replaying = False
        self._latest: dict[Hashable, int] = {}
        """What an action is recorded under -> the microbatch of its last recording."""
        self._compared: set[Hashable] = set()
        self.running: tuple[str, int, int] | None = None
        """(kind, stage, microbatch) of the action that runs now."""

    def _run(self, row: tuple[Action, ...], *arguments: Any) -> Tensor | None:
        trains = torch.is_grad_enabled()
        self.replays.clear()
        self._compared.clear()
        self.occurrences.clear()
        self._ran.clear()
        self._owners = list(microbatch_of_each(row))
        self._running, self._ends = running_microbatches(
            row, self._run_first[trains], self.table.stages
        )
        self._run_first[trains] = max(1, self._run_first[trains] - 1)
        self.is_replaying = not self._running.issuperset(self._owners)
        with self.recorder.schedule():
            return super()._run(row, *arguments)

    def _perform(self, at: int, action: Action, state: MicrobatchState, *arguments: Any) -> None:
        key = action.kind, action.stage, self._peer(action), torch.is_grad_enabled()
        if self._owners[at] not in self._running:
            return self._replay(key, action, state)
        read = _storages(self._read_last_by(action, state))
        self.recorder.begin()
        self.running = action.kind, action.stage, self._owners[at]
        super()._perform(at, action, state, *arguments)
        self.running = None
        self._keep(read, action)
        recording = self.recorder.end(self._boundary(action, state))
        self._note_occurrence(at, action, recording)
        if at not in self._ends:
            self.actions.setdefault(key, []).append(recording)
            self._latest[key] = self._owners[at]
            self._compared.discard(key)
        if action.is_compute:
            self.on_run()
        return None

    def _note_occurrence(self, at: int, action: Action, recording: Any) -> None:
        kind, stage = action.kind, action.stage
        number = LAST if at in self._ends else self._ran[kind, stage]
        self._ran[kind, stage] += 1
        self.occurrences[kind, stage, number] = recording, self._owners[at]

    def _keep(self, read: Sequence[weakref.ref[torch.UntypedStorage]], action: Action) -> None:
        """Note which of what a backward read last it keeps until W."""
        alive = [storage() for storage in read]
        kept = tuple(storage is not None for storage in alive)
        if action.kind != "I":
            return self._require_released(read, action)
        if self.keeps.setdefault(action.stage, kept) != kept and self.is_replaying:
            raise NotAlikeError(f"{action} keeps other gradients than another microbatch")
        for storage in alive:
            if storage is not None:
                self.recorder.keeps(storage)
        return None

    def _free_sent(self, state: MicrobatchState, at: int) -> None:
        sending = {id(x): x for _, x, _ in state.sending if isinstance(x, Tensor)}
        super()._free_sent(state, at)
        for _, x, _ in state.sending:
            sending.pop(id(x), None)
        released = _storages(sending.values())
        sending.clear()
        self._require_released(released, "what follows a send")

    def _replay(self, key: Hashable, action: Action, state: MicrobatchState) -> None:
        self._compare(key)
        ran = action.kind, action.stage, self._latest[key]
        self._say_again(self.actions[key][-1], ran, action, state)

    def _require_released(
        self, storages: Iterable[weakref.ref[torch.UntypedStorage]], what: object
    ) -> None:
        """Raise `NotAlikeError` where something else still holds what crossed to another stage."""
        if self.is_replaying and any(storage() is not None for storage in storages):
            raise NotAlikeError(f"{what} does not release what crossed between stages")

    def _compare(self, key: Hashable) -> None:
        """Raise `NotAlikeError` unless the last recording of an action repeats an earlier one."""
        if key in self._compared:
            return
        *before, last = self.actions.get(key, [None])
        if not any(last.is_like(one) for one in before):
            raise NotAlikeError(f"{key} does not repeat itself")
        self._compared.add(key)

    def _read_last_by(self, action: Action, state: MicrobatchState) -> list[Tensor | None]:
        """What a backward is the last to read of what crossed to its stage."""
        if action.kind not in ("B", "I"):
            return []
        place = action.stage, action.microbatch or 0
        return [state.output_gradients.get(place), state.inputs.get(place)]

    def _boundary(self, action: Action, state: MicrobatchState) -> Tensor | None:
        """The tensor that an action makes for another one."""
        table, key = self._boundary_place(action, state)
        return table.get(key)

    def _peer(self, action: Action) -> int:
        """Index of the rank that an action sends to or receives from; -1 for others."""
        if not action.is_p2p:
            return -1
        return self.table.home(matching(action).stage, action.microbatch)


def _storages(tensors: Iterable[Tensor | None]) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(x.untyped_storage()) for x in tensors if isinstance(x, Tensor)]
