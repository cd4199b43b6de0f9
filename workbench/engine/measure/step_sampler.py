"""Observers of a step: its current action; on sampled steps memory and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from workbench.engine.measure.live_memory import UNCOUNTED, LiveBytes
from workbench.engine.measure.memory_window import MemoryMeter, MemoryWindow, StepCounters
from workbench.engine.measure.own_time import PhaseTimes
from workbench.engine.session import Session
from workbench.parallel.mesh import GRADIENT_GROUP_SUFFIX, Mesh
from workbench.profile import ALLOCATED
from workbench.schedules import Action
from workbench.vocabulary import FRAGMENTATION, OUTSIDE

STEP, STEP_END = "initialised", "after_optimizer"
"""Marks of a step's start, when only persistent tensors exist, and of its end."""


FIRST_SAMPLES = 2
"""Steps whose memory is always sampled: the first, and the first of the steady state. The step
after them is timed.
"""


def observed_by(done: int, every: int) -> Literal["memory", "timeline", ""]:
    """What is measured of the step after `done` others of this launch: its memory, its timeline or
    neither.

    Never both: sampling memory runs Python at every operator, and the timeline would show that.

    Args:
        done: Steps done before.
        every: The plan's `telemetry.memory_every`.
    """
    every = max(every, 2) if every else 0
    if done < FIRST_SAMPLES or (every and done % every == 0):
        return "memory"
    return "timeline" if done == FIRST_SAMPLES or (every and done % every == 1) else ""


class ActionTracker:
    """Tracks the rank's current action, for error reports, and its own time by phase, where that
    is measured.
    """

    def __init__(self) -> None:
        self.current = ""
        self.phases: PhaseTimes | None = None

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """Record the label."""
        self.current = label
        if self.phases is not None:
            self.phases.begin(action.kind if action else label)
        return nullcontext()

    def moment(self, name: str) -> None:
        """Record the moment."""
        self.current = name


class StepSampler(ActionTracker):
    """Measures one step: live bytes by category, and collectives.

    Args:
        session: The session whose step is measured.
        meter: The allocator's meter, whose window is marked at each moment; None without one.
        live: What counts the bytes; None: a counter of this step alone.
    """

    def __init__(
        self, session: Session, meter: MemoryMeter | None, live: LiveBytes | None = None
    ) -> None:
        super().__init__()
        self.session, self.meter = session, meter
        self.live = LiveBytes(session.device) if live is None else live
        self.stage = session.first_stage
        self._stages: dict[str, int] = {}
        """Moment -> the stage that was computing."""
        self._peak = 0

    @contextmanager
    def step(self, batch: Iterable[Tensor] = ()) -> Iterator[None]:
        """A context around one step; `batch` are its tokens and targets, which a pipeline stage
        holds whether or not it reads them.
        """
        with ExitStack() as stack:
            stack.enter_context(self.live)
            for category, tensors in persistent_tensors(self.session).items():
                self.live.register(tensors, category)
            for tensors in host_tensors(self.session).values():
                self.live.register(tensors, UNCOUNTED)
            if (offload := self.session.part.activation_offload) is not None:
                stack.enter_context(
                    offload.watched(partial(self.live.register, category=UNCOUNTED))
                )
            self.live.register(batch, "overhead")
            if (head := self.session.part.head) is not None:
                stack.callback(_logits_scope(head, self.live))
            self.live.restart()
            self.moment(STEP)
            yield

    @contextmanager
    def action(self, label: str, action: Action | None) -> Iterator[None]:
        """Count one action."""
        super().action(label, action)
        if (starts := self.session.part.samples.starts_of_step) is not None:
            self.live.register((starts,), "overhead")
        with self.live.action(action.kind if action else label):
            yield
            if action and action.kind == "I":
                self.live.register(self.session.executor.deferred_tensors(action), "activations")
        peak = sum(self.live.peak.values())
        if action and peak > self._peak:
            self._stages["peak"] = action.stage
        self._peak = peak
        if action and action.kind == "F" and "forward_end" not in self._stages:
            self._stages["forward_end"] = action.stage
            self.moment("forward_end")

    def moment(self, name: str) -> None:
        """Record the memory levels at a moment."""
        super().moment(name)
        self.live.snapshot(name)
        if self.meter is not None:
            self.meter.mark(name)

    def memory_rows(self) -> list[dict[str, Any]]:
        """Rows of the memory frame by category.

        `stage` is the one that was computing, else the rank's first. Bytes on the host are the same
        at every moment.
        """
        rows = [
            row | {"stage": self._stages.get(row["moment"], self.stage)}
            for row in self.live.memory_rows(self.stage)
        ]
        sizes = {
            category: _bytes(tensors) for category, tensors in host_tensors(self.session).items()
        }
        moments = dict.fromkeys((row["stage"], row["moment"]) for row in rows)
        return rows + [
            {"stage": stage, "moment": moment, "tier": "host", "category": category, "bytes": size}
            for stage, moment in moments
            for category, size in sizes.items()
            if size
        ]

    def collective_rows(self) -> list[dict[str, Any]]:
        """Rows of the collectives frame."""
        counts: Counter[tuple[tuple[str, Any], ...]] = Counter()
        for row in self.live.collective_rows(reported_axes(self.session.mesh)):
            often = row.pop("count")
            counts[tuple((row | as_reported(row)).items())] += often
        return [{**dict(row), "count": count} for row, count in counts.items()]


def axis_groups(mesh: Mesh) -> list[tuple[dist.ProcessGroup, str]]:
    """Process groups, each with the axis that its collectives are reported under."""
    return [
        (group, axis.reported)
        for axis in mesh.axes.values()
        for group in (axis.group, *axis.pair_groups.values())
        if group
    ]


def reported_axes(mesh: Mesh) -> dict[str, str]:
    """Process group's name -> the axis that its collectives are reported under."""
    return {str(group.group_name): reported for group, reported in axis_groups(mesh)}


def as_reported(row: dict[str, Any]) -> dict[str, Any]:
    """Changes of a row's axis or action.

    Clipping is over the world, though a mesh of one axis uses that axis' group; I (input gradient)
    reports as B; sends and receives of one batch are P2P.
    """
    if row["action"] == "CLIP":
        return {"axis": "world"}
    if row["action"] == "I":
        return {"action": "B"}
    if row["axis"].endswith(GRADIENT_GROUP_SUFFIX):
        return {"axis": row["axis"].removesuffix(GRADIENT_GROUP_SUFFIX)}
    return (
        {"action": "P2P"} if row["axis"] == "pipeline" and row["kind"] in ("send", "recv") else {}
    )


def persistent_tensors(session: Session) -> dict[str, list[Tensor]]:
    """Tensors that live on the device as long as the session, by memory category."""
    return session.part.store.persistent() | _states(session, on_host=False)


def host_tensors(session: Session) -> dict[str, list[Tensor]]:
    """Tensors that live in host memory as long as the session (offload), by memory category."""
    store, scratch = session.part.store, session.optimizer.scratch
    found = {"activations": _offloaded_activations(session)}
    if store.host is None:
        return found
    temporary = [] if scratch is None else [scratch.buffer]
    found |= store.host.persistent() | _states(session, on_host=True) | {"temporary": temporary}
    return found | {"parameters": found["parameters"] + store.frozen_on_host()}


def _offloaded_activations(session: Session) -> list[Tensor]:
    offload = session.part.activation_offload
    return [] if offload is None else offload.buffers


def _states(session: Session, on_host: bool) -> dict[str, list[Tensor]]:
    optimizer = session.optimizer
    states = [s for n, s in optimizer.state().items() if optimizer.is_on_host(n) == on_host]
    return {
        "optimizer": [x for state in states for kind, x in state.items() if kind != "master"],
        "master": [state["master"] for state in states if "master" in state],
    }


def _bytes(tensors: list[Tensor]) -> int:
    storages = {id(storage): storage.nbytes() for storage in (x.untyped_storage() for x in tensors)}
    return sum(storages.values())


def _logits_scope(head: nn.Module, live: LiveBytes) -> Callable[[], None]:
    """Count allocations of the head's forward as logits; returns a function that ends that."""
    scopes: list[ExitStack] = []

    def enter(*_: object) -> None:
        scopes.append(ExitStack())
        scopes[-1].enter_context(live.category("logits"))

    def leave(*_: object) -> None:
        scopes.pop().close()

    handles = [head.register_forward_pre_hook(enter), head.register_forward_hook(leave)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def allocated_rows(window: MemoryWindow, stage: int) -> list[list[dict[str, Any]]]:
    """The allocator's totals in a window: per step a list of rows of category `allocated`."""
    steps: list[list[dict[str, Any]]] = []
    for section in window.sections:
        if section.label == STEP:
            steps.append([_total(stage, "peak", 0)])
        if steps:
            steps[-1][0]["bytes"] = max(steps[-1][0]["bytes"], section.peak)
            steps[-1].append(_total(stage, section.label, section.start))
    return steps


@dataclass
class SampledStep:
    """A step whose memory was sampled, until its window ends."""

    step: int
    sampler: StepSampler
    counters: StepCounters = field(default_factory=StepCounters)

    def memory_rows(self, allocated: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of the memory frame, from the allocator's totals of this step, `allocated`."""
        if self.counters.max_memory_allocated is not None:
            # Every step's own record says what is allocated at its end.
            allocated = [row for row in allocated if row["moment"] != STEP_END]
        own = self.sampler.memory_rows()
        return [*allocated, *own, *_unallocated_rows(self.counters, self.sampler.stage)]


def _unallocated_rows(counters: StepCounters, stage: int) -> list[dict[str, Any]]:
    """Bytes on the device that torch's allocator has not handed out, where they are counted: what
    it reserved beyond its peak, and what the process holds outside of it.
    """
    sizes = {OUTSIDE: counters.outside_allocator}
    if counters.max_memory_reserved is not None and counters.max_memory_allocated is not None:
        sizes[FRAGMENTATION] = counters.max_memory_reserved - counters.max_memory_allocated
    return [
        _total(stage, moment, size, category)
        for moment in ("peak", "maximum")
        for category, size in sizes.items()
        if size is not None
    ]


def _total(stage: int, moment: str, size: int, category: str = ALLOCATED) -> dict[str, Any]:
    return {"stage": stage, "moment": moment, "tier": "device", "category": category, "bytes": size}
