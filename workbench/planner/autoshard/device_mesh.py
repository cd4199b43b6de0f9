"""The device mesh that operators are split over, and what its collectives cost (alpha-beta
rings).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.errors import refuse
from workbench.plan.operator_strategy import factors

SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0}
"""Times (n-1)/n of its bytes that a rank sends, by kind: of the sum, of the gathered tensor, of the
rank's own part.
"""

MOST_RANKS = 256
"""Plain ranks beyond which the strategies of an operator are too many; a grid has few at any size.
"""


@dataclass(frozen=True)
class Machine:
    """What a rank can do; `bandwidth` and `latency` may be one an axis of a grid, outermost
    first.
    """

    flops: float
    """Floating point operations a second that matrix products reach."""
    bandwidth: float | tuple[float, ...]
    """Bytes a second that a rank sends."""
    latency: float | tuple[float, ...]
    """Seconds a hop."""
    memory_bandwidth: float = math.inf
    """Bytes a second that operators without reuse reach."""

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory_bandwidth"):
            if not all(value > 0 for value in each(getattr(self, name))):
                raise refuse(f"machine.{name}", f"is {getattr(self, name)}; legal: numbers above 0")
        if not all(0 <= value < math.inf for value in each(self.latency)):
            raise refuse("machine.latency", f"is {self.latency}; legal: seconds, 0 or more")


def each(value: float | tuple[float, ...]) -> tuple[float, ...]:
    """One number or several, as several."""
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh: ranks, bytes a second of one rank, seconds a hop."""

    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Mesh:
    """Ranks as a product of axes, outermost first."""

    axes: tuple[MeshAxis, ...]
    grid: bool
    """The axes are the user's own; else the prime factors of plain ranks."""

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(axis.size for axis in self.axes)

    def ranks_over(self, axes: Iterable[int]) -> int:
        """Ranks of a group that spans these axes."""
        return math.prod(self.axes[a].size for a in axes)

    def seconds(self, kind: str, size: float, axes: Sequence[int]) -> float:
        """One collective over these axes, rings inside first (Thakur et al. 2005); axes of equal
        links are one ring.

        `size` bytes: the tensor that is summed, the tensor once gathered, or a rank's part of what
        is exchanged.
        """
        total, left = 0.0, size
        for n, bandwidth, latency in self._levels(axes):
            total += SHARE[kind] * (n - 1) * (left / n / bandwidth + latency)
            left /= n
        return total

    def _levels(self, axes: Sequence[int]) -> list[tuple[int, float, float]]:
        levels: list[tuple[int, float, float]] = []
        for axis in (self.axes[a] for a in sorted(axes, reverse=True)):
            if levels and levels[-1][1:] == (axis.bandwidth, axis.latency):
                levels[-1] = (levels[-1][0] * axis.size, axis.bandwidth, axis.latency)
            else:
                levels.append((axis.size, axis.bandwidth, axis.latency))
        return levels


def mesh(ranks: int | Sequence[int], machine: Machine) -> Mesh:
    """The mesh of plain ranks, or of a grid such as (nodes, ranks a node). Raises `PlanError`."""
    sizes = [ranks] if isinstance(ranks, int) else list(ranks)
    if not sizes or any(size < 1 for size in sizes):
        raise refuse("ranks", f"is {ranks}; legal: 1 or more, or a grid of such numbers")
    if isinstance(ranks, int):
        if ranks > MOST_RANKS:
            near = 2 ** (ranks.bit_length() // 2)
            raise refuse(
                "ranks",
                f"is {ranks}; legal: up to {MOST_RANKS}, or a grid such as {near}x{ranks // near}",
            )
        sizes = factors(ranks)
    bandwidths, latencies = (
        _along(getattr(machine, name), name, sizes) for name in ("bandwidth", "latency")
    )
    return Mesh(tuple(map(MeshAxis, sizes, bandwidths, latencies)), grid=not isinstance(ranks, int))


def _along(value: float | tuple[float, ...], name: str, sizes: list[int]) -> tuple[float, ...]:
    if not isinstance(value, tuple):
        return (value,) * len(sizes)
    if len(value) != len(sizes):
        raise refuse(
            f"machine.{name}",
            f"has {len(value)} values for {len(sizes)} axes {sizes}; legal: one an axis",
        )
    return value
