"""Autograd over tensors that have a shape but no entries: what torch's engine keeps, and when it
lets go of it.

Storages are freed by Python's reference counts, as tensors are: a function here holds the locals
that the runtime's function of the same name holds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from workbench.costmodel.operators.allocation_tape import AllocationTape, Storage
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.runtime_facts.tensor_strides import lie_in_order

_numbers = count()


@dataclass(frozen=True, eq=False)
class SymbolicTensor:
    """A tensor on one rank, or a view of one."""

    storage: Storage
    shape: tuple[int, ...]
    element_bytes: int
    node: Node | None = None
    """What computes its gradient; None: it needs none."""
    output: int = 0
    """Which of the node's outputs it is."""
    layout: TensorLayout | None = None
    """How the tensor that it is a shard of lies on the grid (a DTensor); None: it is plain."""
    strides: tuple[int, ...] | None = None
    """Elements between neighbors along each dim; None: its dims lie in memory in their order."""

    @property
    def is_contiguous(self) -> bool:
        """Whether its dims lie in memory in their order, without gaps."""
        return self.strides is None or lie_in_order(self.shape, self.strides)

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.element_bytes

    def detached(self) -> SymbolicTensor:
        """The same storage without a gradient."""
        return replace(self, node=None)


Gradients = Sequence[SymbolicTensor | None]
BackwardFn = Callable[..., Gradients]


@dataclass(eq=False)
class Node:
    """Computes the gradients of some inputs from those of its outputs; what its function refers to
    is saved for backward.
    """

    inputs: tuple[tuple[Node, int] | None, ...]
    backward: BackwardFn | None
    part: str
    outputs: int = 1
    takes_list: bool = False
    """Whether it takes the gradients as one list, which it may empty before it returns."""
    number: float = field(default_factory=lambda: float(next(_numbers)))


def leaf(
    accumulate: Callable[[SymbolicTensor], None], part: str, then: Callable[[], None] = lambda: None
) -> Node:
    """The node of a parameter: takes its gradient as soon as it is complete; `then` is called when
    the gradient is freed.
    """

    def backward(taken: list[SymbolicTensor | None]) -> Gradients:
        gradient = taken.pop()
        if gradient is not None:  # a split backward has deferred it (W)
            accumulate(gradient)
            del gradient
            then()
        return ()

    return Node((), backward, part, takes_list=True, number=math.inf)


def run_backward(tape: AllocationTape, roots: list[tuple[SymbolicTensor, SymbolicTensor]]) -> None:
    """Run backward from roots, given with their gradients, latest node first, and free what each
    has saved; `roots` is emptied.
    """
    arrived: dict[Node, list[SymbolicTensor | None]] = {}
    while roots:
        root, gradient = roots.pop()
        assert root.node is not None
        sums = arrived.setdefault(root.node, [None] * root.node.outputs)
        _add(tape, sums, root.output, gradient)
        del root, gradient
    waiting = _dependencies(arrived)
    # Leaves have one number: the first that is ready is the first to run, as in torch's queue.
    order = count()
    ready = [(-node.number, next(order), node) for node in arrived if not waiting[node]]
    heapq.heapify(ready)
    while ready:
        node = heapq.heappop(ready)[2]
        assert node.backward is not None, "backward ran twice"
        tape.part = node.part
        taken = arrived.pop(node)
        made: Any = node.backward(taken) if node.takes_list else node.backward(*taken)
        taken.clear()
        node.backward = None
        for edge, each in zip(node.inputs, made):
            if edge is None:
                continue
            target, place = edge
            if each is not None:
                _add(tape, arrived.setdefault(target, [None] * target.outputs), place, each)
            waiting[target] -= 1
            if not waiting[target]:
                arrived.setdefault(target, [None] * target.outputs)
                heapq.heappush(ready, (-target.number, next(order), target))
        del made, node
        each = None


def _add(
    tape: AllocationTape, sums: list[SymbolicTensor | None], place: int, gradient: SymbolicTensor
) -> None:
    """Add a gradient to those before it, into a new tensor."""
    before = sums[place]
    if before is not None:
        assert before.layout == gradient.layout, "gradients of unlike layouts"
        gradient = replace(gradient, storage=tape.allocate(gradient.bytes))
    sums[place] = gradient


def _dependencies(roots: Iterable[Node]) -> Counter[Node]:
    """How many gradients each node waits for."""
    found: Counter[Node] = Counter()
    seen, left = {*roots}, [*roots]
    while left:
        for edge in left.pop().inputs:
            if edge is not None:
                found[edge[0]] += 1
                if edge[0] not in seen:
                    seen.add(edge[0])
                    left.append(edge[0])
    return found
