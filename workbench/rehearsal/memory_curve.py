"""Memory over time within a step: its turning points by category, and what lives at its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.engine.measure.live_memory import MemoryLevels

Origin = tuple[str, str]
"""(module, action) that allocated a storage; the action without its microbatch."""
Held = Mapping[tuple[str, Origin], int]
"""(category, origin) -> bytes."""
Change = tuple[str, int, Origin]
"""(category, bytes, origin) of an allocation, or with negative bytes of a release."""
RIPPLE = 1 / 8
"""Share of an action's own range below which the curve's ups and downs are left out."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive changes of the levels, in sum.

    Attributes:
        events: How many changes.
        net: Category -> change from the first to the last.
        rise: The largest sum of all categories over the level before.
        at_rise: Category -> change at that instant.
        most: Category -> its own largest rise.
        held: (category, origin) -> change from the first to the last.
        held_at_rise: The same at the instant of the rise.
        points: (index of the event, category -> change until then) at the turning points of the sum
            and at the end.
    """

    events: int = 0
    net: Mapping[str, int] = field(default_factory=dict)
    rise: int = 0
    at_rise: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    held: Held = field(default_factory=dict)
    held_at_rise: Held = field(default_factory=dict)
    points: Sequence[tuple[int, dict[str, int]]] = ()

    @classmethod
    def of(cls, changes: Sequence[Change]) -> Stretch:
        """The changes in sum."""
        totals, most, now = [0], dict[str, int](), Counter[str]()
        for category, delta, _ in changes:
            now[category] += delta
            totals.append(totals[-1] + delta)
            most[category] = max(most.get(category, 0), now[category])
        highest = totals.index(max(totals))
        held = _by_origin(changes)
        return cls(
            events=len(changes),
            net=dict(now),
            rise=totals[highest],
            at_rise=_by_category(changes[:highest]),
            most=most,
            held=held,
            held_at_rise=_by_origin(changes[:highest]),
            points=list(_points(changes, totals)),
        )

    def apply(self, levels: MemoryLevels) -> None:
        """Add to `levels`, peaks included."""
        now = levels.now
        if self.raises(levels):
            peak = {c: now[c] + self.at_rise.get(c, 0) for c in (*now, *self.at_rise)}
            levels.peak = {category: size for category, size in peak.items() if size}
        for category, rise in self.most.items():
            levels.maximum[category] = max(levels.maximum.get(category, 0), now[category] + rise)
        for category, delta in self.net.items():
            now[category] += delta

    def raises(self, levels: MemoryLevels) -> bool:
        """Whether the peak of `levels` is in it."""
        return sum(levels.now.values()) + self.rise > sum(levels.peak.values())


NOTHING = Stretch()


class MemoryCurve:
    """The curve of one step.

    Attributes:
        label: Of the action that runs now.
        points: (action, number of the event in the step, bytes by category), while `is_drawn`.
        held: (category, origin) -> bytes now.
        at_peak: The same at the instant of the largest sum.
    """

    def __init__(self) -> None:
        self.label, self.is_drawn, self.events = "", False, 0
        self.points: list[tuple[str, int, dict[str, int]]] = []
        self.held: Counter[tuple[str, Origin]] = Counter()
        self.at_peak: dict[tuple[str, Origin], int] = {}

    @property
    def kind(self) -> str:
        """The action without its microbatch, as 0F for 0F3."""
        return self.label.rstrip("0123456789")

    def restart(self) -> None:
        """Start a step."""
        self.points.clear()
        self.events, self.at_peak = 0, _nonzero(self.held)

    def move(self, changes: Sequence[Change]) -> None:
        """Storages change their categories; no bytes do."""
        for category, delta, origin in changes:
            self.held[category, origin] += delta

    def add(self, stretch: Stretch, levels: MemoryLevels) -> None:
        """Add a stretch that `levels` do not have yet."""
        if self.is_drawn:
            for index, change in stretch.points:
                level = {c: levels.now[c] + change.get(c, 0) for c in (*levels.now, *change)}
                self.points.append((self.label, self.events + index, level))
        self.events += stretch.events
        if stretch.raises(levels):
            at_peak = self.held.copy()
            _add(at_peak, stretch.held_at_rise)
            self.at_peak = _nonzero(at_peak)
        _add(self.held, stretch.held)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the `levels` frame."""
        for label, event, level in self.points:
            yield {"action": label, "event": event, **level}


def origin_rows(held: Held) -> list[dict[str, Any]]:
    """What is held by module, action and category, the largest first."""
    largest = sorted(held.items(), key=lambda item: -abs(item[1]))
    return [
        {"module": module, "action": action, "category": category, "bytes": size}
        for (category, (module, action)), size in largest
    ]


def difference(now: Held, before: Held) -> dict[tuple[str, Origin], int]:
    """What is held now and was not before."""
    return _nonzero({key: now.get(key, 0) - before.get(key, 0) for key in {**before, **now}})


def _points(
    changes: Sequence[Change], totals: Sequence[int]
) -> Iterator[tuple[int, dict[str, int]]]:
    turning, now, done = _turning_points(totals), Counter[str](), 0
    for index in turning:
        for category, delta, _ in changes[done:index]:
            now[category] += delta
        done = index
        yield index, dict(now)


def _turning_points(totals: Sequence[int]) -> list[int]:
    """Indices of the turning points, without ripples, and of the end."""
    ripple = max(1, RIPPLE * (max(totals) - min(totals)))
    found, extreme, up = [0], 0, True
    for index, total in enumerate(totals):
        ahead = total - totals[extreme] if up else totals[extreme] - total
        if ahead > 0:
            extreme = index
        elif -ahead >= ripple:
            found.append(extreme)
            extreme, up = index, not up
    return sorted({*found, extreme, totals.index(max(totals)), len(totals) - 1} - {0})


def _by_category(changes: Sequence[Change]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for category, delta, _ in changes:
        found[category] += delta
    return dict(found)


def _by_origin(changes: Sequence[Change]) -> dict[tuple[str, Origin], int]:
    found: Counter[tuple[str, Origin]] = Counter()
    for category, delta, origin in changes:
        found[category, origin] += delta
    return _nonzero(found)


def _add(to: Counter[tuple[str, Origin]], more: Held) -> None:
    for key, delta in more.items():
        to[key] += delta


def _nonzero(held: Held) -> dict[tuple[str, Origin], int]:
    return {key: size for key, size in held.items() if size}
