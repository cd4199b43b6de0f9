"""What is allocated and freed on one rank, in order; the largest live set of each part."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

LiveSet = dict[str, float]
"""Category of the memory frame -> bytes."""


@dataclass(eq=False)
class _Allocation:
    bytes: float
    part: str
    category: str | None
    is_live: bool = True


class Storage:
    """Memory that tensors share; it is freed with the last of them."""

    __slots__ = ("_allocation", "_tape")

    def __init__(self, tape: AllocationTape, allocation: _Allocation) -> None:
        self._tape, self._allocation = tape, allocation

    def __del__(self) -> None:
        self._tape.free(self._allocation)

    def outlives_as(self, category: str) -> None:
        """Name what the storage is once its action is over, where another survives it as another
        category.
        """
        self._allocation.category = self._allocation.category or category


@dataclass
class AllocationTape:
    """Allocations of one rank.

    Categories are decided as measurements decide them (`engine/measure/live_memory.py`): by the
    scope, else at the end of an action by whether the storage outlives it.
    """

    part: str = ""
    """Part of the pass that runs now."""
    largest: dict[str, LiveSet] = field(default_factory=dict)
    """Part -> its largest live set."""
    total: float = 0.0
    """Bytes that are live now."""
    _scope: str | None = None
    _events: list[tuple[str, _Allocation, float]] = field(default_factory=list)
    _live: dict[str, float] = field(default_factory=partial(defaultdict, float))

    def allocate(self, num_bytes: float) -> Storage:
        """A new storage."""
        allocation = _Allocation(num_bytes, self.part, self._scope)
        self.total += num_bytes
        self._events.append((self.part, allocation, num_bytes))
        return Storage(self, allocation)

    def free(self, allocation: _Allocation) -> None:
        """Called when the last tensor of a storage is gone."""
        allocation.is_live = False
        self.total -= allocation.bytes
        self._events.append((self.part, allocation, -allocation.bytes))

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """A scope whose new storages have this category."""
        before, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = before

    def end_action(self, survivors: str) -> None:
        """Settle categories: what outlives the action is of category `survivors`, the rest
        temporary.
        """
        for part, allocation, change in self._events:
            if allocation.category is None:
                allocation.category = survivors if allocation.is_live else "temporary"
            self._live[allocation.category] += change
            total = sum(self._live.values())
            most = sum(self.largest[part].values()) if part in self.largest else -math.inf
            if total > most:
                self.largest[part] = self.live
        self._events.clear()

    @property
    def live(self) -> LiveSet:
        """Bytes by category at the end of the last action."""
        return {name: size for name, size in self._live.items() if size}
