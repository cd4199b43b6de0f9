"""Redistribution of a tensor from one layout to another, by the steps of least time.

After MindSpore's tensor redistribution and the search of collective sequences in
arXiv:2112.01075 ("Memory-efficient array redistribution through portable collective
communication"). Pricing and the ranks that communicate ask the same function, so that what is
estimated is what is run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from workbench.plan.operators.alike_axes import AlikeAxes, alike_axes
from workbench.plan.operators.redistribution_moves import Kind, Moves, moves
from workbench.plan.operators.tensor_layout import TensorLayout

Axes = tuple[int, ...]
Price = Callable[[str, float, Axes], int]
"""(kind of collective, bytes of its larger side on a rank, axes) -> femtoseconds: of whole numbers
sums in any order tie alike on every rank.
"""
NEVER = (math.inf, 0, 0)


class RedistributionStep(NamedTuple):
    """A slice, which moves nothing, or one collective over the group that spans `axes`."""

    kind: Kind
    axes: tuple[int, ...]
    source: TensorLayout
    target: TensorLayout
    before: float
    """Bytes that a rank holds before."""
    after: float

    @property
    def bytes(self) -> float:
        """Bytes of the larger side, as the collectives frame counts a call."""
        return max(self.before, self.after)


@dataclass(eq=False)
class LeastRedistribution:
    """Redistributions on one mesh. Each is searched once (Dijkstra 1959).

    Args:
        sizes: Of the mesh's axes, outermost first.
        price: By which steps are chosen.
    """

    sizes: tuple[int, ...]
    price: Price
    _known: dict[tuple[TensorLayout, TensorLayout, float], tuple[RedistributionStep, ...]] = field(
        default_factory=dict
    )

    def steps(
        self, held: TensorLayout, wanted: TensorLayout, size: float
    ) -> tuple[RedistributionStep, ...]:
        """The steps of least time, of these the fewest collectives.

        The parts of a dim divide the least common multiple of those that it has in both layouts, so
        that it divides in all between. Where a dim does not divide, who shards it pads it, and
        `size` counts the padding.

        Args:
            held: The layout that the tensor has.
            wanted: The layout that it gets; partial at most over axes that `held` is partial over.
            size: Bytes of the unsharded tensor.
        """
        key = held, wanted, size
        if key not in self._known:
            alike = alike_axes(held, wanted, self.sizes)
            outer = math.prod(self.sizes[axis] for axes in alike.outer for axis in axes)
            self._known[key] = tuple(self._search(alike, size / outer))
        return self._known[key]

    def femtoseconds(self, held: TensorLayout, wanted: TensorLayout, size: float) -> int:
        """Price of `steps`."""
        steps = self.steps(held, wanted, size)
        return sum(self.price(s.kind, s.bytes, s.axes) for s in steps if s.kind != "slice")

    def _search(self, alike: AlikeAxes, size: float) -> list[RedistributionStep]:
        sizes, prices = alike.sizes, partial(self._femtoseconds, alike, {})
        came: dict[TensorLayout, tuple[TensorLayout, Moves]] = {}
        # (femtoseconds, collectives, steps), and a serial number that makes ties deterministic.
        best = {alike.held: (0, 0, 0)}
        queue, serial, done = [(*best[alike.held], 0, alike.held)], 0, set()
        while queue:
            time, calls, count, _, layout = heapq.heappop(queue)
            if layout == alike.wanted:
                break
            if layout in done:
                continue
            done.add(layout)
            before = size / math.prod(layout.num_parts(sizes))
            for step in moves(layout, sizes):
                spent = time + prices(step, max(before, size / step.parts))
                cost = spent, calls + (step.kind != "slice"), count + 1
                if cost >= best.get(alike.wanted, NEVER):
                    continue
                for target in step.layouts(layout, sizes, alike.parts):
                    if target not in done and cost < best.get(target, NEVER):
                        serial += 1
                        best[target], came[target] = cost, (layout, step)
                        heapq.heappush(queue, (*cost, serial, target))
        return self._path(alike, came, size)

    def _femtoseconds(
        self, alike: AlikeAxes, known: dict[tuple[str, float, Axes], int], step: Moves, size: float
    ) -> int:
        """Price of a step; of a tensor the same few are asked for again and again."""
        if step.kind == "slice":
            return 0
        asked = step.kind, size, step.axes
        if asked not in known:
            known[asked] = self.price(step.kind, size, alike.expanded(step.axes))
        return known[asked]

    def _path(
        self, alike: AlikeAxes, came: Mapping[TensorLayout, tuple[TensorLayout, Moves]], size: float
    ) -> list[RedistributionStep]:
        found: list[RedistributionStep] = []
        at = alike.wanted
        while at != alike.held:
            before, step = came[at]
            sides = (size / math.prod(one.num_parts(alike.sizes)) for one in (before, at))
            ends = alike.layout(before), alike.layout(at)
            found.append(RedistributionStep(step.kind, alike.expanded(step.axes), *ends, *sides))
            at = before
        return found[::-1]
