"""Modules that an operator strategy may name: what dimensions they have, and which strategies are
legal for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from workbench.errors import PlanError, Problem
from workbench.plan.operators.strategy_form import (
    Form,
    Placement,
    on_grid,
    read_strategies,
    strategy_text,
)
from workbench.plan.rules.legal_sizes import divisors, near

_QUERY = ("rows", "heads", "query", "depth")
KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "MatMul": (("rows", "inner"), ("inner", "columns")),
    "Norm": (("rows", "hidden"), ("hidden",)),
    "Embedding": (("vocabulary", "hidden"), ("rows",)),
    "Activation": (("rows", "width"),),
    "GatedActivation": (("rows", "width"), ("rows", "width")),
    "FlashAttention": (
        _QUERY,
        ("rows", "heads", "depth", "key"),
        ("rows", "heads", "key", "depth"),
    ),
    "CrossEntropy": (("rows", "vocabulary"), ("rows",)),
    "MoE": (("rows",), ("width",)),
    "Whole": (("rows",),),
}
"""Kind -> the dimensions of each input, activations and parameters; a dimension that the output
lacks is summed over.

`rows` are whole sequences. A self-attention module (projections and all) is split by sequence and
head, an MoE layer by sequence and its experts' width; a module of no known kind only by sequence.
"""
ORDER = (
    "rows",
    "vocabulary",
    "inner",
    "hidden",
    "columns",
    "heads",
    "query",
    "key",
    "depth",
    "width",
)
"""Dimensions in the order in which a grid's axes are dealt to them."""
SHOWN = 12
"""Names that a refusal lists."""


@dataclass(frozen=True)
class Site:
    """One module: its kind, and into how many pieces each dimension may be cut (1: it stays
    whole).
    """

    kind: str
    units: Mapping[str, int]
    named: tuple[tuple[str, ...], ...] = ()
    """Dimensions of each input, where the kind does not say them."""

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """Dimensions of each input."""
        return self.named or KINDS[self.kind]

    def pieces(self, form: Form) -> dict[str, int]:
        """Pieces of each dimension under a legal form."""
        found = dict(
            zip((d for dims in self.dims for d in dims), (n for part in form for n in part))
        )
        return {name: found[name] for name in (*ORDER, *found) if name in found}

    def placement(self, form: Form, sides: Sequence[int]) -> Placement:
        """Where a legal form's pieces lie on the grid of `sides`."""
        return on_grid("rows", self.pieces(form), sides)

    def faults(self, form: Form, ranks: int) -> Iterator[str]:
        """Why a form is not legal here over `ranks`, and what would be."""
        dims = self.dims
        if tuple(map(len, form)) != tuple(map(len, dims)):
            said = ", ".join(f"({', '.join(part)})" for part in dims)
            yield (
                f"is {strategy_text(form)}, but the inputs of a {self.kind} are {said}; legal: a "
                f"number for each"
            )
            return
        splits = [
            (name, number)
            for part, numbers in zip(dims, form)
            for name, number in zip(part, numbers)
        ]
        for name, number in sorted(set(splits), key=splits.index):
            others = {n for other, n in splits if other == name}
            if len(others) > 1:
                if number == max(others):
                    yield (
                        f"is {strategy_text(form)}, which splits {name} in two ways; legal: the "
                        f"same "
                        f"pieces in every input"
                    )
            elif self.units.get(name, 1) % number:
                pieces = [n for n in divisors(self.units.get(name, 1)) if ranks % n == 0]
                of = (
                    f"{name} into {number} pieces, but it has {self.units.get(name, 1)} that "
                    f"stay together"
                )
                yield f"is {strategy_text(form)}, which cuts {of}; legal: {near(number, pieces)}"
        total = math.prod(dict(splits).values())
        if ranks % total:
            yield (
                f"is {strategy_text(form)}, whose pieces make {total} parts for "
                f"strategy.tensor.size = "
                f"{ranks}; "
                f"legal: a product that divides it: {near(total, divisors(ranks))}"
            )


def matched(
    operators: Mapping[str, object], sites: Mapping[str, Site], ranks: int
) -> dict[str, tuple[Site, Form]]:
    """Module -> its site and strategy, for all that the patterns name.

    Raises `PlanError` naming every pattern that matches nothing, is illegal for what it matches, or
    meets another one.
    """
    forms, problems = read_strategies(operators), []
    found: dict[str, tuple[Site, Form]] = {}
    by: dict[str, str] = {}
    for pattern, form in forms.items():
        field = f"strategy.operators.{pattern}"
        names = [name for name in sites if fnmatchcase(name, pattern)]
        if not names:
            problems.append(
                Problem(field, f"names no operator of the model; legal: {_some(sites)}")
            )
        for name in names:
            if name in by:
                what = (
                    f"names {name}, which strategy.operators.{by[name]} names too; legal: one "
                    f"strategy a module"
                )
                problems.append(Problem(field, what))
                break
            faults = list(sites[name].faults(form, ranks))
            problems += [Problem(field, f"{fault} ({name})") for fault in faults]
            if faults:
                break
            found[name], by[name] = (sites[name], form), pattern
    if problems:
        raise PlanError(problems)
    return found


def _some(sites: Mapping[str, Site]) -> str:
    """Names of modules, those that differ in a number named once."""
    shown = list(
        dict.fromkeys(
            ".".join("*" if p.isdigit() else p for p in name.split(".")) for name in sites
        )
    )
    return ", ".join(shown[:SHOWN]) + (
        f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    )
