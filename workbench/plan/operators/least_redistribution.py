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
from typing import NamedTuple

from workbench.plan.operators.alike_axes import AlikeAxes, alike_axes
from workbench.plan.operators.redistribution_moves import Kind, Move, moves_within
from workbench.plan.operators.tensor_layout import TensorLayout

Price = Callable[[str, float, tuple[int, ...]], float]
"""(kind of collective, bytes of its larger side on a rank, axes) -> seconds."""
NEVER = (math.inf, 0, 0)
FEMTO = 1e15
"""Times are compared in whole femtoseconds, so that sums in any order tie alike on every rank."""


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
        price: Seconds of a collective.
    """

    sizes: tuple[int, ...]
    price: Price
    _known: dict[tuple[TensorLayout, TensorLayout, float], tuple[RedistributionStep, ...]] = field(
        default_factory=dict
    )

    def steps(
        self, held: TensorLayout, wanted: TensorLayout, size: float
    ) -> tuple[RedistributionStep, ...]:
        """The steps of least seconds, of these the fewest collectives.

        A collective leaves out no neighboring axis that lies as its own do in both layouts and
        could take part: one ring, not several small ones. The parts of a dim divide the least
        common multiple of those that it has in both layouts, so that it divides in all between.
        Where a dim does not divide, who shards it pads it, and `size` counts the padding.

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

    def seconds(self, held: TensorLayout, wanted: TensorLayout, size: float) -> float:
        """Priced time of `steps`."""
        return sum(self.step_seconds(step) for step in self.steps(held, wanted, size))

    def step_seconds(self, step: RedistributionStep) -> float:
        """Priced time of a step."""
        return 0.0 if step.kind == "slice" else self.price(step.kind, step.bytes, step.axes)

    def _search(self, alike: AlikeAxes, size: float) -> list[RedistributionStep]:
        sizes, parts = alike.sizes, alike.parts
        prices: dict[tuple[str, float, tuple[int, ...]], int] = {}
        came: dict[TensorLayout, tuple[TensorLayout, Move]] = {}
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
            for move, in_parts in moves_within(layout, sizes, parts):
                kind, axes, target, _ = move
                if target in done:
                    continue
                asked = kind, max(before, size / in_parts), axes
                if asked not in prices:
                    prices[asked] = self._femtoseconds(kind, asked[1], alike.expanded(axes))
                cost = time + prices[asked], calls + (kind != "slice"), count + 1
                least = min(best.get(target, NEVER), best.get(alike.wanted, NEVER))
                if cost < least and not alike.leaves_out(move, layout):
                    serial += 1
                    best[target], came[target] = cost, (layout, move)
                    heapq.heappush(queue, (*cost, serial, target))
        return self._path(alike, came, size)

    def _femtoseconds(self, kind: Kind, size: float, axes: tuple[int, ...]) -> int:
        return 0 if kind == "slice" else round(self.price(kind, size, axes) * FEMTO)

    def _path(
        self, alike: AlikeAxes, came: Mapping[TensorLayout, tuple[TensorLayout, Move]], size: float
    ) -> list[RedistributionStep]:
        found: list[RedistributionStep] = []
        at = alike.wanted
        while at != alike.held:
            at, move = came[at]
            found.append(
                RedistributionStep(
                    move.kind,
                    alike.expanded(move.axes),
                    alike.layout(at),
                    alike.layout(move.layout),
                    size / math.prod(at.num_parts(alike.sizes)),
                    size / math.prod(move.parts),
                )
            )
        return found[::-1]
