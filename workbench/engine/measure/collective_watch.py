"""Collectives of a step and the waits for them, seen where c10d's Python interface makes them.

Unlike a dispatch mode this costs nothing for any other operator, so that the step keeps its timing.
Functional collectives, which DTensor calls, do not pass here: they count as compute.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from workbench.engine.measure.recorded_collective import (
    RecordedCollective,
    recorded_call,
    recorded_composite,
)
from workbench.parallel.async_collectives import CompositeCollective, current_composite

METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
"""Methods of torch's ProcessGroup that start a collective; versions have some of them."""


@dataclass(eq=False)
class TimedCall:
    """A collective under way, and when it ended."""

    recorded: RecordedCollective
    begin: float
    """time.perf_counter() at its start."""
    parts: int = 0
    """Works that it is made of."""
    completed: list[float] = field(default_factory=list)
    """When its parts were complete, where their works tell."""
    waited: float | None = None
    """When the last wait for it returned."""
    works: list[dist.Work] = field(default_factory=list)
    """Works that know their own duration, once the device has been synchronised."""
    measured: float | None = None
    """Sum of their durations."""

    @property
    def seconds(self) -> float | None:
        """Its own duration: NCCL's where that is measured; on gloo from its start to its
        completion, or where that is not known (send, recv), to the end of the wait for it.
        """
        if self.measured is not None:
            return self.measured
        ends = self.completed if len(self.completed) == self.parts else []
        end = max(ends, default=self.waited)
        return None if end is None else min(end, self.waited or end) - self.begin

    def resolve(self) -> None:
        """Read the works' durations, and let go of them and of the tensors that they hold."""
        durations = [_duration(work) for work in self.works]
        known = [seconds for seconds in durations if seconds is not None]
        self.measured = sum(known) if known and len(known) == len(durations) else None
        self.works.clear()


def _duration(work: Any) -> float | None:
    """Seconds between a NCCL work's own events; None where they were not recorded."""
    try:
        return float(work._get_duration()) / 1e3
    except RuntimeError:
        return None


class CollectiveWatch:
    """Reports collectives and waits while `watching`.

    Args:
        cuda: Whether the device is a GPU, whose works know their own durations.
        action: The kind of the current action.
        begin_wait: Called before a wait, with the collective that is waited for where it is known.
        end_wait: Called after it.
    """

    def __init__(
        self,
        cuda: bool,
        action: Callable[[], str],
        begin_wait: Callable[[TimedCall | None], None],
        end_wait: Callable[[], None],
    ) -> None:
        self.cuda, self.action = cuda, action
        self.begin_wait, self.end_wait = begin_wait, end_wait
        self.calls: list[TimedCall] = []
        self._by_work: dict[int, tuple[dist.Work, TimedCall]] = {}
        self._coalescing: dict[str, list[TimedCall]] = {}
        self._composite: tuple[CompositeCollective, TimedCall] | None = None

    @contextmanager
    def watching(self, groups: Iterable[Any]) -> Iterator[None]:
        """Watch all collectives of this process; on a GPU let `groups` time their own."""
        if self.cuda:
            for group in groups:
                with suppress(RuntimeError, AttributeError):  # a backend that cannot
                    group._enable_collectives_timing()
        group_class: Any = dist.ProcessGroup
        own = {name: self._issue for name in METHODS if name in vars(group_class)}
        own |= {"_start_coalescing": self._start, "_end_coalescing": self._end}
        wrapped = {(group_class, name): wrap for name, wrap in own.items()}
        wrapped[dist.Work, "wait"] = self._wait
        # vars, not getattr: what a class gives is no longer bound to an instance when put back.
        before = {(owner, name): vars(owner)[name] for owner, name in wrapped}
        try:
            for (owner, name), wrap in wrapped.items():
                setattr(owner, name, wrap(name, getattr(owner, name)))
            yield
        finally:
            for (owner, name), method in before.items():
                setattr(owner, name, method)
            self._by_work.clear()

    def resolve(self) -> None:
        """Read the durations of what the device has measured; it must have been synchronised."""
        for call in self.calls:
            call.resolve()

    def rows(self, axis_of: Mapping[str, str]) -> list[dict[str, Any]]:
        """Rows of the collectives frame; `seconds` is the mean of the calls that a row counts."""
        counts = Counter(call.recorded for call in self.calls)
        rows = []
        for recorded, count in counts.items():
            known = [c.seconds for c in self.calls if c.recorded == recorded]
            sums = [x for x in known if x is not None]
            mean = sum(sums) / count if len(sums) == count else None
            rows.append(recorded.row(axis_of) | {"count": count, "seconds": mean})
        return rows

    def _issue(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = self._call(name, group, args)
            # NCCL runs what is not asynchronous on the current stream: the call is the wait.
            blocks = self.cuda and any(getattr(x, "asyncOp", True) is False for x in args)
            if blocks:
                self.begin_wait(call)
            work = method(group, *args, **kwargs)
            if blocks:
                self.end_wait()
            if group.group_name in self._coalescing:
                self._coalescing[group.group_name].append(call)
            else:
                self._track(work, call)
            return work

        return issue

    def _start(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: dist.ProcessGroup, *args: Any) -> Any:
            self._coalescing[group.group_name] = []
            return method(group, *args)

        return start

    def _end(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def end(group: dist.ProcessGroup, *args: Any) -> Any:
            work = method(group, *args)
            for call in reversed(self._coalescing.pop(group.group_name, [])):
                self._track(work, call)
            return work

        return end

    def _wait(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            _, call = self._by_work.pop(id(work), (None, None))
            self.begin_wait(call)
            try:
                return method(work, *args, **kwargs)
            finally:
                self.end_wait()
                if call is not None and not self.cuda:  # there the host does not wait
                    call.waited = time.perf_counter()

        return wait

    def _call(self, name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> TimedCall:
        whole = current_composite()
        if whole is not None and self._composite is not None and self._composite[0] is whole:
            return self._composite[1]
        recorded = (
            recorded_call(name, group, args, self.action())
            if whole is None
            else recorded_composite(whole, self.action())
        )
        call = TimedCall(recorded, time.perf_counter())
        self._composite = None if whole is None else (whole, call)
        self.calls.append(call)
        return call

    def _track(self, work: dist.Work | None, call: TimedCall) -> None:
        call.parts += 1
        if work is None:
            return
        self._by_work[id(work)] = work, call
        if self.cuda:
            call.works.append(work)
        else:
            with suppress(RuntimeError):  # gloo's send and recv have no future
                done = call.completed
                work.get_future().add_done_callback(lambda _: done.append(time.perf_counter()))
