"""Redistributions on fake tensors: their calls are the priced steps, one by one, and what they
allocate is what the cost model counts.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from tests.parallel.test_redistribution import pairs, redistribution_grid
from workbench.costmodel.operators.allocation_tape import AllocationTape
from workbench.costmodel.operators.redistribution_shapes import redistributed
from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import GridCall, SymbolicRank
from workbench.engine.measure.live_memory import LiveBytes
from workbench.engine.measure.recorded_collective import RecordedCollective
from workbench.parallel.operators.redistribution import RedistributionGrid
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.rehearsal.fake_process_group import fake_tensors, fake_world

LENGTHS = (24, 24, 8)
ELEMENT_BYTES = 8
Call = TypeVar("Call")
Step = tuple[str, int, float]
"""(kind, ranks of the group, bytes of the larger side)."""


class InOrder(Counter[Call]):
    """Counts calls and keeps their order."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Call] = []

    def __setitem__(self, call: Call, count: int) -> None:
        self.order.append(call)
        super().__setitem__(call, count)


@contextmanager
def rehearsed_grid(sizes: tuple[int, ...]) -> Iterator[RedistributionGrid]:
    with fake_world(0, math.prod(sizes)):
        grid = redistribution_grid(sizes, 0)
        with fake_tensors(), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield grid


def local_shape(layout: TensorLayout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // parts for n, parts in zip(LENGTHS, layout.num_parts(sizes)))


def rehearsed(
    grid: RedistributionGrid, held: TensorLayout, wanted: TensorLayout
) -> tuple[list[Step], int]:
    """The calls, and the most bytes that are live."""
    x = torch.empty(local_shape(held, grid.least.sizes), dtype=torch.float64)
    memory = LiveBytes()
    memory.calls = made = InOrder[RecordedCollective]()
    with memory:
        memory.register(x, "activations")
        grid.run(x, held, wanted)
    calls: list[Step] = [(call.kind, call.group_size, call.bytes) for call in made.order]
    return calls, sum(memory.peak.values())


def estimated(
    least: LeastRedistribution, held: TensorLayout, wanted: TensorLayout
) -> tuple[list[Step], float]:
    """The same by the cost model, on shapes."""
    tape = AllocationTape()
    w: Any = SimpleNamespace(dtype="fp64", element_bytes=ELEMENT_BYTES)
    calls = InOrder[GridCall]()
    rank = SymbolicRank(w, least.sizes, least, tape=tape, calls=calls)
    shape = local_shape(held, least.sizes)
    x = SymbolicTensor(tape.allocate(math.prod(shape) * ELEMENT_BYTES), shape, ELEMENT_BYTES)
    redistributed(rank, x, held, wanted)
    tape.end_action("activations")
    made = [
        (call.kind, math.prod(least.sizes[axis] for axis in call.axes), call.bytes)
        for call in calls.order
    ]
    return made, sum(tape.largest[""].values())


@pytest.mark.parametrize(
    ("sizes", "num_dims", "every"),
    [
        ((2, 2), 2, 1),
        ((3, 2), 2, 1),
        pytest.param((2, 2, 2), 3, 16, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 3, 1, marks=pytest.mark.sweep),
    ],
)
def test_a_rehearsal_makes_the_priced_steps(
    sizes: tuple[int, ...], num_dims: int, every: int
) -> None:
    size = math.prod(LENGTHS[:num_dims]) * ELEMENT_BYTES
    with rehearsed_grid(sizes) as grid:
        for held, wanted, gradient in pairs(sizes, num_dims)[::every]:
            for ends in ((held, wanted), (gradient, held.summed)):
                steps = grid.least.steps(*ends, size)
                priced = [
                    (step.kind, math.prod(sizes[axis] for axis in step.axes), step.bytes)
                    for step in steps
                    if step.kind != "slice"
                ]
                found, most = rehearsed(grid, *ends)
                assert found == priced, (ends, steps)
                assert (found, most) == estimated(grid.least, *ends), (ends, steps)
