"""The sequence of every collective and P2P call of a rank, recorded without communicating."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from workbench.engine.measure.recorded_collective import KINDS, process_group_of, tensors_in
from workbench.models.torch_dispatch import TorchDispatchMode, fake_device

P2P = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
"""Of operators that communicate; DTensor's is its all-to-all along a dim."""
STORE = "store"
"""Group of the calls that make groups, which all ranks of the world must make in one order."""


class Call(NamedTuple):
    """One call of a rank.

    Attributes:
        kind: all_reduce, send, and so on.
        group: Name of the process group, as this rank's mesh calls it.
        ranks: Global ranks of the group.
        dtype: Of the tensors.
        numel: Entries of all input tensors.
        peer: Global rank of the other end of a send or receive, or of a collective's root; -1 for
            others.
        batch: Sends and receives of one `batch_isend_irecv` share a number; -1 for collectives.
        on_host: Whether a tensor is in host memory though the plan's are on a GPU.
        sent: Rows of an all-to-all for each rank of the group; empty where they are equal.
        received: Rows from each.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    dtype: str
    numel: int
    peer: int = -1
    batch: int = -1
    on_host: bool = False
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"{self.kind} of {self.numel} x {self.dtype}"
        if self.peer >= 0:
            how = {"send": "to", "recv": "from"}.get(self.kind, "with root")
            what += f" {how} rank {self.peer}"
        if self.group == STORE:
            return f"{self.kind} of {self.dtype}"
        return f"{what} on group {self.group} {self.ranks}"


@dataclass(frozen=True)
class RecordedCalls:
    """Calls of an action, their batches numbered from 0, and whether it makes a boundary."""

    calls: tuple[Call, ...]
    batches: int
    makes_boundary: bool

    def is_like(self, other: RecordedCalls) -> bool:
        """Whether both made the same calls."""
        return self == other


class CallRecorder(TorchDispatchMode):
    """Records the calls that are made while it is entered, any number of times; it can say those of
    an action again, as `action_replayer.ActionRecorder`.

    Args:
        device: Of the plan's tensors; None while groups are made, whose tensors have no plan.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self.calls: list[Call] = []
        self._batch = 0
        self._in_batch = False
        self._began = (0, 0)

    def schedule(self) -> AbstractContextManager[None]:
        """Nothing of its own."""
        return nullcontext()

    def begin(self) -> None:
        """An action begins."""
        self._began = len(self.calls), self._batch

    def end(self, boundary: torch.Tensor | None) -> RecordedCalls:
        """It has ended; its calls."""
        first, before = self._began
        calls = tuple(
            call._replace(batch=call.batch - before - 1) if call.batch >= 0 else call
            for call in self.calls[first:]
        )
        return RecordedCalls(calls, self._batch - before, boundary is not None)

    def keep(self, boundary: object) -> None:
        """No calls."""

    def keeps(self, storage: torch.UntypedStorage) -> None:
        """No calls."""

    def replay(self, recorded: RecordedCalls, kept: list[object]) -> object | None:
        """Say again what an action called; what stands for the boundary that it makes."""
        self.calls += [
            call._replace(batch=call.batch + self._batch + 1) if call.batch >= 0 else call
            for call in recorded.calls
        ]
        self._batch += recorded.batches
        return object() if recorded.makes_boundary else None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (known := fake_device(func, args)) is not None:
            return known
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES and name != "wait_tensor":
            self._record(KINDS.get(name, name), args)
        return func(*args, **(kwargs or {}))

    def _record(self, kind: str, args: tuple[Any, ...]) -> None:
        group, found = process_group_of(args), list(tensors_in(args))
        assert group is not None, kind
        ranks = tuple(dist.get_process_group_ranks(group))
        peer, batch = -1, -1
        if kind in P2P:
            peer = ranks[next(value for value in args if isinstance(value, int))]
            self._batch += not self._in_batch
            batch = self._batch
        if kind in ROOTED:
            peer = ranks[next(value for value in args if isinstance(value, int))]
        splits = [value for value in args if _is_splits(value)] if kind == "all_to_all" else []
        received, sent = (tuple(each) for each in (splits or ((), ())))
        first = found[0].dtype if found else None
        self.calls.append(
            Call(
                kind,
                str(group.group_name),
                ranks,
                str(first).removeprefix("torch."),
                sum(x.numel() for x in found),
                peer,
                batch,
                kind != "barrier"  # whose tensor NCCL makes itself
                and self.device is not None
                and any(x.device != self.device for x in found),
                sent,
                received,
            )
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which calls are recorded, and those of one P2P batch are kept together."""
        originals = dist.batch_isend_irecv, dist.new_subgroups_by_enumeration, dist.new_group
        dist.batch_isend_irecv = self._batched(originals[0])
        dist.new_subgroups_by_enumeration = self._making(originals[1])
        dist.new_group = self._making(originals[2])
        try:
            with self:
                yield
        finally:
            dist.batch_isend_irecv, dist.new_subgroups_by_enumeration, dist.new_group = originals

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            world = tuple(range(dist.get_world_size()))
            self.calls.append(Call("making", STORE, world, f"groups {ranks}", 0))
            return original(ranks, *args, **kwargs)

        return make

    def _batched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
            self._batch, self._in_batch = self._batch + 1, True
            try:
                works: list[dist.Work] = original(ops)
                return works
            finally:
                self._in_batch = False

        return batch_isend_irecv


def changed(calls: Sequence[Call], change: Callable[[Call], Call]) -> list[Call]:
    """`change` of every call, made once of those that are one object: replayed ones."""
    made: dict[int, Call] = {}
    for call in calls:
        if id(call) not in made:
            made[id(call)] = change(call)
    return [made[id(call)] for call in calls]


def _is_splits(value: Any) -> bool:
    """Whether an argument is how an all-to-all's rows are split."""
    return isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
