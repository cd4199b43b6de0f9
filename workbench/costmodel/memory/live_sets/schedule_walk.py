"""What is live on a rank, action by action of its schedule's table, as
`parallel/pipeline/schedule_executor.py` holds and frees it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from workbench.costmodel.operators.allocation_tape import LiveSet
from workbench.costmodel.operators.stage_pass import StagePass
from workbench.schedules import Action
from workbench.schedules.table import Row

StageMicrobatch = tuple[int, int]
Held = tuple[str, int, int] | Action
"""(what, stage, microbatch) that lives from one action to another, or the send of it."""


@dataclass
class ScheduleWalk:
    """A rank's walk along its row of a lowered table."""

    row: Row
    sends_end: Mapping[Action, int]
    """Send -> index in the row of the action before which what it sends is freed."""
    passes: Mapping[int, StagePass]
    """Stage of this rank -> a microbatch through it."""
    split_passes: Mapping[int, StagePass]
    """The same where backward is split."""
    stages: int
    """Of the pipeline."""
    boundary: float
    """Bytes of what passes between two stages."""
    largest: dict[str, LiveSet] = field(default_factory=dict)
    """Phase of `memory/live_sets` -> its largest live set in a step."""
    first_forward: LiveSet = field(default_factory=dict)
    """What the first forward of a step leaves."""
    _held: dict[Held, LiveSet] = field(default_factory=dict)
    _live: dict[str, float] = field(default_factory=partial(defaultdict, float))

    def run(self) -> ScheduleWalk:
        """Take every action."""
        for at, action in enumerate(self.row):
            for send in [x for x in self._held if isinstance(x, Action)]:
                if self.sends_end[send] <= at:
                    self._free(send)
            if action.microbatch is not None:  # all but REDUCE_GRAD, which is of a stage
                _TAKE[action.kind](self, action, action.stage, action.microbatch)
        return self

    def _forward(self, action: Action, stage: int, microbatch: int) -> None:
        self._free(("input", stage, microbatch))
        self._see(self.passes[stage].forward)
        self._hold(("kept", stage, microbatch), self.passes[stage].kept)
        if stage + 1 < self.stages:
            # The next stage may be on this rank (V schedules): its input needs no transfer.
            kept = ("input" if stage + 1 in self.passes else "output"), stage + 1, microbatch
            self._hold(kept, {"activations": self.boundary})
        if not self.first_forward:
            self.first_forward = dict(self._live)

    def _backward(self, action: Action, stage: int, microbatch: int) -> None:
        """B, or I."""
        one = (self.split_passes if action.kind == "I" else self.passes)[stage]
        self._free(("kept", stage, microbatch))
        self._free(("gradient", stage, microbatch))
        self._see(one.backward)
        self._hold(("deferred", stage, microbatch), one.deferred)
        if stage > 0:
            gradient = "gradient", stage - 1, microbatch
            self._hold(gradient, {"communication": self.boundary})

    def _weight_gradients(self, action: Action, stage: int, microbatch: int) -> None:
        self._free(("deferred", stage, microbatch))
        self._see(self.split_passes[stage].weights)

    def _send(self, action: Action, stage: int, microbatch: int) -> None:
        what = ("output", stage + 1) if action.kind == "SEND_F" else ("gradient", stage - 1)
        self._hold(action, self._free((*what, microbatch)))

    def _receive(self, action: Action, stage: int, microbatch: int) -> None:
        what, category = _RECEIVED[action.kind]
        self._hold((what, stage, microbatch), {category: self.boundary})

    def _hold(self, what: Held, size: LiveSet) -> None:
        self._held[what] = size
        for category, each in size.items():
            self._live[category] += each

    def _free(self, what: Held) -> LiveSet:
        size = self._held.pop(what, {})
        for category, each in size.items():
            self._live[category] -= each
        return size

    def _see(self, phases: Mapping[str, LiveSet]) -> None:
        """An action's phases, beside all that is held."""
        for name, own in phases.items():
            most = sum(self.largest.get(name, {}).values())
            if sum(own.values()) + sum(self._live.values()) > most:
                categories = {*own, *self._live}
                live = {x: own.get(x, 0.0) + self._live.get(x, 0.0) for x in categories}
                self.largest[name] = live


_TAKE = {
    "F": ScheduleWalk._forward,
    **dict.fromkeys("BI", ScheduleWalk._backward),
    "W": ScheduleWalk._weight_gradients,
    **dict.fromkeys(("SEND_F", "SEND_B"), ScheduleWalk._send),
    **dict.fromkeys(("RECV_F", "RECV_B"), ScheduleWalk._receive),
}
_RECEIVED = {"RECV_F": ("input", "activations"), "RECV_B": ("gradient", "communication")}
