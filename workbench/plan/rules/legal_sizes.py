"""Which sizes an axis may have: divisibility rules, shared by presets and by `check`."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.plan.model.head_split import num_kv_heads, padded_heads_per_rank
from workbench.plan.model.model_shape import Shape


def divisors(number: int) -> list[int]:
    """Divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def multiples(near: int, unit: int) -> list[int]:
    """The multiples of `unit`, itself or above, round `near`."""
    return [unit * k for k in range(max(1, near // unit), near // unit + 2)]


def splits(shape: Shape, size: int) -> list[str]:
    """What of one block's matrices `size` ranks do not divide; empty if they divide all.

    Heads and feed-forward width divide evenly; key-value heads divide evenly or are replicated
    evenly.
    """
    reasons = [f"heads = {shape.heads}"] if shape.heads % size else []
    kv = int(shape.kv_heads or shape.heads)
    if shape.mla is None and kv % size and size % kv:
        reasons.append(f"kv_heads = {kv}")
    if shape.ffn % size:
        reasons.append(f"ffn = {shape.ffn}")
    if shape.moe and shape.moe.ffn % size:
        reasons.append(f"moe.ffn = {shape.moe.ffn}")
    return reasons


def exceeds(shape: Shape, size: int) -> list[str]:
    """What one of `size` 1-D tensor ranks would have nothing of; what they do not divide is padded
    (`plan.heads`).
    """
    parts = {"heads": shape.heads, "ffn": shape.ffn} | (
        {"moe.ffn": shape.moe.ffn} if shape.moe else {}
    )
    return [f"{name} = {count}" for name, count in parts.items() if count < size]


def widening(shape: Shape, size: int) -> float:
    """What the widest of `size` 1-D tensor ranks has of a layer's matrices, padding and shared
    key-value heads included, over an even share of them.
    """
    heads, kv = padded_heads_per_rank(shape, size)
    each, wide = 2 * shape.q_width / shape.heads, 3 if shape.gated else 2
    ffn = (shape.moe.top_k + shape.moe.shared) * shape.moe.ffn if shape.moe else shape.ffn
    whole = each * (shape.heads + num_kv_heads(shape)) + wide * ffn
    ratio: float = size * (each * (heads + kv) + wide * -(-ffn // size)) / whole
    return ratio


def tensor_sizes(shape: Shape, ranks: int, most: int | None = None, tokens: int = 0) -> list[int]:
    """1-D tensor sizes that divide `ranks` and are at most `most`, ascending; 1 is always among
    them.

    Those that divide the model; where that is 1 alone, all that are legal, which pad it.

    Args:
        tokens: That the ranks split (sequence parallelism); 0: none.
    """
    legal = [
        t for t in divisors(ranks) if t <= (most or ranks) and not tensor_faults(shape, t, tokens)
    ]
    even = [t for t in legal if not splits(shape, t)]
    return even if len(even) > 1 else legal or [1]


def tensor_faults(shape: Shape, size: int, tokens: int = 0) -> list[str]:
    """Reasons why `size` 1-D tensor ranks are not legal; empty if they are."""
    more = [f"{size} tensor ranks are more than {name}" for name in exceeds(shape, size)]
    uneven = [f"{size} tensor ranks do not divide the {tokens} tokens that tensor.sequence splits"]
    return more + uneven * bool(tokens % size)


def pipeline_sizes(shape: Shape, ranks: int, chunks: int, uniform: bool = False) -> list[int]:
    """Pipeline sizes that divide `ranks` and leave every chunk of every stage at least one block,
    and as many if they are `uniform`.
    """
    return [
        p
        for p in divisors(ranks)
        if p * chunks <= shape.layers and not (uniform and shape.layers % (p * chunks))
    ]


def context_sizes(
    shape: Shape, ranks: int, sequence: int, tensor: int, algorithm: str, ulysses: int = 1
) -> list[int]:
    """Context sizes c that divide `ranks`.

    2c divides the sequence (ring); c divides the sequence and the heads of a tensor rank (Ulysses);
    or c is a multiple of `ulysses`, which divides those heads, and the ring of c / ulysses groups
    is legal (usp).
    """
    heads = padded_heads_per_rank(shape, tensor)[0]
    if algorithm == "ulysses":
        return [c for c in divisors(ranks) if heads % c == 0 and sequence % c == 0]
    if algorithm == "usp":
        groups = divisors(ranks // ulysses) if ranks % ulysses == heads % ulysses == 0 else []
        found = [r * ulysses for r in groups if sequence % (2 * r) == sequence % (r * ulysses) == 0]
        return sorted({1, *found})
    return [c for c in divisors(ranks) if c == 1 or sequence % (2 * c) == 0]


def context_rule(shape: Shape, sequence: int, tensor: int, algorithm: str, ulysses: int = 1) -> str:
    """Rule by which context sizes are legal, in words."""
    count = padded_heads_per_rank(shape, tensor)[0]
    heads = f"the {count} heads that tensor = {tensor} leaves"
    return {
        "ring": f"2 x size divides sequence_length = {sequence}",
        "ulysses": f"size divides {heads}, and sequence_length = {sequence}",
        "usp": f"ulysses_size = {ulysses} divides {heads} and size; size and "
        f"2 x size / ulysses_size divide sequence_length = {sequence}",
    }[algorithm]


def expert_sizes(shape: Shape, ranks: int) -> list[int]:
    """Expert sizes that divide `ranks` (data x context) and the number of routed experts."""
    return [e for e in divisors(ranks) if shape.moe and shape.moe.experts % e == 0] or [1]


def grids(algorithm: str, ranks: int, shape: Shape) -> list[list[int]]:
    """Grids of the 2-D, 2.5-D and 3-D algorithms whose product divides `ranks`, smallest first."""
    sides = [q for q in range(1, int(ranks**0.5) + 1) if not _uneven(shape, q)]
    if algorithm == "2d":
        found = [[q, q] for q in sides]
    elif algorithm == "3d":
        found = [[q, q, q] for q in sides]
    else:
        found = [[q, q, d] for q in sides for d in range(1, q + 1)]
    return sorted((g for g in found if ranks % _product(g) == 0), key=_product)


def token_parts(algorithm: str, grid: list[int] | int) -> int:
    """Parts into which a tensor grid splits a micro-batch, by whole sequences: q of 2-D, q d of
    2.5-D, l^2 of 3-D.
    """
    if algorithm == "1d" or isinstance(grid, int):
        return 1
    return grid[0] * (1 if algorithm == "2d" else grid[-1])


def _uneven(shape: Shape, side: int) -> bool:
    return bool(shape.hidden % side or splits(shape, side))


def _product(grid: list[int]) -> int:
    total = 1
    for side in grid:
        total *= side
    return total


def near(wanted: int, legal: Iterable[int], show: int = 6) -> str:
    """The legal values nearest `wanted`, in words."""
    closest = sorted(sorted(set(legal)), key=lambda value: abs(value - wanted))[:show]
    return ", ".join(map(str, sorted(closest))) or "none"
