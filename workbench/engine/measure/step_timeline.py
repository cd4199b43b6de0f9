"""The timeline of a step: spans of its actions and of its waits, which follow each other without a
gap.

A wait for a received tensor or for a collective is a span of its own, `WAIT_RECV`,
`WAIT_ALL_REDUCE` and so on: what a bubble or exposed communication takes is not drawn as compute.
The time is the device's: on CUDA that of events on the stream, read once the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.measure.collective_watch import CollectiveWatch, TimedCall
from workbench.engine.measure.step_sampler import (
    ActionTracker,
    as_reported,
    axis_groups,
    reported_axes,
)
from workbench.engine.session import Session
from workbench.schedules import Action

OTHER = "OTHER"
"""Parts of a step that are no action."""
WAIT = "WAIT"
SHORTEST_WAIT = 1e-4
"""Share of the step from which a wait is a span; shorter ones belong to their action, and what is
shorter before a wait to that.
"""


@dataclass(frozen=True)
class Mark:
    """Where a span begins; it ends at the next mark."""

    name: str
    action: Action | None
    moment: Any
    within: str
    """Name of the action that a wait interrupts."""


@dataclass(frozen=True)
class Span:
    """Seconds from the step's start."""

    name: str
    action: Action | None
    start: float
    end: float


class StepTimeline(ActionTracker):
    """Times one step, and its collectives, without a dispatch mode.

    Args:
        session: The session whose step is timed.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.stage = session, session.first_stage
        self.clock = DeviceClock(session.device)
        self.axis_of = reported_axes(session.mesh)
        self.collectives = CollectiveWatch(
            self.clock.cuda, self._kind, self.begin_wait, self.end_wait
        )
        self._marks: list[Mark] = []
        self._now: tuple[str, Action | None] = (OTHER, None)
        self._waiting = False
        self._at_start = False
        """Whether the action has done nothing yet but wait for its input."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around one step; on CUDA its end synchronises."""
        groups = [group for group, _ in axis_groups(self.session.mesh)]
        with self.collectives.watching([*groups, *_world()]):
            self._mark(OTHER)
            yield
            self._mark(OTHER)
        self.clock.synchronize()
        self.collectives.resolve()

    @contextmanager
    def action(self, label: str, action: Action | None) -> Iterator[None]:
        """Time one action."""
        super().action(label, action)
        name = label if action is None else "P2P" if action.is_p2p else action.kind
        self._now, self._at_start = (name, action), True
        self._mark(name)
        yield
        self._now, self._at_start = (OTHER, None), False
        self._mark(OTHER)

    def begin_wait(self, call: TimedCall | None) -> None:
        """A span of waiting begins; an action that waits for its input has not begun before."""
        if self._waiting:
            return
        self._waiting = True
        name = f"{WAIT}_{call.recorded.kind.upper()}" if call else WAIT
        if self._at_start and call is not None and self._is_transfer(call):
            self._marks[-1] = replace(self._marks[-1], name=name)
        else:
            self._at_start = False
            self._mark(name)

    def end_wait(self) -> None:
        """What was interrupted goes on."""
        if self._waiting:
            self._waiting = False
            self._mark(self._now[0])

    def timeline_rows(self) -> list[dict[str, Any]]:
        """Rows of the timeline frame, one per span."""
        return [
            {
                "stage": span.action.stage if span.action else self.stage,
                "microbatch": span.action.microbatch if span.action else None,
                "action": span.name,
                "start": span.start,
                "end": span.end,
            }
            for span in self.spans()
        ]

    def collective_rows(self) -> list[dict[str, Any]]:
        """Rows of the collectives frame, with the seconds of a call."""
        rows = self.collectives.rows(self.axis_of)
        return [row | as_reported(row) for row in rows]

    def spans(self) -> list[Span]:
        """The step from its start to its end: each span begins where the one before it ends."""
        moments = [self.clock.seconds(self._marks[0].moment, m.moment) for m in self._marks]
        shortest = SHORTEST_WAIT * moments[-1]
        found: list[Span] = []
        for mark, start, end in zip(self._marks, moments, moments[1:]):
            name = mark.within if end - start < shortest else mark.name
            before = found[-1] if found and found[-1].action == mark.action else None
            if before and before.name == name:
                found[-1] = replace(before, end=end)
            elif before and name.startswith(WAIT) and before.end - before.start < shortest:
                found[-1] = Span(name, mark.action, before.start, end)
            elif end > start:
                found.append(Span(name, mark.action, start, end))
        return found

    def _mark(self, name: str) -> None:
        within, action = self._now
        self._marks.append(Mark(name, action, self.clock.now(), within))

    def _kind(self) -> str:
        name, action = self._now
        return action.kind if action else "" if name == OTHER else name

    def _is_transfer(self, call: TimedCall) -> bool:
        axis = self.axis_of.get(call.recorded.group, "world")
        return axis == "pipeline" and call.recorded.kind in ("send", "recv")


class DeviceClock:
    """Moments of a device's work: the host's clock on CPU, events on the current stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def now(self) -> Any:
        """This moment; on CUDA the one at which the stream gets here."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until the device has passed all moments."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two moments, after `synchronize`."""
        return float(start.elapsed_time(end)) / 1e3 if self.cuda else float(end - start)


def _world() -> list[dist.ProcessGroup]:
    """The group of all ranks, where there is one."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return [] if world is None else [world]
