"""The choice in words: which GEMMs are paired, and what the simple alternatives would cost."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from workbench.plan.operators.operator_graph import Operator
from workbench.planner.autoshard.operator_splits import ShardingStrategy

if TYPE_CHECKING:
    from workbench.planner.autoshard.graph_pricing import PricedGraph

GIB = 2**30
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
    "head": "columns",
    "loss": "vocabulary",
}
"""The dimension that Megatron-LM splits each operator by (arXiv:1909.08053), to compare with; it
replicates the others.
"""


def explain_choice(
    priced: PricedGraph, picked: tuple[int, ...], free: tuple[int, ...] | None = None
) -> str:
    """Sentences on paired GEMMs, the batch and replicated operators, and the cost of simpler
    choices.

    Args:
        priced: The graph with the costs of all options.
        picked: The chosen option of each operator.
        free: The best choice without the memory limit, where the limit forbids it.
    """
    problem = priced.problem
    sentences = [*_pairs(priced, picked), *_rows(priced, picked), *_replicated(priced, picked)]
    sentences.append(
        f"Estimated {_cost(problem.total_cost(picked), problem.total_bytes(picked))}"
        " a rank and microbatch."
    )
    simple = {
        "Without the limit the best choice": free,
        "Data parallel": _uniform(priced, dict.fromkeys(_names(priced), "rows")),
        "Megatron's pairing over all ranks": _uniform(priced, MEGATRON_DIMS),
        "Everything repeated on every rank": _uniform(priced, {}),
    }
    for name, other in simple.items():
        if other is not None and other != picked:
            size = problem.total_bytes(other)
            over = (
                ", more than the limit"
                if problem.memory_limit is not None and size > problem.memory_limit
                else ""
            )
            sentences.append(f"{name} would take {_cost(problem.total_cost(other), size)}{over}.")
    return " ".join(sentences)


def _pairs(priced: PricedGraph, picked: tuple[int, ...]) -> list[str]:
    """GEMMs split by columns whose successor is split by the same inner dimension (Megatron's
    pair).
    """
    gemms = [i for i, op in enumerate(priced.graph.operators) if op.kind == "MatMul"]
    said = []
    for first, second in pairwise(gemms):
        columns, inner = (
            _axes(priced, i, picked, name) for i, name in ((first, "columns"), (second, "inner"))
        )
        if not inner or not set(inner) <= set(columns):
            continue
        a, b = (priced.graph.operators[i].name for i in (first, second))
        ways, pieces = priced.mesh.ranks_over(columns), priced.mesh.ranks_over(inner)
        times = _times(priced.graph.operators[first])
        if ways == pieces:
            said.append(
                f"{a} by columns and {b} by its inner dimension, {ways} ways each: what passes "
                f"between them stays in"
                f" place, one all-reduce forward after {b} and one backward before {a}{times}."
            )
        else:
            said.append(
                f"{a} by columns {ways} ways, {b} by its inner dimension only {pieces} ways: a "
                f"smaller all-reduce after"
                f" {b}, and what is split with it, repay the gathering between them{times}."
            )
    return said


def _axes(priced: PricedGraph, index: int, picked: tuple[int, ...], name: str) -> tuple[int, ...]:
    placement = priced.options[index][picked[index]].placement
    return tuple(a for a, placed in enumerate(placement) if placed == name)


def _times(operator: Operator) -> str:
    return f" in each of {operator.num_layers} layers" if operator.num_layers > 1 else ""


def _rows(priced: PricedGraph, picked: tuple[int, ...]) -> list[str]:
    """How far the batch is split, and where it cannot be."""
    sequences = priced.graph.operators[0].dims[0].units
    ways = {priced.mesh.ranks_over(_axes(priced, i, picked, "rows")) for i in range(len(picked))}
    if sequences == 1:
        return ["A microbatch is one sequence, so its rows cannot be split."]
    if max(ways) == 1:
        return [f"Splitting {sequences} sequences costs more than it saves here."]
    if len(ways) == 1:
        return [
            f"Every operator splits {sequences} sequences {max(ways)} ways and adds up its "
            f"weights' gradients."
        ]
    return [f"Rows of {sequences} sequences are split {min(ways)} to {max(ways)} ways."]


def _replicated(priced: PricedGraph, picked: tuple[int, ...]) -> list[str]:
    used = [
        priced.options[i][option].num_ranks_used(priced.mesh) for i, option in enumerate(picked)
    ]
    whole = [
        op.name for op, count in zip(priced.graph.operators, used) if count < priced.mesh.ranks
    ]
    return [f"Repeated on several ranks, for it is cheaper: {', '.join(whole)}."] if whole else []


def _names(priced: PricedGraph) -> list[str]:
    return [operator.name for operator in priced.graph.operators]


def _uniform(priced: PricedGraph, dims: Mapping[str, str]) -> tuple[int, ...] | None:
    """The named operators split over all ranks by that dimension, the others replicated; None where
    that is illegal.
    """
    picked = [_find(found, dims.get(name)) for name, found in zip(_names(priced), priced.options)]
    return None if None in picked else tuple(option for option in picked if option is not None)


def _find(options: tuple[ShardingStrategy, ...], name: str | None) -> int | None:
    return next((i for i, option in enumerate(options) if set(option.placement) <= {name}), None)


def _cost(seconds: float, size: float) -> str:
    time = (
        f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:,.3g} s"
        if seconds < 1e3
        else f"{seconds:,.0f} s"
    )
    return (
        f"{time} and {size / GIB:,.3g} GiB"
        if size < 1e3 * GIB
        else f"{time} and {size / GIB:,.0f} GiB"
    )
