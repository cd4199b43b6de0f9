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

Price = Callable[[str, float, tuple[int, ...]], int]
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
                    real = alike.expanded(axes)
                    prices[asked] = 0 if kind == "slice" else self.price(kind, asked[1], real)
                cost = time + prices[asked], calls + (kind != "slice"), count + 1
                least = min(best.get(target, NEVER), best.get(alike.wanted, NEVER))
                if cost < least:
                    serial += 1
                    best[target], came[target] = cost, (layout, move)
                    heapq.heappush(queue, (*cost, serial, target))
        return self._path(alike, came, size)

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
