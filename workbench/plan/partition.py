"""Which blocks each pipeline stage holds: as many as make its cost even with the others'."""

from __future__ import annotations

from workbench.plan.parameters import block_matrices
from workbench.plan.shape import Shape


def costs(shape: Shape, sequence: int) -> tuple[float, list[float], float]:
    """Forward multiply-adds a token of (embedding, each block, head); `sequence` in tokens.

    The embedding is a lookup: it moves one row and multiplies nothing. Attention counts the causal half of its scores.
    """
    attention = shape.q_width * min(sequence, shape.window or sequence)
    dense = min(shape.layers, shape.moe.first_dense) if shape.moe else shape.layers
    first, last = (float(block_matrices(shape, layer) + attention) for layer in (0, shape.layers - 1))
    return 0.0, [first] * dense + [last] * (shape.layers - dense), float(shape.hidden * shape.vocab)


def balanced(shape: Shape, stages: int, sequence: int) -> list[int]:
    """Blocks of each of `stages` stages, by giving each block to the cheapest stage; the head weighs on the last.

    Exact when all blocks cost the same; leading dense blocks of a mixture of experts count as the mean. Of equal stages
    the later takes the block: under 1F1B earlier stages hold more microbatches in flight.
    """
    assert 1 <= stages <= shape.layers, "legality is checked before"
    embedding, blocks, head = costs(shape, sequence)
    mean = sum(blocks) / len(blocks)
    counts = [1] * stages
    load = [mean] * stages
    load[0] += embedding
    load[-1] += head
    for _ in range(shape.layers - stages):
        stage = min(range(stages), key=lambda s: (load[s], -s))
        counts[stage] += 1
        load[stage] += mean
    return counts


def partition(shape: Shape, wanted: str | list[int], stages: int, sequence: int) -> str | list[int]:
    """`wanted` as blocks a stage where it is legal; as it was where it is not, for `check` to say why."""
    if isinstance(wanted, list) or stages > shape.layers:
        return wanted
    if wanted == "balanced":
        return balanced(shape, stages, sequence)
    return [shape.layers // stages] * stages if shape.layers % stages == 0 else wanted
