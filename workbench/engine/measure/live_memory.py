"""Live bytes by category, and all collectives, of real or fake tensors.

A dispatch mode sees each operator's results. Each storage is counted once, however many views it
has, from its allocation to its release. Its category is the first that applies of:

1. the category it was registered under (`register`), whenever that happens;
2. the innermost `category(...)` scope in which it was allocated;
3. its action's, at the end of the action: storages that outlive a forward (F) or a received
   activation are `activations`; those that outlive a backward (B, I) or a received gradient are
   `communication`, on their way to or from another stage; those released within their action, or
   that outlive another kind of action, are `temporary`;
4. `overhead`, for a storage that existed before the mode and was never registered.

Because rule 3 needs hindsight, events are buffered until their action ends. Memory that no operator
returns (workspaces inside a kernel, an allocator's rounding) is not seen, nor are intermediate
results under `torch.compile`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from workbench.engine.measure.recorded_collective import (
    RecordedCollective,
    process_group_of,
    recorded_call,
    recorded_composite,
    tensors_in,
)
from workbench.models.torch_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from workbench.parallel.async_collectives import CompositeCollective, current_composite
from workbench.planned_device import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SURVIVORS = {
    "F": "activations",
    "RECV_F": "activations",
    "B": "communication",
    "I": "communication",
    "RECV_B": "communication",
    "SEND_B": "communication",
}
"""Kind of action -> category of storages that outlive it; `temporary` for other kinds."""

UNCOUNTED = "elsewhere"
"""Category of storages excluded from the sums: host tensors of an offloading CPU rank."""


@dataclass(eq=False)
class CountedStorage:
    """A storage that is counted.

    Attributes:
        bytes: Its size.
        category: Of the memory frame; None until its action ends.
        summed: Bytes already included in the levels.
        reference: To the storage; None once it is released.
        origin: (module, action) that allocated it, where that is followed.
        crosses_stages: It goes to, or came from, another pipeline stage.
        is_kept: It did, and is kept for weight gradients.
    """

    bytes: int
    category: str | None
    summed: int = 0
    reference: object | None = None
    origin: tuple[str, str] = ("", "")
    crosses_stages: bool = False
    is_kept: bool = False


@dataclass
class MemoryLevels:
    """Bytes by category: now, at the instant of the largest sum, and each category's maximum."""

    now: Counter[str] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)
    maximum: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        """Reset peaks to the present level."""
        self.peak = _nonzero(self.now)
        self.maximum = _nonzero(self.now)

    def add(self, changes: Sequence[tuple[str, int]]) -> None:
        """Apply changes in order, updating the peaks."""
        changes = [change for change in changes if change[0] != UNCOUNTED]
        total, most, at = sum(self.now.values()), sum(self.peak.values()), -1
        before = Counter(self.now)
        for index, (category, delta) in enumerate(changes):
            self.now[category] += delta
            total += delta
            if self.now[category] > self.maximum.get(category, 0):
                self.maximum[category] = self.now[category]
            if total > most:
                most, at = total, index
        if at >= 0:
            for category, delta in changes[: at + 1]:
                before[category] += delta
            self.peak = _nonzero(before)


def _local_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: of a DTensor its local one, which operators that the mode
    does not see have made.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not is_traceable_wrapper_subclass(
        tensor
    ):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, torch.Tensor):
            yield from _local_tensors(part)


def _nonzero(levels: Mapping[str, int]) -> dict[str, int]:
    return {category: size for category, size in levels.items() if size}


class LiveBytes(TorchDispatchMode):
    """Counts storages on `device` while entered; enter it inside a FakeTensorMode, not around one.

    Between entries it sees releases, but no allocations: enter, register persistent tensors, run
    the step.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        super().__init__()
        self.device = device
        self.levels = MemoryLevels()
        self.moments: dict[str, dict[str, int]] = {}
        self.calls: Counter[RecordedCollective] = Counter()
        self._live: dict[int, CountedStorage] = {}
        self._pending: list[tuple[CountedStorage, int]] = []
        self._scopes: list[str] = []
        self._kind = ""
        self._composed: CompositeCollective | None = None
        """The last collective composed of other operations, which counts once."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._collective(func, args, out)
        # inductor's ops resize a storage in place where parameters are freed or all-gathered.
        for result in tensors_in(args if func.namespace == "inductor" else out):
            for tensor in _local_tensors(result):
                if self._countable(tensor):
                    self._see(tensor, args)
        return out

    def _countable(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def _see(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if known is not None:
            self._resize(known, storage.nbytes())
        elif any(
            x.untyped_storage() is storage for arg in tensors_in(args) for x in _local_tensors(arg)
        ):
            self._count(storage, "overhead")
        else:
            self._count(storage, self._scopes[-1] if self._scopes else None)

    def _count(self, storage: torch.UntypedStorage, category: str | None) -> CountedStorage:
        key, entry = id(storage), CountedStorage(storage.nbytes(), category)

        def dead(_: object) -> None:
            self._live.pop(key, None)
            self._pending.append((entry, -entry.bytes))
            entry.reference = None

        entry.reference = weakref.ref(storage, dead)
        self._live[key] = entry
        self._pending.append((entry, entry.bytes))
        return entry

    def _resize(self, entry: CountedStorage, size: int) -> None:
        if size != entry.bytes:
            self._pending.append((entry, size - entry.bytes))
            entry.bytes = size

    def register(self, tensors: torch.Tensor | Iterable[torch.Tensor], category: str) -> None:
        """Count the tensors' storages under `category` from the current action on."""
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if not self._countable(tensor):
                continue
            storage = tensor.untyped_storage()
            entry = self._live.get(id(storage)) or self._count(storage, category)
            if entry.category != category:
                self._move(entry, category)

    def _move(self, entry: CountedStorage, category: str) -> None:
        """Give a counted storage another category; its summed bytes move too, past peaks stay."""
        if entry.summed:
            assert entry.category is not None
            self.levels.now[entry.category] -= entry.summed
            self.levels.now[category] += entry.summed
            self.levels.maximum[category] = max(
                self.levels.maximum.get(category, 0), self.levels.now[category]
            )
        entry.category = category

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """A scope whose new storages are counted under `name`; the innermost scope wins."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def action(self, kind: str) -> Iterator[None]:
        """A context around an action (F, B, or any other name); collectives inside carry `kind`."""
        self._sum()
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._sum()
            self._kind = before

    def _sum(self) -> None:
        """Settle the categories of the buffered events' storages, then apply the events."""
        pending, self._pending = self._pending, []
        self.levels.add(self._settled(pending))

    def _settled(self, pending: Sequence[tuple[CountedStorage, int]]) -> list[tuple[str, int]]:
        """(category, bytes) of the events of an action that has ended."""
        survivors = SURVIVORS.get(self._kind, "temporary")
        for entry, delta in pending:
            entry.summed += delta
            if entry.category is None:
                entry.category = "temporary" if entry.reference is None else survivors
        return [(entry.category or "temporary", delta) for entry, delta in pending]

    def snapshot(self, moment: str) -> dict[str, int]:
        """Bytes by category now, also stored in `moments` under that name."""
        self._sum()
        self.moments[moment] = _nonzero(self.levels.now)
        return self.moments[moment]

    def restart(self) -> None:
        """Start a step: reset peaks, moments and collectives."""
        self._sum()
        self.levels.restart()
        self.moments.clear()
        self.calls.clear()

    @property
    def current(self) -> dict[str, int]:
        """Bytes by category now."""
        self._sum()
        return _nonzero(self.levels.now)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the instant of the largest sum since `restart`."""
        self._sum()
        return dict(self.levels.peak)

    @property
    def maximum(self) -> dict[str, int]:
        """Each category's own maximum since `restart`."""
        self._sum()
        return dict(self.levels.maximum)

    def memory_rows(self, stage: int, tier: str = "device") -> list[dict[str, Any]]:
        """Rows of the memory frame: the snapshots, `peak` and `maximum`."""
        tables = {**self.moments, "peak": self.peak, "maximum": self.maximum}
        return [
            {"stage": stage, "moment": moment, "tier": tier, "category": category, "bytes": size}
            for moment, table in tables.items()
            for category, size in table.items()
        ]

    def collective_rows(self, axis_of: Mapping[str, str]) -> list[dict[str, Any]]:
        """Rows of the collectives frame.

        Args:
            axis_of: Process group's name -> mesh axis; unknown groups are `world`.
        """
        return [call.row(axis_of) | {"count": count} for call, count in self.calls.items()]

    def _collective(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return
        if (part_of := current_composite()) is not None:
            if part_of is not self._composed:
                self._composed = part_of
                self.calls[recorded_composite(part_of, self._kind)] += 1
            return
        sides = (*args, None if func.namespace == "c10d" else out)
        self.calls[recorded_call(name, process_group_of(args), sides, self._kind)] += 1
