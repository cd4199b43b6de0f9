"""What of a split dim a tensor rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import MeshAxis
from workbench.plan.head_split import dealt
from workbench.plan.model_shape import Shape


@dataclass(frozen=True)
class Cut:
    """Entries [start, stop) of a dim, kept along `axis`, with room for more, which stay zero.

    It is `piece` of `pieces` different ones: fewer than ranks where several keep the same.
    """

    axis: MeshAxis
    start: int
    stop: int
    room: int
    piece: int
    pieces: int

    @classmethod
    def even(cls, length: int, axis: MeshAxis, unit: int = 1) -> Cut:
        """Equal pieces, multiples of `unit`, the last ones padded."""
        room = -(-length // (axis.size * unit)) * unit
        start, stop = (min((axis.index + n) * room, length) for n in (0, 1))
        return cls(axis, start, stop, room, axis.index, axis.size)

    @classmethod
    def heads(cls, name: str, shape: Shape, axis: MeshAxis) -> Cut:
        """Of attention's projection `name` (q, k, v or o): whole heads, padded where they cannot be
        dealt evenly.
        """
        deal, width = dealt(shape, axis.size, axis.index), int(shape.head_dim or 0)
        if name in ("q", "o"):
            return cls(
                axis,
                deal.query[0] * width,
                deal.query[1] * width,
                deal.room * width,
                axis.index,
                axis.size,
            )
        return cls(
            axis,
            deal.kv[0] * width,
            deal.kv[1] * width,
            deal.kv_room * width,
            deal.piece,
            deal.pieces,
        )

    @property
    def kept(self) -> int:
        """Entries that are no padding."""
        return self.stop - self.start

    def of(self, layout: Layout, dim: int) -> Layout:
        """The layout cut along `dim`."""
        shared = self.pieces < self.axis.size
        again = shared and self.kept > 0 and self.axis.index % (self.axis.size // self.pieces) > 0
        return layout.cut(dim, self.axis, (self.start, self.stop), self.room, again)
