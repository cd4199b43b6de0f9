"""Live bytes of a step of which some microbatches are replayed: what an action of one did to the
levels is recorded, and added for another one.

What crosses to another pipeline stage is not part of a recording: how long a boundary lives is the
schedule's to say, so that every microbatch has its own, though without a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.engine.measure.live_memory import UNCOUNTED, CountedStorage, LiveBytes
from workbench.engine.measure.recorded_collective import RecordedCollective
from workbench.models.torch_dispatch import fake_device
from workbench.rehearsal.memory_curve import (
    NOTHING,
    Change,
    Held,
    MemoryCurve,
    Origin,
    Stretch,
    difference,
)

Around = tuple[str, Any]
"""(kind, changes) of what is no action of the schedule; or (MOMENT, its name), (SCHEDULE, None) in
their place.
"""
MOMENT, SCHEDULE = "moment", "schedule"


class Boundary:
    """Stands for a tensor between two stages of a replayed microbatch; counted while it lives."""

    def __init__(self, live: ReplayedLiveBytes, size: int, origin: Origin) -> None:
        self._live = live
        self._entry = CountedStorage(size, None, 0, live, origin, crosses_stages=True)
        live.pending.append((self._entry, size))

    def move(self, category: str) -> None:
        """Count it under another category."""
        self._live.move(self._entry, category)

    def __del__(self) -> None:
        self._entry.reference = None
        self._live.pending.append((self._entry, -self._entry.bytes))


@dataclass
class RecordedAction:
    """What an action did.

    Attributes:
        changes: Of every event; None where what crosses stages is allocated, or a kept one is
            released.
        stretches: The same in sum: before that, and after.
        boundary_bytes: Size of the boundary that it makes; -1 if it makes none.
        boundary_origin: Where it is allocated.
        calls: Its collectives.
    """

    changes: list[Change | None] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    boundary_bytes: int = -1
    boundary_origin: Origin = ("", "")
    calls: Counter[RecordedCollective] = field(default_factory=Counter)

    def is_like(self, other: RecordedAction) -> bool:
        """Whether both did the same, byte by byte."""
        return (self.changes, self.boundary_bytes, self.calls) == (
            other.changes,
            other.boundary_bytes,
            other.calls,
        )


class ReplayedLiveBytes(LiveBytes):
    """Counts storages, and what recorded actions would have allocated where they are replayed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.curve = MemoryCurve()
        self.module: Callable[[], str] = lambda: ""
        """The module that computes now."""
        self.start: Held = {}
        """What was held as the step began."""
        self.around: list[Around] = []
        """What happened in the step before and after its schedule."""
        self.scheduled_calls: Counter[RecordedCollective] = Counter()
        """Collectives of the schedule."""
        self._in_schedule = False
        self._outer_calls: Counter[RecordedCollective] = Counter()
        self._moved: list[Change] = []
        self._before = 0
        """Events of the action that is recorded, before it began."""
        self._recording: RecordedAction | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs as much as a device's answer

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        known = fake_device(func, args)
        return known if known is not None else super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def pending(self) -> list[tuple[CountedStorage | Stretch, int]]:
        """Events of the present action."""
        return self._pending  # type: ignore[return-value]

    def entry(self, tensor: Tensor | None) -> CountedStorage | None:
        """What counts a tensor's storage."""
        return None if tensor is None else self._live.get(id(tensor.untyped_storage()))

    def begin(self) -> None:
        """An action begins that is to be recorded."""
        self._outer_calls, self.calls = self.calls, Counter()
        self._moved.clear()
        self._before = len(self._pending)

    def end(self, boundary: Tensor | None) -> RecordedAction:
        """It has ended; its recording, complete once its categories are settled."""
        self._recording = RecordedAction(calls=self.calls)
        self.calls = self._outer_calls + self.calls
        entry = self.entry(boundary)
        if entry is not None:
            entry.crosses_stages, self._recording.boundary_bytes = True, entry.bytes
            self._recording.boundary_origin = entry.origin
        return self._recording

    def replay(self, recorded: RecordedAction, kept: list[Any]) -> Boundary | None:
        """Count what a recorded action did.

        Args:
            recorded: The action.
            kept: What it releases of what an earlier action of its microbatch kept.

        Returns:
            The boundary that it makes.
        """
        boundary = None
        self.calls.update(recorded.calls)
        first, *rest = recorded.stretches
        self.pending.append((first, 0))
        if recorded.boundary_bytes >= 0:
            boundary = Boundary(self, recorded.boundary_bytes, recorded.boundary_origin)
        for stretch in rest:
            if kept:
                kept.pop(0)
            self.pending.append((stretch, 0))
        return boundary

    def keeps(self, storage: torch.UntypedStorage) -> None:
        """The same of a microbatch that runs; its own tensors are registered."""
        self._live[id(storage)].is_kept = True

    def keep(self, boundary: Boundary) -> None:
        """A split backward keeps what crossed to its stage for its weight gradients."""
        boundary.move("activations")

    def move(self, entry: CountedStorage, category: str) -> None:
        """Give a counted storage another category."""
        self._move(entry, category)

    def restart(self) -> None:
        """Start a step: the curve too."""
        super().restart()
        self.curve.restart()
        self.around.clear()
        self.start = difference(self.curve.held, {})

    def snapshot(self, moment: str) -> dict[str, int]:
        """The same, and noted where it is no action's."""
        levels = super().snapshot(moment)
        if not self._in_schedule:
            self.around.append((MOMENT, moment))
        return levels

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """A context around the actions of a schedule."""
        self._sum()
        self.around.append((SCHEDULE, None))
        before, self._in_schedule = self.calls.copy(), True
        yield
        self._sum()
        self.scheduled_calls, self._in_schedule = self.calls - before, False

    def _count(self, storage: torch.UntypedStorage, category: str | None) -> CountedStorage:
        entry = super()._count(storage, category)
        entry.origin = self.module(), self.curve.kind
        return entry

    def _move(self, entry: CountedStorage, category: str) -> None:
        if entry.summed and entry.category is not None:
            moved = [
                (entry.category, -entry.summed, entry.origin),
                (category, entry.summed, entry.origin),
            ]
            self.curve.move(moved)
            if not self._in_schedule:
                self.around.append((self._kind, moved))
            if not entry.crosses_stages:
                self._moved += moved
        super()._move(entry, category)

    def _sum(self) -> None:
        pending, self._pending = self.pending, []
        events: list[tuple[CountedStorage, int]] = []
        for what, delta in [*pending, (NOTHING, 0)]:
            if isinstance(what, CountedStorage):
                events.append((what, delta))
                continue
            changes = [
                (category, size, entry.origin)
                for (category, size), (entry, _) in zip(self._settled(events), events)
            ]
            counted = [change for change in changes if change[0] != UNCOUNTED]
            if counted and not self._in_schedule:
                self.around.append((self._kind, counted))
            self._apply(Stretch.of(counted))
            self._record(events[self._before :], changes[self._before :])
            self._apply(what)
            events = []
        self._close_recording()

    def _apply(self, stretch: Stretch) -> None:
        if stretch.events:
            self.curve.add(stretch, self.levels)
            stretch.apply(self.levels)

    def _record(
        self, events: Sequence[tuple[CountedStorage, int]], changes: Sequence[Change]
    ) -> None:
        if self._recording is None:
            return
        self._recording.changes += self._moved
        self._moved.clear()
        for (entry, delta), change in zip(events, changes):
            if entry.crosses_stages:
                self._recording.changes += [None] if delta > 0 or entry.is_kept else []
            elif change[0] != UNCOUNTED:
                self._recording.changes.append(change)

    def _close_recording(self) -> None:
        recorded, self._recording = self._recording, None
        if recorded is None:
            return
        parts: list[list[Change]] = [[]]
        for change in recorded.changes:
            if change is None:
                parts.append([])
            else:
                parts[-1].append(change)
        recorded.stretches += map(Stretch.of, parts)
