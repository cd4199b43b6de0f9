"""Which blocks each pipeline stage holds: as many as make its cost even with the others'."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import block_matrices, prediction_matrices


def costs(shape: Shape, sequence: int) -> tuple[float, list[float], float]:
    """Forward multiply-adds a token of (embedding, each block, head); `sequence` in tokens.

    The embedding is a lookup: it moves one row and multiplies nothing. Attention counts the causal
    half of its scores.
    """
    attention = shape.q_width * shape.attended_keys(sequence)
    dense = min(shape.layers, shape.moe.first_dense) if shape.moe else shape.layers
    first, last = (
        float(block_matrices(shape, layer) + attention) for layer in (0, shape.layers - 1)
    )
    head = float(shape.hidden * shape.vocab + prediction_matrices(shape))
    return 0.0, [first] * dense + [last] * (shape.layers - dense), head


def balanced(
    shape: Shape, stages: int, sequence: int, replicas: Sequence[int] | None = None
) -> list[int]:
    """Blocks of each of `stages` stages, so that the costliest stage costs least; the head weighs
    on the last.

    A stage shares its cost between its `replicas` (DAPPLE, 2007.01045). Of equal ways the later
    stages take more blocks: under 1F1B earlier stages hold more microbatches in flight.
    """
    assert 1 <= stages <= shape.layers, "legality is checked before"
    embedding, blocks, head = costs(shape, sequence)
    if replicas is not None:
        return dealt(blocks, stages, embedding, head, [1 / count for count in replicas])
    if len(set(blocks)) > 1:
        return dealt(blocks, stages, embedding, head)
    # Equal blocks: one by one to the cheapest stage is exact.
    counts, load = [1] * stages, [blocks[0]] * stages
    load[0] += embedding
    load[-1] += head
    cheapest = [(cost, -stage) for stage, cost in enumerate(load)]
    heapify(cheapest)
    for _ in range(shape.layers - stages):
        cost, last = cheapest[0]
        counts[-last] += 1
        heapreplace(cheapest, (cost + blocks[0], last))
    return counts


def dealt(
    blocks: list[float],
    stages: int,
    first: float = 0.0,
    last: float = 0.0,
    parts: Sequence[float] | None = None,
) -> list[int]:
    """Consecutive blocks a stage whose costliest stage costs least: dynamic programming over cut
    points, exact.

    `blocks` are costs, estimated or measured, of each block in order; `first` and `last` weigh on
    the end stages; of a stage's cost its part counts, all of it by default. Of equal ways the one
    that leaves earlier stages fewer blocks.
    """
    assert 1 <= stages <= len(blocks), "at least a block a stage"
    count, sums = len(blocks), [0.0, *accumulate(blocks)]
    parts = parts or [1.0] * stages
    alone = last if stages == 1 else 0.0
    best = [parts[0] * (sums[end] + first + alone) for end in range(count + 1)]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0.0
        legal = range(stage + 1, count - (stages - 1 - stage) + 1)
        best, cut = _with_a_stage(best, sums, legal, extra, parts[stage])
        cuts.append(cut)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends = [0, *reversed(ends)]
    return [after - before for before, after in pairwise(ends)]


def _with_a_stage(
    best: list[float], sums: list[float], ends: range, extra: float, part: float
) -> tuple[list[float], list[int]]:
    """(least cost of the costliest stage, where the last one begins) by the block before which it
    ends, of one stage more than `best` is of.
    """
    now, cut = [float("inf")] * len(best), [0] * len(best)
    # Cuts that no later one beats: what comes before costs more from each to the next, the stage
    # less, so that the best is where the two cross or one before.
    front: list[int] = []
    for end in ends:
        while front and best[front[-1]] > best[end - 1]:
            front.pop()
        front.append(end - 1)
        own = partial(_own_cost, sums, end, extra, part)
        crossing = bisect_left(front, True, key=lambda at: best[at] >= own(at))
        near = front[max(0, crossing - 1) : crossing + 1]
        now[end], cut[end] = min((max(best[at], own(at)), at) for at in near)
    return now, cut


def _own_cost(sums: list[float], end: int, extra: float, part: float, at: int) -> float:
    """Of the stage from block `at` to before `end`."""
    return part * (sums[end] - sums[at] + extra)


def partition(
    shape: Shape,
    wanted: str | list[int],
    stages: int,
    sequence: int,
    replicas: Sequence[int] | None = None,
) -> str | list[int]:
    """`wanted` as blocks a stage where it is legal; as it was where it is not, for `check` to say
    why.
    """
    if isinstance(wanted, list) or stages > shape.layers:
        return wanted
    if wanted == "balanced":
        unequal = (
            replicas if replicas and len(replicas) == stages and len(set(replicas)) > 1 else None
        )
        return balanced(shape, stages, sequence, unequal)
    return _uniform(shape.layers, stages)


def _uniform(layers: int, stages: int) -> str | list[int]:
    return [layers // stages] * stages if layers % stages == 0 else "uniform"


def profile_partition(
    profile: LayerProfile, wanted: str | list[int], stages: int, parts: Sequence[float] | None
) -> str | list[int]:
    """As `partition`, by the times of a layer profile.

    Args:
        profile: The layers.
        wanted: What the plan says.
        stages: Of the pipeline.
        parts: How much of a stage's cost its busiest replica has; None: of all stages as much.
    """
    layers = profile.layers
    if isinstance(wanted, list) or stages > len(layers):
        return wanted
    if wanted == "balanced":
        costs = [layer.forward_s + layer.backward_s for layer in layers]
        return dealt(costs, stages, parts=parts)
    return _uniform(len(layers), stages)
