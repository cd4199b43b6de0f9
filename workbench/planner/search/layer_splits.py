"""How one layer's work may be cut: sizes of the axes inside a layer, the micro-batch, and what
`plan.check` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from workbench.costmodel.inputs.config import FixedConfig
from workbench.plan.rules import legal_sizes
from workbench.planner.search.search_space import SearchSpace
from workbench.schedules.generators import SCHEDULES


class LayerSplit(NamedTuple):
    """How one layer's work is cut: the knobs that its kernels depend on. They share an axis, for
    few combinations of them are legal together.
    """

    tensor: int
    """Ranks."""
    side: int
    """Of a tensor grid; of 1-D tensor parallelism its ranks."""
    depth: int
    context: int
    expert: int
    micro_batch: int
    sequence: bool

    def size(self, algorithm: str) -> int | list[int]:
        """`strategy.tensor.size` as a plan writes it."""
        grids = {
            "2d": [self.side] * 2,
            "2.5d": [self.side, self.side, self.depth],
            "3d": [self.side] * 3,
        }
        return grids.get(algorithm, self.tensor)


def all_splits(space: SearchSpace, algorithm: str) -> Iterator[LayerSplit]:
    """Every combination of the knobs of a split that some cell may find legal."""
    rest = (space.context, space.expert, space.micro_batch, space.sequence)
    for ranks, side, depth in _tensor_grids(space, algorithm):
        for context, expert, micro_batch, sequence in product(*rest):
            if not sequence or (
                ranks > 1 and algorithm == "1d"
            ):  # one rank has nothing to split, a grid splits it all
                yield LayerSplit(ranks, side, depth, context, expert, micro_batch, sequence)


def _tensor_grids(space: SearchSpace, algorithm: str) -> Iterator[tuple[int, int, int]]:
    """(ranks, side, depth) of each size that is one of `algorithm`."""
    for size in space.tensor:
        if isinstance(size, int):
            if algorithm == "1d":
                yield size, size, 1
        elif len(size) == 2 and algorithm == "2d":
            yield size[0] ** 2, size[0], 1
        elif len(size) == 3 and (algorithm == "2.5d" or (algorithm == "3d" and size[0] == size[2])):
            yield size[0] ** 2 * size[2], size[0], size[2]


def split_divides(s: FixedConfig, split: LayerSplit) -> bool:
    """Whether world, batch and sequence divide as the split asks; `plan.check` says the same of a
    plan.
    """
    t, c, e, b = split.tensor, split.context, split.expert, split.micro_batch
    length, ranks = s.sequence_length, t * c * s.pipeline
    if (
        s.world_size % ranks
        or (s.world_size // (t * s.pipeline)) % e
        or (split.sequence and length // c % t)
    ):
        return False
    if (c > 1 and length % (2 * c)) or b % legal_sizes.token_parts(
        s.algorithm, split.size(s.algorithm)
    ):
        return False
    microbatches, rest = divmod(s.global_batch, b * (s.world_size // ranks))
    if rest or microbatches < 1:
        return False
    return SCHEDULES[s.schedule].takes_microbatches(s.pipeline, microbatches)
