"""The grid that tensor ranks are to operator strategies, and shards of parameters along it."""

from __future__ import annotations

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis, operator_axis
from workbench.plan.operators.strategy_form import Placement


class OperatorGrid:
    """The grid that tensor ranks are to operator strategies, as this rank sees it."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.operators is not None
        self.mesh = mesh
        self.axes = [mesh[name] for name in mesh.operator_axes]
        self.names = tuple(axis.name for axis in self.axes)

    def over(self, placement: Placement, name: str) -> list[MeshAxis]:
        """Axes that shard the dimension `name`, outermost first."""
        return [axis for axis, placed in zip(self.axes, placement) if placed == name]

    def joint(self, axes: list[MeshAxis]) -> MeshAxis | None:
        """The axis that spans these neighboring ones; None without any."""
        at = [self.names.index(axis.name) for axis in axes]
        return self.mesh[operator_axis(at)] if at else None

    def shard_over(self, layout: Layout, dim: int, axes: list[MeshAxis]) -> Layout:
        """`layout` sharded evenly along `dim` over several axes, padded where it does not
        divide.
        """
        if not axes:
            return layout
        index, num_shards = joint_index(axes)
        length = layout.slices[dim][1] - layout.slices[dim][0]
        num_local = -(-length // num_shards)
        start = min(index * num_local, length)
        layout = layout.split_at(dim, axes[0], (start, min(start + num_local, length)), num_local)
        for axis in axes[1:]:
            layout = layout.sharded_over(axis.name)
        return layout


def joint_index(axes: list[MeshAxis]) -> tuple[int, int]:
    """(index of this rank, size) on several axes taken as one, outermost first."""
    index, size = 0, 1
    for axis in axes:
        index, size = index * axis.size + axis.index, size * axis.size
    return index, size
