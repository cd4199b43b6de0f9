"""Every computing operator of a step: GEMMs, attention and what is bound by memory, by shape.

What is inside a fused kernel no fake tensor sees; it is counted at its seam, from what its operands
say. Collectives are no compute, and are recorded elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from workbench.costmodel.compute.operator_roofline import Operator, Phase
from workbench.engine.measure.recorded_collective import tensors_in
from workbench.engine.session import Session
from workbench.engine.step_observer import Observer
from workbench.models.host_counts import is_recomputing
from workbench.models.torch_dispatch import TorchDispatchMode
from workbench.rehearsal.call_trace import NAMESPACES
from workbench.rehearsal.module_tracker import ModuleTracker
from workbench.rehearsal.operators.operator_traffic import Traffic, traffic
from workbench.rehearsal.operators.primitive_operators import (
    Call,
    described,
    is_compound,
    primitives,
)
from workbench.rehearsal.replayed_steps import ReplayingExecutor
from workbench.schedules import Action

ActionOf = tuple[str, int, int]
"""(kind, stage, microbatch)."""
ACTION_PHASES: dict[str, Phase] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
GEMMS = {
    "mm": 0,
    "bmm": 0,
    "_grouped_mm": 0,
    "_scaled_mm": 0,
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
}
"""GEMM -> index of its first factor among its arguments."""
ATTENTION = "_scaled_dot_product_"
HEAD_LOSS = "linear_cross_entropy_run"
WRAPPERS = "torchao."
"""Module of tensors that run as operators on what they hold: fp8 data and a scale."""


class OperatorTrace(TorchDispatchMode):
    """Counts a step's operators while it is entered, and passes what it observes on.

    Args:
        inner: The observer of the step.
        executor: Runs it; None: what is counted is no action of a schedule.
        module: Says which class of module computes now.
    """

    def __init__(
        self,
        inner: Observer,
        executor: ReplayingExecutor | None = None,
        module: Callable[[], str] = str,
    ) -> None:
        super().__init__()
        self.inner, self.executor, self.module = inner, executor, module
        self.counts: Counter[tuple[Operator, ActionOf | None]] = Counter()
        """(operator, the action that ran it) -> how often."""
        self._compound: dict[Operator, Call] = {}
        """Kernels of several primitive operators -> a call of each."""
        self._phase: Phase = "optimizer"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind.__module__.startswith(WRAPPERS) for kind in types):
            return NotImplemented  # what it runs comes here, one by one
        out = func(*args, **(kwargs or {}))
        if func.namespace not in (*NAMESPACES, "inductor", "prim"):
            moved = traffic(func, args, kwargs or {}, out)
            if moved is not None:
                for operator in operators_of(func, args, moved, out, self.phase):
                    self._count(replace(operator, module=self.module()), func, args, kwargs or {})
        return out

    def _count(self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        self.counts[operator, self._running] += 1
        if is_compound(func) and operator not in self._compound:
            self._compound[operator] = described(func, args, kwargs)

    @property
    def _running(self) -> ActionOf | None:
        return None if self.executor is None else self.executor.running

    @property
    def phase(self) -> Phase:
        """Part of the step that runs now."""
        return "recompute" if self._phase == "backward" and is_recomputing() else self._phase

    @contextmanager
    def action(self, label: str, action: Action | None) -> Iterator[None]:
        """Count what runs inside to the action's phase."""
        before = self._phase
        if action is not None:
            self._phase = ACTION_PHASES.get(action.kind, before)
        try:
            with self.inner.action(label, action):
                yield
        finally:
            self._phase = before

    def moment(self, name: str) -> None:
        """Pass the moment on."""
        self.inner.moment(name)

    def of_step(self) -> Counter[Operator]:
        """Operators of a whole step, replayed actions included, with their primitive operators."""
        replays = self.executor.replays if self.executor else Counter[ActionOf]()
        return self._counted(lambda action: 1 + replays[action])

    def of_replays(self, replays: Mapping[ActionOf, int]) -> Counter[Operator]:
        """The same of a rank on which every action of the schedule is replayed so often."""
        return self._counted(lambda action: replays.get(action, 0))

    def _counted(self, often: Callable[[ActionOf], int]) -> Counter[Operator]:
        parts = {operator: primitives(call) for operator, call in self._compound.items()}
        found: Counter[Operator] = Counter()
        for (operator, action), count in self.counts.items():
            if own := parts.get(operator):
                operator = replace(operator, primitives=own.number, primitive_bytes=own.bytes)
            found[operator] += count * (often(action) if action else 1)
        return +found


def traced_step(
    session: Session,
    step: int,
    batch: Sequence[Tensor],
    inner: Observer,
    executor: ReplayingExecutor,
) -> OperatorTrace:
    """Run a step on [tokens, targets], and count its operators; `inner` observes it too."""
    stages = list(session.part.stages.values())
    tracker = ModuleTracker(stages)
    kinds = {
        path: type(module).__name__
        for stage in stages
        for path, module in stage.named_modules()
        if path
    }
    trace = OperatorTrace(inner, executor, lambda: kinds.get(tracker.current(), ""))
    with trace, tracker.following():
        session.step(step, batch[0], batch[1], trace)
    for operator in unseen_update(session):
        trace.counts[operator, None] += 1
    return trace


def unseen_update(session: Session) -> list[Operator]:
    """The fused AdamW, which no rehearsal runs: it reads gradients and states, and writes states
    and parameters. Nothing where the update is torch's own.
    """
    if not session.optimizer.rehearses_kernel:
        return []
    found = []
    for name, states in session.optimizer.state().items():
        if session.optimizer.is_on_host(name):
            continue
        value, gradient = (
            session.part.store.values[name],
            session.part.store.optimizer_gradients[name],
        )
        kept = sum(x.nbytes for x in states.values())
        read = gradient.nbytes + kept + (0 if "master" in states else value.nbytes)
        shape = tuple(value.shape)
        found.append(
            Operator(
                "adamw", "memory", "optimizer", shape, _dtype(value), 0, read, kept + value.nbytes
            )
        )
    return found


def operators_of(
    func: Any, args: tuple[Any, ...], moved: Traffic, out: Any, phase: Phase
) -> Iterator[Operator]:
    """The operators that one call is: one, but for kernels that hold GEMMs and a loss.

    Args:
        func: What was called.
        args: Its arguments.
        moved: Bytes that it read and wrote.
        out: Its results.
        phase: Part of the step.
    """
    name = func.overloadpacket.__name__
    if name == HEAD_LOSS:
        yield from _head_loss(args, phase)
    elif name in GEMMS:
        first = GEMMS[name]
        yield gemm(name, args[first], args[first + 1], moved, phase)
    elif name.startswith(ATTENTION) and "math" not in name:
        yield _attention(func, args, moved, phase)
    else:
        largest = max(tensors_in([args, out]), key=lambda x: x.numel())
        dtype = _dtype(largest)
        yield Operator(name, "memory", phase, tuple(largest.shape), dtype, 0, *moved)


def gemm(name: str, a: Tensor, b: Tensor, moved: Traffic, phase: Phase) -> Operator:
    """The GEMM a b, batched or grouped; groups are taken to be of equal rows."""
    batch, rows, inner, columns = 1, a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == 3:
        batch = a.shape[0]
    elif b.dim() == 3:  # rows in groups, each with a matrix of its own
        batch = b.shape[0]
        rows = rows // batch
    elif name == "_grouped_mm":  # the inner dim in groups, each with a result of its own
        groups = moved.written // (rows * columns * a.element_size())
        batch, inner = groups, inner // groups
    dims = batch, rows, columns, inner
    return Operator(name, "gemm", phase, dims, _dtype(a), 2 * prod(dims), *moved)


def _attention(func: Any, args: tuple[Any, ...], moved: Traffic, phase: Phase) -> Operator:
    name = func.overloadpacket.__name__
    backward = name.endswith("backward")
    q, k = args[backward], args[backward + 1]
    batch, heads, queries, head_dim = q.shape
    where = [argument.name for argument in func._schema.arguments].index("is_causal")
    causal = len(args) > where and bool(args[where])  # torch leaves out what is the default
    # QK^T and PV; of a causal block half.
    flops = 4 * batch * heads * queries * k.shape[2] * head_dim // (1 + causal)
    dims = batch, heads, queries, k.shape[2], head_dim
    passes = flops * 5 // 2 if backward else flops
    short = name.removeprefix(ATTENTION)
    return Operator(short, "attention", phase, dims, _dtype(q), passes, *moved, backward)


def _head_loss(args: tuple[Any, ...], phase: Phase) -> Iterator[Operator]:
    """Projection, loss and both gradients of a chunk of tokens."""
    x_ND, weight_VD, _, logits_NV, dx_ND, dw_VD, *_, kernels = args
    (tokens, width), vocab, dtype = x_ND.shape, len(weight_VD), _dtype(x_ND)
    size = x_ND.element_size()
    sides = [((tokens, vocab, width), True), ((tokens, width, vocab), dx_ND is not None)]
    for (m, n, k), is_run in [*sides, ((vocab, width, tokens), dw_VD is not None)]:
        if is_run:
            yield Operator(
                "mm",
                "gemm",
                phase,
                (1, m, n, k),
                dtype,
                2 * m * n * k,
                (m * k + k * n) * size,
                m * n * size,
            )
    # One kernel reads the logits and writes their gradients; two read them twice.
    logits = tokens * logits_NV.shape[1] * size
    read = logits * (1 if kernels == "fused" else 2)
    yield Operator("cross_entropy", "memory", phase, (tokens, vocab), dtype, 0, read, logits)


def _dtype(x: Tensor) -> str:
    name = str(x.dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8") else DTYPES.get(name, name)
