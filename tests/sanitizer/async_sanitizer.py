"""A dispatch mode under which no operator may touch what a collective in flight still uses.

Between an asynchronous collective (or send, or recv) and its wait nothing may write what it reads,
nothing may read or write what it writes, and nothing may resize or free the storage of either. On a
GPU each of these is a race: the collective runs on a stream of its own, which the current stream
follows only from `wait()` on. gloo often finishes before anybody looks, and hides it.

`wait()` ends a call, and so does `is_completed()` once it is true. Operators are judged by their
schema, tensors by the bytes of the storage that they cover.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch._dynamo  # which every dispatch mode imports: before ranks are forked, not in each
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from tests.sanitizer.memory_ranges import MemoryRange
from tests.sanitizer.python_lines import python_lines
from tests.sanitizer.tensor_accesses import (
    TensorAccesses,
    collective_accesses,
    functional_accesses,
    operator_accesses,
)
from workbench.engine.measure.recorded_collective import KINDS, process_group_of

FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
HOST_READS = ("tolist", "numpy")
"""Methods of tensors that read a CPU tensor without an operator."""


@dataclass(frozen=True)
class Violation:
    """One rank touches, or never waits for, what a collective in flight uses.

    Attributes:
        kind: `reads`, `writes`, `resizes`, `frees`, or `never waits`.
        operator: What touches the tensor; the collective itself where it is never waited for.
        shape: Of the tensor that is touched.
        line: Python lines that touch it, the innermost first.
        collective: Kind of collective, by the project's words.
        collective_shape: Of the collective's tensor.
        ranks: Of the collective's group.
        collective_line: Python lines that started the collective.
        rank: Which rank found it.
    """

    kind: str
    operator: str
    shape: tuple[int, ...]
    line: str
    collective: str
    collective_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    collective_line: str
    rank: int

    def __str__(self) -> str:
        started = (
            f"{self.collective} of {list(self.collective_shape)} over ranks {list(self.ranks)}, "
            f"started at {self.collective_line}"
        )
        if self.kind == "never waits":
            return f"rank {self.rank} never waits for {started}; at {self.line} it is too late"
        return (
            f"rank {self.rank}: {self.operator} {self.kind} {list(self.shape)} at {self.line}, "
            f"before the wait for {started}"
        )


@dataclass(eq=False)
class PendingCollective:
    """A collective between its start and its wait."""

    kind: str
    ranks: tuple[int, ...]
    line: str
    reads: list[MemoryRange] = field(default_factory=list)
    writes: list[MemoryRange] = field(default_factory=list)
    handle: weakref.ref[Any] | None = None
    """Its work; None for a functional collective, whose result is waited for."""
    is_reported_lost: bool = False

    @property
    def largest_shape(self) -> tuple[int, ...]:
        """Of the tensor that covers the most bytes."""
        ranges = [*self.writes, *self.reads]
        return max(ranges, key=lambda each: each.stop - each.start).shape if ranges else ()


class WatchedWork(dist.Work):
    """A handle that tells the sanitizer when its collective has been waited for.

    It tells before it waits: within its wait gloo copies results to where they belong.
    """

    def __init__(self, inner: dist.Work, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._on_end = inner, on_end

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait, after which the collective's tensors are free."""
        self._on_end()
        return self._inner.wait(*args, **kwargs)

    def synchronize(self) -> None:
        """The same, without a deadline."""
        self._on_end()
        self._inner.synchronize()

    def is_completed(self) -> bool:
        """Whether it is over; if so, its tensors are free."""
        if done := self._inner.is_completed():
            self._on_end()
        return done

    def get_future(self) -> Any:
        """Refused: the wait for a future is not seen."""
        raise NotImplementedError("the sanitizer follows wait(), not futures")


class AsyncSanitizer(TorchDispatchMode):
    """Records the `violations` of the code under it, on this rank.

    A call that is never waited for is reported when its handle is dropped, at the end of its step
    (`expect_none_in_flight`), or when the sanitizer is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[Violation, None] = {}
        self._pending: list[PendingCollective] = []
        self._handed_over: WatchedWork | None = None
        """The newest handle: held until the next operator, by when its caller holds it."""
        self._patches = ExitStack()

    @property
    def violations(self) -> list[Violation]:
        """Those found so far, each once."""
        return list(self._found)

    def take(self) -> list[Violation]:
        """Those found so far, which are then forgotten."""
        found, self._found = self.violations, {}
        return found

    def __enter__(self) -> Self:
        self._patches.enter_context(_called_before(torch.UntypedStorage, "resize_", self._resizes))
        for name in HOST_READS:
            self._patches.enter_context(_called_before(torch.Tensor, name, self._host_reads))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        self.expect_none_in_flight()
        self._pending.clear()

    def expect_none_in_flight(self) -> None:
        """Report every call that has not been waited for: at the end of a training step."""
        self._handed_over = None
        for pending in list(self._pending):
            self._lost(pending)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A result of a functional collective waits for itself, by operators that come here again.
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._handed_over = None
        if func.namespace == "c10d":
            return self._start(func, args, kwargs)
        if func.namespace in FUNCTIONAL:
            return self._start_functional(func, args, kwargs)
        if not self._pending or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        accesses = operator_accesses(func, args, kwargs)
        if accesses.resizes:
            return self._resize(func, args, kwargs, accesses)
        self._check(str(func), accesses)
        return func(*args, **kwargs)

    def _start(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of c10d, and hand out its work as a watched one."""
        group = process_group_of(args)
        accesses = collective_accesses(func, args, kwargs, group.rank() if group else 0)
        self._check(str(func), accesses)
        out = func(*args, **kwargs)
        pending = self._add(func, group, accesses)
        if isinstance(out, tuple):
            return (*out[:-1], self._watched(out[-1], pending))
        return self._watched(out, pending)

    def _watched(self, boxed: Any, pending: PendingCollective) -> Any:
        work = WatchedWork(dist.Work.unbox(boxed), lambda: self._end(pending))
        pending.handle = weakref.ref(work, lambda _: self._lost(pending))
        self._handed_over = work
        return work.boxed()

    def _start_functional(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a functional collective: each of its results is in flight until waited for."""
        if func.overloadpacket.__name__ == "wait_tensor":
            waited = MemoryRange.of(args[0])
            for pending in list(self._pending):
                if pending.handle is None and any(waited.overlaps(x) for x in pending.writes):
                    self._end(pending)
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ == "_wrap_tensor_autograd":
            return func(*args, **kwargs)
        reads = functional_accesses(func, args, kwargs, ()).reads
        self._check(str(func), TensorAccesses(reads))
        out = func(*args, **kwargs)
        for result in functional_accesses(func, args, kwargs, out).writes:
            self._add(func, process_group_of(args), TensorAccesses(reads, [result]))
        return out

    def _add(
        self, func: Any, group: dist.ProcessGroup | None, accesses: TensorAccesses
    ) -> PendingCollective:
        name = func.overloadpacket.__name__
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        pending = PendingCollective(KINDS.get(name, name), ranks, python_lines())
        freed = partial(self._frees, pending)
        pending.reads = [MemoryRange.of(x, freed) for x in accesses.reads]
        pending.writes = [MemoryRange.of(x, freed) for x in accesses.writes]
        self._pending.append(pending)
        return pending

    def _end(self, pending: PendingCollective) -> None:
        if pending in self._pending:
            self._pending.remove(pending)

    def _check(self, operator: str, accesses: TensorAccesses) -> None:
        """Report what an operator about to run reads or writes too early."""
        if not self._pending:
            return
        for kind, tensors in (("writes", accesses.writes), ("reads", accesses.reads)):
            for touched in map(MemoryRange.of, tensors):
                for pending in self._pending:
                    guarded = [*pending.writes, *(pending.reads if kind == "writes" else ())]
                    if any(touched.overlaps(each) for each in guarded):
                        self._report(kind, operator, touched.shape, pending)

    def _resize(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], accesses: TensorAccesses
    ) -> Any:
        """Run an operator that may resize a storage or replace it; a view's new shape is none."""
        storages = [(x.untyped_storage(), MemoryRange.of(x)) for x in accesses.resizes]
        before = [storage.nbytes() for storage, _ in storages]
        out = func(*args, **kwargs)
        for x, (storage, touched), size in zip(accesses.resizes, storages, before):
            if storage.nbytes() != size or x.untyped_storage()._cdata != storage._cdata:
                self._report_resize(str(func), storage, touched.shape)
        return out

    def _resizes(self, storage: torch.UntypedStorage, *args: Any) -> None:
        self._report_resize("UntypedStorage.resize_", storage, (storage.nbytes(),))

    def _report_resize(
        self, operator: str, storage: torch.UntypedStorage, shape: tuple[int, ...]
    ) -> None:
        for pending in self._pending:
            if any(x.storage == storage._cdata for x in (*pending.reads, *pending.writes)):
                self._report("resizes", operator, shape, pending)

    def _host_reads(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        self._check("the host", TensorAccesses(reads=[x]))

    def _frees(self, pending: PendingCollective, reference: object) -> None:
        """A storage was freed; its address may be another's from now on."""
        for side in (pending.reads, pending.writes):
            for each in [each for each in side if each.death is reference]:
                side.remove(each)
                if pending in self._pending:
                    self._report("frees", "the last reference", each.shape, pending)

    def _lost(self, pending: PendingCollective) -> None:
        """Nobody can wait for it any more, or not in time."""
        if pending in self._pending and not pending.is_reported_lost:
            pending.is_reported_lost = True
            self._report("never waits", pending.kind, pending.largest_shape, pending)

    def _report(
        self, kind: str, operator: str, shape: Sequence[int], pending: PendingCollective
    ) -> None:
        found = Violation(
            kind,
            operator,
            tuple(shape),
            python_lines(),
            pending.kind,
            pending.largest_shape,
            pending.ranks,
            pending.line,
            dist.get_rank(),
        )
        self._found[found] = None


@contextmanager
def _called_before(owner: type, name: str, watch: Callable[..., None]) -> Iterator[None]:
    """Within, `watch` is called with the arguments of a method before it runs."""
    original, was_own = getattr(owner, name), name in vars(owner)

    def method(*args: Any, **kwargs: Any) -> Any:
        watch(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original) if was_own else delattr(owner, name)
