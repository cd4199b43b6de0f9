"""Replays what actions of a schedule did in place of running them, for the microbatches and ranks
whose actions are like others that ran.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.parallel.pipeline.schedule_executor import (
    MicrobatchState,
    ScheduleExecutor,
    StageMicrobatch,
)
from workbench.parallel.pipeline.stage_transfers import Transfer
from workbench.schedules import Action
from workbench.schedules.action import SENDS


class ActionRecorder(Protocol):
    """Records what actions do, and says it again."""

    def schedule(self) -> AbstractContextManager[None]:
        """A context around all actions."""

    def begin(self) -> None:
        """An action begins."""

    def end(self, boundary: Tensor | None) -> Any:
        """It has ended; its recording."""

    def replay(self, recording: Any, kept: list[Any]) -> object | None:
        """Say again what was recorded, which releases what is `kept`; what stands for the boundary
        that it makes.
        """

    def keep(self, boundary: Any) -> None:
        """A split backward keeps what crossed to its stage."""

    def keeps(self, storage: torch.UntypedStorage) -> None:
        """The same of a microbatch that runs."""


class ActionReplayer(ScheduleExecutor):
    """Follows the tensors that cross between stages where actions are replayed.

    Args:
        of: The executor whose stages, table and place in the pipeline these are.
        recorder: Of the actions.
    """

    def __init__(self, of: ScheduleExecutor, recorder: ActionRecorder) -> None:
        self.__dict__.update(vars(of))
        self.recorder = recorder
        self.replays: Counter[tuple[str, int, int]] = Counter()
        """(kind, stage, microbatch that ran) -> how often its action was replayed."""
        self.keeps: dict[int, tuple[bool, ...]] = {}
        """Stage -> whether its I keeps the output gradient, and the input, until W."""
        self._kept: dict[StageMicrobatch, list[Any]] = {}
        """What replayed microbatches keep."""

    def _say_again(
        self, recording: Any, ran: tuple[str, int, int], action: Action, state: MicrobatchState
    ) -> None:
        """Replay the recording of an action that `ran`, as (kind, stage, microbatch), for another
        one.
        """
        self.replays[ran] += 1
        place = action.stage, action.microbatch or 0
        ended = self._ended(action, state)
        kept = self._kept.pop(place, []) if action.kind == "W" else []
        boundary: Any = self.recorder.replay(recording, kept)
        if action.kind in SENDS:
            x, _ = self._outgoing(action, state)
            state.sending.append((Transfer(()), x, action))
        if boundary is not None:
            table, key_of = self._boundary_place(action, state)
            table[key_of] = boundary
        if action.kind == "I":
            self._kept[place] = [x for x, kept in zip(ended, self.keeps[action.stage]) if kept]
            for x in self._kept[place]:
                self.recorder.keep(x)

    def _ended(self, action: Action, state: MicrobatchState) -> list[Any]:
        """What an action is the last to read of what crossed to its stage, taken out of `state`."""
        place = action.stage, action.microbatch or 0
        found: list[Any] = []
        if action.kind in ("B", "I"):
            found.append(state.output_gradients.pop(place, None))
        if found or (action.kind == "F" and not torch.is_grad_enabled()):
            found.append(state.inputs.pop(place, None))
        return [x for x in found if x is not None]

    def _boundary_place(
        self, action: Action, state: MicrobatchState
    ) -> tuple[dict[StageMicrobatch, Tensor], StageMicrobatch]:
        """(where the executor keeps it, under which key)."""
        stage, microbatch = place = action.stage, action.microbatch or 0
        if action.kind == "RECV_F":
            return state.inputs, place
        if action.kind == "RECV_B":
            return state.output_gradients, place
        if action.kind in ("B", "I"):
            return state.output_gradients, (stage - 1, microbatch)
        if action.kind != "F" or stage == self.table.stages - 1:
            return {}, place
        if self.table.home(stage + 1, microbatch) == self.axis.index:
            return state.inputs, (stage + 1, microbatch)
        return state.outputs, place
