"""Why the choice is what it is, in words: who pairs with whom, and what the simple alternatives would cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from workbench.planner.operators.operator import Operator, Strategy

if TYPE_CHECKING:
    from workbench.planner.operators.price import Priced
    from workbench.planner.operators.result import Row

GIB = 2**30


def reason(priced: Priced, picked: tuple[int, ...], rows: Sequence[Row]) -> str:
    """Sentences: pairs of products, rows, whole operators, and the total beside data parallel and one rank's work."""
    problem = priced.problem
    said = [*_pairs(priced, picked), *_rows(priced, picked), *_idle(priced, picked)]
    total, held = problem.total(picked), problem.memory(picked)
    said.append(f"Estimated {_ms(total)} a microbatch and {held / GIB:.3g} GiB a rank.")
    simple = {"Data parallel": data_parallel(priced), "Everything repeated on every rank": repeated(priced)}
    for name, other in simple.items():
        if other is not None and other != picked:
            seconds, size = problem.total(other), problem.memory(other)
            over = problem.limit is not None and size > problem.limit
            fits = ", more than the limit" if over else ""
            said.append(f"{name} would take {_ms(seconds)} and {size / GIB:.3g} GiB{fits}.")
    return " ".join(said)


def _pairs(priced: Priced, picked: tuple[int, ...]) -> list[str]:
    """A product split by columns, whose successor among the products is split by the same inner dimension."""
    products = [i for i, op in enumerate(priced.graph.operators) if op.kind == "MatMul"]
    said = []
    for first, second in pairwise(products):
        columns, inner = (_axes(priced, i, picked, name) for i, name in ((first, "columns"), (second, "inner")))
        if columns and columns == inner:
            a, b = priced.graph.operators[first].name, priced.graph.operators[second].name
            ways, times = priced.mesh.ranks_over(columns), _times(priced.graph.operators[first])
            said.append(
                f"{a} by columns and {b} by its inner dimension, {ways} ways each: what passes between them stays in"
                f" place, one all-reduce forward after {b} and one backward before {a}{times}."
            )
    return said


def _axes(priced: Priced, index: int, picked: tuple[int, ...], name: str) -> tuple[int, ...]:
    placement = priced.options[index][picked[index]].placement
    return tuple(a for a, placed in enumerate(placement) if placed == name)


def _times(operator: Operator) -> str:
    return f" in each of {operator.times} layers" if operator.times > 1 else ""


def _rows(priced: Priced, picked: tuple[int, ...]) -> list[str]:
    """How far the batch is split, and where it cannot be."""
    sequences = priced.graph.operators[0].dims[0].units
    ways = {priced.mesh.ranks_over(_axes(priced, i, picked, "rows")) for i in range(len(picked))}
    if sequences == 1:
        return ["A microbatch is one sequence, so its rows cannot be split."]
    if max(ways) == 1:
        return [f"Splitting {sequences} sequences costs more than it saves here."]
    if len(ways) == 1:
        return [f"Every operator splits the rows of {sequences} sequences {max(ways)} ways; weights are reduced once."]
    return [f"Rows of {sequences} sequences are split {min(ways)} to {max(ways)} ways."]


def _idle(priced: Priced, picked: tuple[int, ...]) -> list[str]:
    used = [priced.options[i][option].used(priced.mesh) for i, option in enumerate(picked)]
    whole = [op.name for op, count in zip(priced.graph.operators, used) if count < priced.mesh.ranks]
    return [f"Repeated on several ranks, for it is cheaper: {', '.join(whole)}."] if whole else []


def data_parallel(priced: Priced) -> tuple[int, ...] | None:
    """Every operator split by rows over all ranks; None where sequences do not suffice."""
    return _uniform(priced, "rows")


def repeated(priced: Priced) -> tuple[int, ...] | None:
    """Nothing split."""
    return _uniform(priced, None)


def _uniform(priced: Priced, name: str | None) -> tuple[int, ...] | None:
    picked = [_find(found, name) for found in priced.options]
    return None if None in picked else tuple(option for option in picked if option is not None)


def _find(options: tuple[Strategy, ...], name: str | None) -> int | None:
    return next((i for i, option in enumerate(options) if set(option.placement) <= {name}), None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
