"""Process group `staged`: collectives between ranks that may share one GPU.

NCCL refuses two ranks on a device, and gloo takes host memory. Here every call copies device ->
page-locked host memory on a side stream, runs gloo, and copies back on the side stream; `wait()`
makes the caller's stream wait for that. So a collective reads and writes its tensors at any time
between the call and its wait, as NCCL's do, and a wait that is dropped or late shows as wrong
numbers. On CPU tensors the copies are made by the same threads, without streams.

Importing this module registers the backend: `dist.init_process_group("staged", ...)`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Issue = Callable[[], Any]
"""Starts gloo's collective on the host copies."""


class _HostCopies:
    """Copies of CPU tensors, made by the group's thread."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.reads: list[tuple[Tensor, Tensor]] = []

    def to_host(self, x: Tensor, read: bool = True) -> Tensor:
        """Host memory for `x`, which is read later, if at all."""
        host = torch.empty(x.shape, dtype=x.dtype)
        if read:
            self.reads.append((host, x))
        return host

    def finish_reads(self) -> None:
        time.sleep(self.delay)
        for host, x in self.reads:
            host.copy_(x)
        self.reads.clear()

    def write_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        time.sleep(self.delay)
        for x, host in pairs:
            x.copy_(host)

    def join(self) -> None:
        """Make the caller wait for what was written: nothing is left to wait for."""

    def finish_writes(self) -> None:
        """Block until what was written is there."""


class _StreamCopies(_HostCopies):
    """Copies of CUDA tensors on a side stream, after what the caller's stream has done so far."""

    def __init__(self, delay: float, side: torch.cuda.Stream) -> None:
        super().__init__(delay)
        self.side = side
        side.wait_event(torch.cuda.current_stream(side.device).record_event())
        self._pause()
        self.event = side.record_event()

    def _pause(self) -> None:
        if self.delay:
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(int(self.delay * 1e9))

    def to_host(self, x: Tensor, read: bool = True) -> Tensor:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if read:
            with torch.cuda.stream(self.side):
                host.copy_(x, non_blocking=True)
            self.event = self.side.record_event()
        return host

    def finish_reads(self) -> None:
        self.event.synchronize()

    def write_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        torch.cuda.set_device(self.side.device)
        self._pause()
        with torch.cuda.stream(self.side):
            for x, host in pairs:
                x.copy_(host, non_blocking=True)
        self.event = self.side.record_event()

    def join(self) -> None:
        torch.cuda.current_stream(self.side.device).wait_event(self.event)

    def finish_writes(self) -> None:
        self.event.synchronize()


class StagedWork(dist.Work):
    """Handle of a collective; its tensors are held until it is done."""

    def __init__(self, copies: _HostCopies) -> None:
        super().__init__()
        self.copies = copies
        self.written: Future[None] = Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the caller's stream wait; its host waits until gloo is done.

        Raises:
            RuntimeError: Gloo's, such as a time-out.
        """
        self.written.result()
        self.copies.join()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether what was received is on its way into the tensors."""
        return self.written.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done now: it is asked for by those who wait."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


_ProcessGroup: Any = dist.ProcessGroup
"""Untyped: torch's stubs name arguments as C++ does, in each version anew."""


class StagedGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives through host memory.

    One thread issues calls in order; each completes on a thread of its own, so that a send that
    waits for its receiver holds up nothing behind it.
    """

    delay_seconds = 0.0
    """How much later tensors are read and written; makes missing waits certain to show."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.sides: dict[torch.device, torch.cuda.Stream] = {}
        self.calls: queue.Queue[tuple[StagedWork, Issue, list[tuple[Tensor, Tensor]]]] = (
            queue.Queue()
        )
        threading.Thread(target=self._issue_in_order, daemon=True).start()

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "staged"

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """This rank's index in the group."""
        return self._rank

    @property
    def group_name(self) -> str:
        """The name that torch has given the group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def _issue_in_order(self) -> None:
        while True:
            work, issue, pairs = self.calls.get()
            try:
                work.copies.finish_reads()
                issued = issue()
            except Exception as error:
                work.written.set_exception(error)
            else:
                threading.Thread(target=_complete, args=(work, issued, pairs), daemon=True).start()

    def _copies(self, x: Tensor) -> _HostCopies:
        if not x.is_cuda:
            return _HostCopies(self.delay_seconds)
        if x.device not in self.sides:
            self.sides[x.device] = torch.cuda.Stream(x.device)
        return _StreamCopies(self.delay_seconds, self.sides[x.device])

    def _start(
        self, copies: _HostCopies, issue: Issue, pairs: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> StagedWork:
        """Queue a call whose host results are copied back into `pairs` (tensor, host)."""
        work = StagedWork(copies)
        self.calls.put((work, issue, list(pairs)))
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        """All-reduce of each tensor, in place."""
        return self._reduced(tensors, _reduce_op(opts), self._all_reduce)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        """The same."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        """Reduce to `opts.rootRank`; elsewhere the tensor is overwritten too, as NCCL may."""
        return self.allreduce(tensors, opts)

    def _all_reduce(self, host: Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.gloo.allreduce([host], options)

    def _reduced(
        self, tensors: list[Tensor], op: Any, reduce: Callable[[Tensor, Any], Any]
    ) -> StagedWork:
        own = [x.data for x in tensors]
        copies = self._copies(own[0])
        hosts = [copies.to_host(x) for x in own]
        return self._start(
            copies, lambda: _Together([reduce(x, op) for x in hosts]), list(zip(own, hosts))
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        """Broadcast from `opts.rootRank`."""
        (x,) = (x.data for x in tensors)
        copies, root = self._copies(x), opts.rootRank
        host = copies.to_host(x, read=self._rank == root)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        back = [] if self._rank == root else [(x, host)]
        return self._start(copies, lambda: self.gloo.broadcast([_bytes(host)], options), back)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> StagedWork:
        """All-gather into a list."""
        own, into = inputs[0].data, [x.data for x in outputs[0]]
        copies = self._copies(own)
        host, gathered = copies.to_host(own), [copies.to_host(x, read=False) for x in into]
        return self._start(
            copies,
            lambda: self.gloo.allgather([[_bytes(x) for x in gathered]], [_bytes(host)]),
            list(zip(into, gathered)),
        )

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StagedWork:
        """All-gather into one tensor, which may hold `given`."""
        return self.allgather([list(output.data.view(-1).chunk(self._size))], [given.view(-1)])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StagedWork:
        """Reduce-scatter from one tensor, of which `output` may be this rank's part."""
        into, own = output.data.view(-1), given.data
        copies, op = self._copies(own), _reduce_op(opts)
        host = copies.to_host(own)
        part = host.view(-1).chunk(self._size)[self._rank]
        return self._start(copies, lambda: self._all_reduce(host, op), [(into, part)])

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> StagedWork:
        """Reduce-scatter from a list."""
        return self.reduce_scatter_single(outputs[0], torch.stack(inputs[0]), opts)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> StagedWork:
        """All-to-all of rows, with counts or even."""
        into, own = output.data, given.data
        copies = self._copies(own)
        host, result = copies.to_host(own), copies.to_host(into, read=False)
        counts = list(received or []), list(sent or [])
        return self._start(
            copies, lambda: self.gloo.alltoall_base(result, host, *counts), [(into, result)]
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> StagedWork:
        """Several all-gathers, one after another; the last one's handle is for all."""
        return self._last([self.all_gather_single(o, i) for o, i in zip(outputs, inputs)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> StagedWork:
        """Several reduce-scatters, one after another; the last one's handle is for all."""
        return self._last([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)])

    def _last(self, works: list[StagedWork]) -> StagedWork:
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StagedWork:
        """Send to index `peer` of the group."""
        own = tensors[0].data
        copies = self._copies(own)
        host = copies.to_host(own)
        return self._start(copies, lambda: self.gloo.send([_bytes(host)], peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StagedWork:
        """Receive from index `peer` of the group."""
        into = tensors[0].data
        copies = self._copies(into)
        host = copies.to_host(into, read=False)
        return self._start(
            copies, lambda: self.gloo.recv([_bytes(host)], peer, tag), [(into, host)]
        )

    def barrier(self, opts: Any = None) -> StagedWork:
        """Barrier of the hosts."""
        return self._start(_HostCopies(0.0), self.gloo.barrier)

    # Names up to torch 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Together:
    """Several of gloo's works as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _complete(work: StagedWork, issued: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Wait for gloo, and copy back what was received."""
    try:
        issued.wait()
        work.copies.write_back(pairs)
    except Exception as error:
        work.written.set_exception(error)
        return
    work.written.set_result(None)
    work.copies.finish_writes()


def _bytes(host: Tensor) -> Tensor:
    """The same memory as bytes: what only moves data takes every dtype."""
    return host.view(-1).view(torch.uint8)


def _reduce_op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


if not hasattr(dist.Backend, "STAGED"):
    dist.Backend.register_backend("staged", _create, devices=["cpu", "cuda"])
