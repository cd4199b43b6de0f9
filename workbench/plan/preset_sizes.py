"""Sizes that a preset leaves open: rules such as `node` or `rest`, resolved for a cluster and a
model.

A rule asks for a share of the ranks that the fixed axes and the axes before it leave over (order:
tensor, context, pipeline): `node` all that stand in one node, `rest` all, `half` their square root,
`third` their cube root; `grid` the largest grid of a 2-D, 2.5-D or 3-D tensor algorithm. What it
gets is the nearest size that is legal for the model (of tensor ranks one that divides it, if any
does), so that a preset works with a bare number of GPUs. A rule for `expert.size` or `data.shard`
is over data x context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.plan.model.model_shape import Shape
from workbench.plan.rules import legal_sizes

RULES = ("node", "rest", "half", "third", "grid")
ORDER = ("tensor", "context", "pipeline")


def resolve_sizes(
    strategy: dict[str, Any], shape: Shape | None, ranks: int, node: int, sequence: int
) -> dict[str, Any]:
    """`strategy` (plain data) with every rule replaced by a size; `node` is the GPUs in a node."""
    result = {
        key: dict(value) if isinstance(value, dict) else value for key, value in strategy.items()
    }
    left = ranks // max(1, math.prod(_fixed(result, axis) for axis in ORDER))
    for axis in ORDER:
        rule = result.get(axis, {}).get("size")
        if rule in RULES:
            assert shape is not None, "rules ask for a shape"
            size = _size(axis, str(rule), result, shape, max(1, left), node, sequence)
            result[axis]["size"] = size
            left //= math.prod(size) if isinstance(size, list) else size
    replicas = max(1, left) * _fixed(result, "context")
    if result.get("expert", {}).get("size") in RULES:
        assert shape is not None, "rules ask for a shape"
        tensor = _fixed(result, "tensor")
        spread = replicas * tensor // (result["expert"].get("tensor") or tensor)
        result["expert"]["size"] = legal_sizes.expert_sizes(shape, spread)[-1]
    if result.get("data", {}).get("shard") == "node":
        result["data"]["shard"] = _at_most(
            legal_sizes.divisors(replicas), max(1, node // _fixed(result, "tensor"))
        )
    return result


def splits_nothing(
    strategy: dict[str, Any],
    found: dict[str, Any],
    shape: Shape | None,
    ranks: int,
    node: int,
    sequence: int,
) -> str | None:
    """Why a strategy whose rules all end at 1 is not what was asked for, with what would be; None
    where one does not.

    `strategy` still has its rules, `found` is what they came to. One rank is every strategy at
    once.
    """
    ruled = [axis for axis in (*ORDER, "expert") if strategy.get(axis, {}).get("size") in RULES]
    if not ruled or ranks == 1 or _splits(found, ruled):
        return None
    more = range(2, 4 * ranks + 1)
    enough = [
        n for n in more if _splits(resolve_sizes(strategy, shape, n, max(node, n), sequence), ruled)
    ]
    named = shape.name if shape else "this model"
    groups = _ulysses_sizes(strategy, shape, ranks, node, sequence) if "context" in ruled else []
    why = f"finds no {' or '.join(ruled)} size beyond 1 for {named} on {ranks} GPUs: "
    if shape:
        why += ", and ".join(_fault(axis, strategy, shape, ranks, node, sequence) for axis in ruled)
    legal = [
        *([f"strategy.context.ulysses_size {legal_sizes.near(ranks, groups)}"] if groups else []),
        *([f"{legal_sizes.near(ranks, enough)} GPUs"] if enough else []),
        "another preset (ddp)",
    ]
    return f"{why}; legal: {', or '.join(legal)}"


def _fault(
    axis: str, strategy: dict[str, Any], shape: Shape, ranks: int, node: int, sequence: int
) -> str:
    """Reason why an axis has no size beyond 1, by the smallest that its ranks would have."""
    left, fields = ranks // math.prod(_fixed(strategy, each) for each in ORDER), strategy[axis]
    size = next(iter(legal_sizes.divisors(max(1, left))[1:]), 1)
    if size == 1:
        return f"other axes leave {axis} one rank"
    if axis == "expert":
        experts = f"{size} does not divide {shape.moe.experts}" if shape.moe else "the model has no"
        return f"{experts} experts"
    if fields["size"] == "grid":
        widths = f"heads = {shape.heads}, hidden = {shape.hidden} and ffn = {shape.ffn}"
        return f"no larger {fields.get('algorithm', '2d')} grid divides {left} ranks, {widths}"
    if axis == "pipeline":
        many = size * fields.get("chunks", 1)
        why = "do not divide" if many <= shape.layers else "are more than"
        return f"{many} stages {why} {shape.layers} layers"
    if axis == "context":
        rule = legal_sizes.context_rule(shape, *_context_kind(strategy, sequence))
        return f"{fields.get('algorithm', 'ring')} needs that {rule}"
    if size > node:
        return f"{size} tensor ranks are more than the {node} of a node"
    return " and ".join(legal_sizes.tensor_faults(shape, size, _split_tokens(strategy, sequence)))


def _ulysses_sizes(
    strategy: dict[str, Any], shape: Shape | None, ranks: int, node: int, sequence: int
) -> list[int]:
    """Sizes of Ulysses' groups with which `usp` would split; none for other algorithms."""
    context = strategy["context"]
    if context.get("algorithm") != "usp":
        return []
    return [
        size
        for size in legal_sizes.divisors(ranks)[1:]
        if _splits(
            resolve_sizes(
                {**strategy, "context": {**context, "ulysses_size": size}},
                shape,
                ranks,
                node,
                sequence,
            ),
            ["context"],
        )
    ]


def _splits(found: dict[str, Any], axes: Sequence[str]) -> bool:
    return any(_fixed(found, axis) > 1 for axis in axes)


def _fixed(strategy: dict[str, Any], axis: str) -> int:
    """The size of `axis` as written; 1 for a rule, an absent size, or what validation will
    refuse.
    """
    size = strategy.get(axis, {}).get("size", 1)
    if isinstance(size, list) and all(isinstance(side, int) for side in size):
        return math.prod(size)
    return size if isinstance(size, int) and size > 0 else 1


def _size(
    axis: str,
    rule: str,
    strategy: dict[str, Any],
    shape: Shape,
    left: int,
    node: int,
    sequence: int,
) -> int | list[int]:
    fields = strategy[axis]
    if rule == "grid":
        return legal_sizes.grids(fields.get("algorithm", "2d"), left, shape)[-1]
    if axis == "pipeline" and fields.get("replicas"):
        return len(fields["replicas"])
    if axis == "tensor":
        tokens = _split_tokens(strategy, sequence)
        sizes = legal_sizes.tensor_sizes(shape, left, node, tokens)
    elif axis == "pipeline":
        uniform = fields.get("partition") == "uniform"
        sizes = legal_sizes.pipeline_sizes(shape, left, int(fields.get("chunks", 1)), uniform)
    else:
        sizes = legal_sizes.context_sizes(shape, left, *_context_kind(strategy, sequence))
        if strategy.get("tensor", {}).get("sequence"):
            tensor = _fixed(strategy, "tensor")
            sizes = [c for c in sizes if sequence // c % tensor == 0]
    return _share(sizes or [1], rule, left, node)


def _split_tokens(strategy: dict[str, Any], sequence: int) -> int:
    """Tokens that tensor ranks split; 0 where they split none."""
    split = strategy.get("tensor", {}).get("sequence")
    return sequence // _fixed(strategy, "context") if split else 0


def _context_kind(strategy: dict[str, Any], sequence: int) -> tuple[int, int, str, int]:
    """Arguments of `legal_sizes.context_sizes` that context sizes depend on."""
    fields, size = strategy.get("context", {}), strategy.get("tensor", {}).get("size")
    side = size[0] if isinstance(size, list) and size else _fixed(strategy, "tensor")
    tensor = 1 if strategy.get("operators") else side
    return sequence, tensor, fields.get("algorithm", "ring"), fields.get("ulysses_size", 1)


def _share(sizes: Sequence[int], rule: str, left: int, node: int) -> int:
    if rule in ("half", "third"):
        root = left ** (1 / 2 if rule == "half" else 1 / 3) - 1e-9
        return next((size for size in sizes if size >= root), sizes[-1])
    return _at_most(sizes, node if rule == "node" else left)


def _at_most(sizes: Sequence[int], most: int) -> int:
    return max((size for size in sizes if size <= most), default=1)
