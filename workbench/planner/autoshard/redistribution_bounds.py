"""Seconds of redistribution that no sequence of collectives beats: what a rank has to receive, at
the rate of the fastest axis, or what has to cross each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard.device_mesh import LogicalMesh
from workbench.planner.autoshard.strategy_search.shared_arrays import Array


@dataclass(frozen=True)
class RedistributionBounds:
    """Of one tensor on a mesh of one axis or more."""

    mesh: LogicalMesh
    size: float
    """Bytes of the unsharded tensor."""

    def seconds(self, held: Sequence[TensorLayout], gradients: Sequence[TensorLayout]) -> Array:
        """Seconds of both passes, [held, gradients].

        Args:
            held: Layouts that the tensor has.
            gradients: Layouts of its gradient as the reader leaves it; once they are summed, those
                that the reader wants.
        """
        num_dims = max(len(layout.dims) for layout in (*held, *gradients))
        has = self._parts(held, num_dims)[:, None]
        wants = self._parts(gradients, num_dims)[None]
        both = self.size / np.maximum(has, wants).prod(-1)
        there, back = self.size / wants.prod(-1) - both, self.size / has.prod(-1)
        # Every part of a sum comes from another rank too.
        is_sum = np.array([bool(layout.partial) for layout in gradients])
        received = there, np.where(is_sum, back, back - both)
        crossed = self._crossed(held, gradients)
        forward, backward = map(np.maximum, (n / self.mesh.fastest_rate for n in received), crossed)
        seconds: Array = forward + backward
        return seconds

    def _crossed(
        self, held: Sequence[TensorLayout], gradients: Sequence[TensorLayout]
    ) -> tuple[Array, Array]:
        """Seconds of what has to cross each axis forward and backward, [held, gradients].

        An axis that does not shard the dim that it did takes part in some collective, and so does
        one that held parts of a sum. No rank then holds less than its share over all ranks.
        """
        has, wants = (self._sharded(layouts) for layouts in (held, gradients))
        has, wants, moved = has[:, None], wants[None], has[:, None] != wants[None]
        is_sum = np.array([[a in x.partial for a in range(len(self.mesh.axes))] for x in gradients])
        moving, summing = self._least_seconds
        there = np.where(moved & (has >= 0), moving, 0.0)
        back = np.where(is_sum, summing, np.where(moved & (wants >= 0), moving, 0.0))
        return self._by_link(there), self._by_link(back)

    def _by_link(self, seconds: Array) -> Array:
        """Sums over links of [..., axes]: axes of one link may be one ring, others never are."""
        links = [axis.link for axis in self.mesh.axes]
        first = np.array([links.index(link) for link in links])
        each = [seconds[..., first == link].max(-1) for link in np.unique(first)]
        total: Array = np.sum(each, axis=0)
        return total

    @cached_property
    def _least_seconds(self) -> tuple[Array, Array]:
        """Seconds of the least collective along each axis that moves parts, and that sums them."""
        share, found = self.size / self.mesh.ranks, []
        for a, axis in enumerate(self.mesh.axes):
            gathered = axis.size * share
            sizes = {"all_gather": gathered, "all_to_all": share, "reduce_scatter": gathered}
            found.append([self.mesh.seconds(kind, size, [a]) for kind, size in sizes.items()])
        gather, exchange, scatter = np.array(found).T
        return np.minimum(gather, exchange), scatter

    def _sharded(self, layouts: Sequence[TensorLayout]) -> NDArray[np.int64]:
        """The dim that each axis shards, -1 where it shards none, [layouts, axes]."""
        at = (layout.at(len(self.mesh.axes)) for layout in layouts)
        return np.array([[-1 if dim is None else dim for dim in dims] for dims in at])

    def _parts(self, layouts: Sequence[TensorLayout], num_dims: int) -> Array:
        """Parts of each dim, [layouts, dims]."""
        padded = (layout.of_dims(num_dims) for layout in layouts)
        return np.array([[self.mesh.ranks_over(axes) for axes in x.dims] for x in padded], float)
