"""One rank on which a microbatch runs symbolically: its allocations, collectives and work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.costmodel.communication.gradient_buffers import GradientBuffers
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.allocation_tape import AllocationTape, Storage
from workbench.costmodel.operators.symbolic_autograd import BackwardFn, Node, SymbolicTensor, leaf
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.runtime_facts.cast_sizes import GRADIENT_CAST_NUMEL


class GridCall(NamedTuple):
    """A collective over some axes of the grid."""

    kind: str
    axes: tuple[int, ...]
    """Of the grid, outermost first."""
    dtype: str
    bytes: float
    """Bytes of the full tensor."""
    action: str
    """F or B."""


class AxisCall(NamedTuple):
    """A collective over another axis of the mesh."""

    axis: str
    link: str
    """As `CollectiveCall.link` has it."""
    kind: str
    group_size: float
    dtype: str
    bytes: float
    action: str
    """F or B."""


class Work(NamedTuple):
    """Something that a rank computes."""

    kind: str
    """What: one of those that `compute/operator_seconds.py` prices."""
    direction: str
    """forward or backward."""
    sizes: tuple[float, ...]
    """Elements, as that kind counts them."""


class DeferredProduct(NamedTuple):
    """Operands of a deferred weight gradient, as `parallel/pipeline/zero_bubble.py` keeps them."""

    x: SymbolicTensor
    gradient: SymbolicTensor
    weight: SymbolicTensor
    bias: SymbolicTensor | None


@dataclass
class DeferredWeights:
    """What backward leaves for W."""

    products: list[DeferredProduct] = field(default_factory=list)
    """In the order in which they were deferred."""
    of_other_layers: list[Storage] = field(default_factory=list)
    """Those of the layers that one stands for."""

    def outlive_action(self) -> None:
        """Count them as activations once their action is over, as those of a forward are."""
        operands = (x for product in self.products for x in (product.x, product.gradient))
        for storage in (*(x.storage for x in operands), *self.of_other_layers):
            storage.outlives_as("activations")


@dataclass
class SymbolicRank:
    """A rank of a plan with operator strategies."""

    w: Workload
    """Of the plan; widths of tensor ranks in it mean nothing here."""
    sides: tuple[int, ...]
    """Of the grid that tensor ranks are, outermost first."""
    least: LeastRedistribution
    """Chooses the steps of each redistribution, as the runtime does."""
    tape: AllocationTape = field(default_factory=AllocationTape)
    calls: Counter[GridCall] = field(default_factory=Counter)
    axis_calls: Counter[AxisCall] = field(default_factory=Counter)
    work: Counter[tuple[str, Work]] = field(default_factory=Counter)
    """(action, what is computed in it) -> how often."""
    action: str = "F"
    records: bool = True
    """Whether what runs is recorded for backward."""
    recomputes: bool = False
    """Whether what runs is recomputed, or will be."""
    last_saving: str = ""
    """While a module is recomputed: its last operator that saves a tensor."""
    made_once: list[SymbolicTensor] | None = None
    """While a module that is to be recomputed runs forward: what is not computed twice."""
    repeated: list[SymbolicTensor] | None = None
    """While it is recomputed: the same."""
    is_over: bool = False
    """Whether recomputation has saved its last tensor: torch stops there."""
    repeats: dict[str, int] = field(default_factory=dict)
    """Part of the stage -> layers that it stands for."""
    deferred: DeferredWeights | None = None
    """Weight gradients that wait for W; None: backward is not split."""
    buffers: GradientBuffers | None = None
    """Buffers that gradients are copied into; None: they are counted elsewhere."""

    def enter(self, part: str) -> None:
        """Name the part of the stage that runs now."""
        self.tape.part = part

    def empty(self, shape: Sequence[int], element_bytes: int | None = None) -> SymbolicTensor:
        """A new tensor, of the plan's dtype by default."""
        size = self.w.element_bytes if element_bytes is None else element_bytes
        if self.is_over:
            return SymbolicTensor(self.tape.allocate(0), tuple(shape), size)
        return SymbolicTensor(self.tape.allocate(math.prod(shape) * size), tuple(shape), size)

    def like(self, x: SymbolicTensor, element_bytes: int | None = None) -> SymbolicTensor:
        """A new tensor of the shape of `x`."""
        return self.empty(x.shape, element_bytes or x.element_bytes)

    def parameter(self, *shape: int, name: str = "") -> SymbolicTensor:
        """A parameter, whose bytes are counted elsewhere."""

        def accumulate(gradient: SymbolicTensor) -> None:
            if self.buffers is not None:
                self.buffers.accumulate(name)
            self.accumulate(gradient)

        node = leaf(accumulate, self.tape.part, self._accumulated)
        return SymbolicTensor(self.tape.allocate(0), shape, self.w.element_bytes, node)

    def _accumulated(self) -> None:
        if self.buffers is not None:
            self.buffers.reduce_complete()

    def node(
        self,
        backward: BackwardFn,
        *inputs: SymbolicTensor | None,
        outputs: int = 1,
        takes_list: bool = False,
    ) -> Node | None:
        """The node of an operator's outputs; None where no gradient is needed."""
        edges = tuple(None if x is None or x.node is None else (x.node, x.output) for x in inputs)
        if not self.records or not any(edges):
            return None
        return Node(edges, backward, self.tape.part, outputs, takes_list)

    def made(
        self, y: SymbolicTensor, backward: BackwardFn, *inputs: SymbolicTensor | None
    ) -> SymbolicTensor:
        """The one output of an operator."""
        return replace(y, node=self.node(backward, *inputs), output=0)

    def compute(self, kind: str, *sizes: float) -> None:
        """Record work, and that of its backward."""
        if not self.is_over:
            self.work[self.action, Work(kind, "forward", sizes)] += self._times
        if self.records:
            self.work["B", Work(kind, "backward", sizes)] += self._times

    def call(self, kind: str, axes: tuple[int, ...], dtype: str, num_bytes: float) -> None:
        """Record a collective."""
        if not self.is_over:
            self.calls[GridCall(kind, axes, dtype, num_bytes, self.action)] += self._times

    def call_axis(self, call: AxisCall) -> None:
        """Record a collective over another axis."""
        if not self.is_over:
            self.axis_calls[call] += self._times

    def saved_by(self, operator: str) -> None:
        """An operator has saved what its backward reads, and computes only now."""
        self.is_over |= operator == self.last_saving != ""

    @property
    def _times(self) -> int:
        """Layers that the part stands for which runs now."""
        return self.repeats.get(self.tape.part, 1)

    @property
    def accumulates_in_place(self) -> bool:
        """Whether a gradient is added to its bucket as it is."""
        same = float(self.w.gradient_element_bytes) == self.w.element_bytes
        return same or self.w.fixed.gpu.device == "cuda"

    def accumulate(self, gradient: SymbolicTensor) -> None:
        """Add a parameter's gradient to its bucket: another dtype is cast piece by piece on CPU."""
        self.tape.allocate(0)  # where the gradient is live beside its bucket
        if not self.accumulates_in_place:
            pieces = min(gradient.numel, GRADIENT_CAST_NUMEL)
            self.tape.allocate(pieces * float(self.w.gradient_element_bytes))
