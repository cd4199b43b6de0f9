"""The choice in words: which GEMMs are paired, and what the simple alternatives would cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from workbench.plan.operators.layer_patterns import layer_pattern
from workbench.plan.operators.operator_graph import Operator, OperatorGraph
from workbench.planner.autoshard.choice_result import LEAST_TIME, NOTHING, PINNED, SHARED
from workbench.planner.autoshard.operator_splits import ShardingStrategy

if TYPE_CHECKING:
    from workbench.planner.autoshard.graph_pricing import PricedGraph
from workbench.units import GIB, bytes_text

MEGATRON_DIMS = {
    "embedding": "vocabulary",
    "attention.qkv": "columns",
    "attention.attend": "heads",
    "attention.attend.scores": "heads",
    "attention.attend.softmax": "heads",
    "attention.attend.context": "heads",
    "attention.o": "inner",
    "mlp.up": "columns",
    "mlp.activate": "width",
    "mlp.down": "inner",
    "mlp": "width",
    "head": "columns",
    "loss": "vocabulary",
}
"""The dimension that Megatron-LM splits each operator by (arXiv:1909.08053), to compare with; it
replicates the others.
"""

REPLICATED = {
    LEAST_TIME: "for it is cheaper",
    PINNED: PINNED,
    SHARED: "for each shares a weight with one pinned by you",
    NOTHING: "for nothing reaches them",
}
"""Reason of an operator's row -> why it is replicated; others are those of propagation."""
FOLLOWED = "for the least redistribution"

SEQUENCE_PARALLEL_DIMS = MEGATRON_DIMS | dict.fromkeys(
    ("attention_norm", "mlp_norm", "final_norm"), "tokens"
)
"""The same with its sequence parallelism (arXiv:2205.05198), where sums are scattered by tokens."""


def explain_choice(
    priced: PricedGraph,
    picked: tuple[int, ...],
    reasons: Sequence[str],
    memory: float | None = None,
    forbidden: tuple[float, float] | None = None,
) -> str:
    """Sentences on paired GEMMs, the batch and replicated operators, and the cost of simpler
    choices.

    Args:
        priced: The graph with the costs of its options.
        picked: The chosen option of each operator.
        reasons: Why each operator has it.
        memory: The limit, bytes of a rank.
        forbidden: Seconds and bytes of the best choice, where the limit forbids it.
    """
    problem = priced.problem
    own = problem.total_cost(picked), problem.total_bytes(picked)
    sentences = [
        *_pairs(priced, picked, reasons),
        *_experts(priced, picked),
        *_rows(priced, picked, LEAST_TIME in reasons),
        *_tokens(priced, picked),
    ]
    sentences += _replicated(priced, picked, reasons)
    sentences.append(f"Estimated {_cost(*own)} a rank and microbatch.")
    simple = {
        "Without the limit the best choice": forbidden,
        "Data parallel": _uniform(priced, dict.fromkeys(_names(priced), "rows")),
        "Megatron's pairing over all ranks": _uniform(priced, MEGATRON_DIMS),
        "The same with sequence parallelism": _uniform(priced, SEQUENCE_PARALLEL_DIMS, True),
        "Every operator replicated": _uniform(priced, {}),
    }
    for name, other in simple.items():
        if other is not None and other != own:
            over = ", more than the limit" if memory is not None and other[1] > memory else ""
            sentences.append(f"{name} would take {_cost(*other)}{over}.")
    return " ".join(sentences)


def _pairs(priced: PricedGraph, picked: tuple[int, ...], reasons: Sequence[str]) -> list[str]:
    """GEMMs split by columns whose successor is split by the same inner dimension (Megatron's
    pair).
    """
    gemms = [i for i, op in enumerate(priced.graph.operators) if op.kind == "MatMul"]
    found: dict[tuple[str, str, int, int, bool], list[tuple[int, int]]] = {}
    for first, second in pairwise(gemms):
        columns, inner = (
            _axes(priced, i, picked, name) for i, name in ((first, "columns"), (second, "inner"))
        )
        if inner and set(inner) <= set(columns):
            a, b = (layer_pattern(priced.graph.operators[i].name) for i in (first, second))
            ways, pieces = (priced.mesh.ranks_over(axes) for axes in (columns, inner))
            scatters = priced.options[second][picked[second]].output is not None
            found.setdefault((a, b, ways, pieces, scatters), []).append((first, second))
    chosen = [reason == LEAST_TIME for reason in reasons]
    return [
        _pair_text(
            priced.graph, pairs, ways, pieces, scatters, any(chosen[i] for p in pairs for i in p)
        )
        for (_, _, ways, pieces, scatters), pairs in found.items()
    ]


def _experts(priced: PricedGraph, picked: tuple[int, ...]) -> list[str]:
    """How MoE layers are split: by width every expert as such a pair, by sequence their tokens."""
    found: dict[tuple[str, int, int], list[Operator]] = {}
    for i, operator in enumerate(priced.graph.operators):
        if operator.kind == "MoE":
            width, rows = (
                priced.mesh.ranks_over(_axes(priced, i, picked, name)) for name in ("width", "rows")
            )
            found.setdefault((layer_pattern(operator.name), width, rows), []).append(operator)
    return [text for (_, *ways), alike in found.items() for text in _expert_text(alike, *ways)]


def _expert_text(alike: Sequence[Operator], width: int, rows: int) -> list[str]:
    name, times = _joined(alike), _times(sum(op.num_layers for op in alike))
    if width > 1:
        return [
            f"Every expert of {name} by its width, {width} ways: these ranks route the same "
            f"tokens, the output is all-reduced and its input's gradient summed{times}."
        ]
    whole = f"Every rank has all experts of {name}{times}"
    return [f"{whole}, on its own sequences." if rows > 1 else f"{whole}."]


def _pair_text(
    graph: OperatorGraph,
    pairs: Sequence[tuple[int, int]],
    ways: int,
    pieces: int,
    scatters: bool,
    chosen: bool,
) -> str:
    """Saving of pairs of alike operators; that it repays what it costs, where it was `chosen`."""
    first, second = ([graph.operators[pair[end]] for pair in pairs] for end in (0, 1))
    a, b, times = _joined(first), _joined(second), _times(sum(op.num_layers for op in first))
    if ways == pieces:
        both = f"{a} by columns and {b} by its inner dimension, {ways} ways each: what passes "
        both += "between them stays in place, "
        if scatters:
            return f"{both}and the sum after {b} is reduce-scattered by tokens{times}."
        return f"{both}one all-reduce forward after {b} and one backward before {a}{times}."
    uneven = f"{a} by columns {ways} ways, {b} by its inner dimension only {pieces} ways"
    if not chosen:
        return f"{uneven}: what passes between them is gathered{times}."
    return (
        f"{uneven}: a smaller all-reduce after {b}, and what is split with it, repay the gathering "
        f"between them{times}."
    )


def _joined(alike: Sequence[Operator]) -> str:
    """The name of an operator, or of operators of layers that repeat."""
    return alike[0].name if len(alike) == 1 else layer_pattern(alike[0].name)


def _axes(priced: PricedGraph, index: int, picked: tuple[int, ...], name: str) -> tuple[int, ...]:
    placement = priced.options[index][picked[index]].placement
    return tuple(a for a, placed in enumerate(placement) if placed == name)


def _times(layers: int) -> str:
    return f" in each of {layers} layers" if layers > 1 else ""


def _rows(priced: PricedGraph, picked: tuple[int, ...], searched: bool) -> list[str]:
    """How far the batch is split, and where it cannot be."""
    sequences = priced.graph.operators[0].dims[0].units
    ways = {priced.mesh.ranks_over(_axes(priced, i, picked, "rows")) for i in range(len(picked))}
    if sequences == 1:
        return ["A microbatch is one sequence, so its rows cannot be split."]
    if max(ways) == 1 and not searched:
        return [f"No named strategy splits the {sequences} sequences, and the others follow them."]
    if max(ways) == 1:
        return [f"Splitting {sequences} sequences costs more than it saves here."]
    if len(ways) == 1:
        return [
            f"Every operator splits {sequences} sequences {max(ways)} ways and adds up its "
            f"weights' gradients."
        ]
    return [f"Rows of {sequences} sequences are split {min(ways)} to {max(ways)} ways."]


def _tokens(priced: PricedGraph, picked: tuple[int, ...]) -> list[str]:
    """Which operators are split by tokens."""
    ways = {
        op.name: priced.mesh.ranks_over(_axes(priced, i, picked, "tokens"))
        for i, op in enumerate(priced.graph.operators)
    }
    split = [name for name, count in ways.items() if count > 1]
    if not split:
        return []
    least = min(ways[name] for name in split)
    many = f"{least} to {max(ways.values())}" if least < max(ways.values()) else f"{least}"
    return [f"Tokens of a sequence are split {many} ways in {', '.join(split)}."]


def _replicated(priced: PricedGraph, picked: tuple[int, ...], reasons: Sequence[str]) -> list[str]:
    """Operators that some ranks repeat, by the reason that their rows give."""
    used = [
        priced.options[i][option].num_ranks_used(priced.mesh) for i, option in enumerate(picked)
    ]
    alike: dict[str, dict[str, list[Operator]]] = {}
    for operator, count, reason in zip(priced.graph.operators, used, reasons):
        if count < priced.mesh.ranks:
            same = alike.setdefault(REPLICATED.get(reason, FOLLOWED), {})
            same.setdefault(layer_pattern(operator.name), []).append(operator)
    every = Counter(layer_pattern(operator.name) for operator in priced.graph.operators)
    return [
        f"Replicated on several ranks, {why}: "
        + ", ".join(
            _joined(found) + (f" of {len(found)} layers" if 1 < len(found) < every[name] else "")
            for name, found in same.items()
        )
        + "."
        for why, same in alike.items()
    ]


def _names(priced: PricedGraph) -> list[str]:
    return [operator.name for operator in priced.graph.operators]


def _uniform(
    priced: PricedGraph, dims: Mapping[str, str], scattered: bool = False
) -> tuple[float, float] | None:
    """Seconds and bytes where the named operators are split over all ranks by that dimension, sums
    `scattered` by tokens, and the others replicated; None where that is illegal.
    """
    found = [
        _find(priced.pricing.options(operator), dims.get(_without_layers(operator.name)), scattered)
        for operator in priced.graph.operators
    ]
    options = [(one,) for one in found if one is not None]
    if len(options) < len(found):
        return None
    problem = priced.pricing.price(priced.graph, options).problem
    only = (0,) * len(options)
    seconds = problem.total_cost(only)
    return (seconds, problem.total_bytes(only)) if math.isfinite(seconds) else None


def _without_layers(name: str) -> str:
    return name.split(".", 2)[-1] if name.startswith("blocks.") else name


def _find(
    options: tuple[ShardingStrategy, ...], name: str | None, scattered: bool
) -> ShardingStrategy | None:
    found = [one for one in options if set(one.placement) <= {name}]
    return max(found, key=lambda one: scattered and one.output is not None, default=None)


def _cost(seconds: float, size: float) -> str:
    time = (
        f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:,.3g} s"
        if seconds < 1e3
        else f"{seconds:,.0f} s"
    )
    gib = f"{size / GIB:,.0f} GiB" if size >= 1e3 * GIB else f"{size / GIB:,.3g} GiB"
    return f"{time} and {gib if size >= GIB else bytes_text(size)}"
