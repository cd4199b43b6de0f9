"""The logical mesh that operators are split over (Alpa, arXiv:2201.12023), and its collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from workbench.costmodel.communication.collective_cost import AxisLink, level_seconds
from workbench.costmodel.rates.constants import Constants
from workbench.errors import refuse
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.strategy_form import factors
from workbench.planner.autoshard.machine_model import MachineModel

MAX_RANKS = 256
"""Plain ranks beyond which the strategies of an operator are too many; a grid has few at any
size.
"""


@dataclass(frozen=True)
class LogicalAxis:
    """One axis of the mesh: its ranks, and the link between neighbors along it."""

    size: int
    link: AxisLink


@dataclass(frozen=True)
class LogicalMesh:
    """Ranks as a product of axes, outermost first."""

    axes: tuple[LogicalAxis, ...]
    grid: bool
    """The axes are the user's own; else the prime factors of plain ranks."""
    constants: Constants

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def redistribution(self) -> LeastRedistribution:
        """Redistributions between layouts on this mesh, at its prices; of equal meshes one."""
        return _redistribution(self)

    @cached_property
    def fastest_rate(self) -> float:
        """Bytes/s that no rank receives faster, over any axis."""
        size, kinds = 2.0**50, ("all_gather", "all_to_all", "reduce_scatter")
        rates = [
            size * (1 - 1 / axis.size) / self.seconds(kind, size, [a])
            for a, axis in enumerate(self.axes)
            if axis.size > 1
            for kind in kinds
        ]
        return max(rates, default=math.inf)

    def ranks_over(self, axes: Iterable[int]) -> int:
        """Ranks of a group that spans these axes."""
        return math.prod(self.axes[a].size for a in axes)

    def seconds(self, kind: str, size: float, axes: Sequence[int]) -> float:
        """One collective over these axes; axes of equal links are one ring.

        Args:
            kind: The collective, as `collective_cost.seconds` names it.
            size: Bytes of the tensor that is summed, of the tensor once gathered, or of a rank's
                part of what is exchanged.
            axes: Positions of the axes that the group spans.
        """
        return sum(level_seconds(kind, size, self._levels(axes), self.constants))

    def _femtoseconds(self, kind: str, size: float, axes: Sequence[int]) -> int:
        """By which redistributions are chosen: every axis is a ring of its own, so that no calls
        over some of the axes beat one over all.

        One ring of equal links has more hops than two: small sums would take detours for them. An
        all-to-all is no ring.
        """
        rings = [self._levels([axis])[0] for axis in axes[::-1]]
        levels = self._levels(axes) if kind == "all_to_all" else rings
        return sum(round(1e15 * s) for s in level_seconds(kind, size, levels, self.constants))

    def _levels(self, axes: Sequence[int]) -> list[tuple[int, AxisLink]]:
        levels: list[tuple[int, AxisLink]] = []
        for axis in (self.axes[a] for a in sorted(axes, reverse=True)):
            if levels and levels[-1][1] == axis.link:
                levels[-1] = (levels[-1][0] * axis.size, axis.link)
            else:
                levels.append((axis.size, axis.link))
        return levels


@lru_cache(maxsize=8)
def _redistribution(mesh: LogicalMesh) -> LeastRedistribution:
    """A search for memory, ZeRO or a pipeline asks for the same redistributions many times."""
    return LeastRedistribution(tuple(axis.size for axis in mesh.axes), mesh._femtoseconds)


def logical_mesh(ranks: int | Sequence[int], machine: MachineModel) -> LogicalMesh:
    """The mesh of plain ranks, or of a grid such as (nodes, ranks per node).

    Raises:
        PlanError: No ranks, too many plain ranks, or as many links as there are no axes.
    """
    sizes = [ranks] if isinstance(ranks, int) else list(ranks)
    if not sizes or any(size < 1 for size in sizes):
        raise refuse("--ranks", f"is {ranks}; legal: 1 or more, or a grid of such numbers")
    if isinstance(ranks, int):
        if ranks > MAX_RANKS:
            near = 2 ** (ranks.bit_length() // 2)
            raise refuse(
                "--ranks",
                f"is {ranks}; legal: up to {MAX_RANKS}, or a grid such as {near}x{ranks // near}",
            )
        sizes = factors(ranks)
    links = machine.links * (len(sizes) if len(machine.links) == 1 else 1)
    if len(links) != len(sizes):
        raise refuse(
            "machine.links",
            f"has {len(links)} values for {len(sizes)} axes {sizes}; legal: one per axis",
        )
    grid = not isinstance(ranks, int)
    return LogicalMesh(tuple(map(LogicalAxis, sizes, links)), grid, machine.device.constants)
