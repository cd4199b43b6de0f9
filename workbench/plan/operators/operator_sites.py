"""Modules that an operator strategy may name: what dimensions they have, and which strategies are
legal for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from workbench.errors import PlanError, Problem
from workbench.plan.operators.strategy_form import (
    Form,
    Placement,
    on_grid,
    read_strategies,
    strategy_text,
)
from workbench.plan.operators.unknown_patterns import unknown_pattern
from workbench.plan.rules.legal_sizes import divisors, near

Dims = tuple[tuple[str, ...], ...]
"""Dimensions of each tuple of a strategy."""
_QUERY = ("rows", "heads", "query", "depth")
KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "MatMul": (("rows", "tokens", "inner"), ("inner", "columns")),
    "Norm": (("rows", "tokens", "hidden"), ("hidden",)),
    "Embedding": (("vocabulary", "hidden"), ("rows", "tokens")),
    "Activation": (("rows", "tokens", "width"),),
    "GatedActivation": (("rows", "tokens", "width"), ("rows", "tokens", "width")),
    "FlashAttention": (
        _QUERY,
        ("rows", "heads", "depth", "key"),
        ("rows", "heads", "key", "depth"),
    ),
    "CrossEntropy": (("rows", "tokens", "vocabulary"), ("rows", "tokens")),
    "MoE": (("rows",), ("width",)),
}
"""Kind -> the dimensions of each input, activations and parameters; a dimension that the output
lacks is summed over.

`rows` are whole sequences, `tokens` the positions within them: what acts on each token alone may be
split by both (sequence parallelism, arXiv:2205.05198). A strategy that leaves `tokens` out does not
split them. An MoE layer is split by sequence and its experts' width.
"""
SUMS: dict[str, tuple[tuple[str, ...], str]] = {
    "MatMul": (("rows", "tokens", "columns"), "inner"),
    "Embedding": (("rows", "tokens", "hidden"), "vocabulary"),
}
"""Kind -> the dimensions of its output, and the one that it sums over."""
OUTPUT = ".output"
"""What follows a module's name, where its output is placed unlike its inputs: MindSpore's
`out_strategy`. A partial sum is then reduce-scattered by tokens instead of all-reduced.
"""
POSITIONS = "embedding.positions"
"""The table of learned positions, which no strategy names: it follows what it is added to."""
ORDER = (
    "rows",
    "tokens",
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


ROWS, FOLDED = "rows", "folded"
"""Dimensions of an operator of a user's module: of sequences, and of what else lies in the dim of
a tensor with them, the heads of [B x heads, T, depth].
"""


@dataclass(frozen=True)
class Site:
    """One module: its kind, and into how many pieces each dimension may be split."""

    kind: str
    units: Mapping[str, int]
    named: tuple[tuple[str, ...], ...] = ()
    """Dimensions of each input, where the kind does not say them."""
    scatters: bool = False
    """Whether a strategy may say how its output is split, in a tuple after those of the inputs."""

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """Dimensions of each input."""
        return self.named or KINDS[self.kind]

    @property
    def written(self) -> Iterator[Dims]:
        """Dimensions of each tuple that a strategy may have, the shortest way to write it first."""
        for left_out in ("", FOLDED, ROWS) if self.named else ("tokens", ""):
            if kept := without(self.dims, left_out):
                yield kept
        if self.scatters:
            yield (*self.dims, SUMS[self.kind][0])

    def pieces(self, form: Form) -> dict[str, int]:
        """Pieces of each dimension of the inputs under a legal form."""
        found = dict.fromkeys((name for part in self.dims for name in part), 1)
        dims = self._dims_of(form) or self.dims
        found |= dict(_splits(dims[: len(self.dims)], form))
        return {name: found[name] for name in (*ORDER, *found) if name in found}

    def whole(self, form: Form) -> Form:
        """The form with a number for each dimension, 1 for those that it leaves out."""
        dims, numbers = self._dims_of(form), chain(*form)
        if dims is None:
            return form
        written = {*chain(*dims)}
        return tuple(
            tuple(next(numbers) if n in written else 1 for n in part) for part in self.dims
        )

    def placement(self, form: Form, sides: Sequence[int]) -> Placement:
        """Where a legal form's pieces lie on the grid of `sides`."""
        return on_grid("rows", self.pieces(form), sides)

    def output_placement(self, form: Form, sides: Sequence[int]) -> Placement | None:
        """Where those of its output lie, if the form says that its sum is scattered by tokens."""
        if not self._is_scattered(form):
            return None
        summed = SUMS[self.kind][1]
        return tuple("tokens" if d == summed else d for d in self.placement(form, sides))

    def faults(self, form: Form, ranks: int) -> Iterator[str]:
        """Why a form is not legal here over `ranks`, and what would be."""
        dims = self._dims_of(form)
        if dims is None:
            said = " or ".join(dict.fromkeys(map(_dims_text, self.written)))
            yield (
                f"is {strategy_text(form)}, but the inputs of a {self.kind} are {said}; legal: a "
                f"number for each"
            )
            return
        splits = list(_splits(dims[: len(self.dims)], form))
        yield from self._uneven(form, splits, ranks)
        if len(dims) > len(self.dims):
            yield from self._output_faults(form, ranks)
        total = math.prod(dict(splits).values())
        if ranks % total:
            yield (
                f"is {strategy_text(form)}, whose pieces make {total} parts for "
                f"strategy.tensor.size = "
                f"{ranks}; "
                f"legal: a product that divides it: {near(total, divisors(ranks))}"
            )

    def _dims_of(self, form: Form) -> Dims | None:
        """Dimensions of a form's tuples; None where they have other numbers of dimensions."""
        found = [d for d in self.written if tuple(map(len, d)) == tuple(map(len, form))]
        even = (d for d in found if all(self.units.get(n, 1) % k == 0 for n, k in _splits(d, form)))
        return next(even, found[0] if found else None)

    def _uneven(self, form: Form, splits: list[tuple[str, int]], ranks: int) -> Iterator[str]:
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
                yield self._indivisible(form, name, number, ranks)

    def _indivisible(self, form: Form, name: str, number: int, ranks: int) -> str:
        units = self.units.get(name, 1)
        pieces = [n for n in divisors(units) if ranks % n == 0]
        of = f"{name} into {number} pieces, but {number} does not divide its {units}"
        return f"is {strategy_text(form)}, which splits {of}; legal: {near(number, pieces)}"

    def _output_faults(self, form: Form, ranks: int) -> Iterator[str]:
        """An output is split as the inputs are, by tokens also as often as its sum has parts."""
        own, (names, summed) = self.pieces(form), SUMS[self.kind]
        legal = [own | {"tokens": own["tokens"] * n} for n in dict.fromkeys((own[summed], 1))]
        if form[-1] not in [tuple(each[name] for name in names) for each in legal]:
            forms = [strategy_text((*form[:-1], tuple(d[n] for n in names))) for d in legal]
            yield (
                f"is {strategy_text(form)}, but an output is split as its inputs are, by tokens "
                f"also as its sum over {summed} is; legal: {' or '.join(forms)}"
            )
            return
        tokens = form[-1][names.index("tokens")]
        if self.units["tokens"] % tokens:
            yield self._indivisible(form, "tokens", tokens, ranks)

    def _is_scattered(self, form: Form) -> bool:
        if len(form) <= len(self.dims):
            return False
        at = SUMS[self.kind][0].index("tokens")
        return form[-1][at] > self.pieces(form)["tokens"]


def without(dims: Dims, name: str) -> Dims:
    """Dimensions of each tuple but one of them, and of tuples that have others."""
    return tuple(kept for part in dims if (kept := tuple(n for n in part if n != name)))


def _splits(dims: Dims, form: Form) -> Iterator[tuple[str, int]]:
    """(dimension, pieces) of each number of a form."""
    for names, numbers in zip(dims, form):
        yield from zip(names, numbers)


def _dims_text(dims: Dims) -> str:
    return ", ".join(f"({', '.join(part)})" for part in dims)


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
    known: dict[tuple[int, Form], list[str]] = {}

    def faults_of(site: Site, form: Form) -> list[str]:  # layers share their sites
        key = id(site), form
        if key not in known:
            known[key] = list(site.faults(form, ranks))
        return known[key]

    for pattern, form in forms.items():
        field = f"strategy.operators.{pattern}"
        # A plan of many stages names thousands of modules one by one.
        named = pattern in sites
        names = [pattern] if named else [name for name in sites if fnmatchcase(name, pattern)]
        if not names:
            problems.append(unknown_pattern(pattern, sites))
        for name in names:
            if name in by:
                what = (
                    f"names {name}, which strategy.operators.{by[name]} names too; legal: one "
                    f"strategy a module"
                )
                problems.append(Problem(field, what))
                break
            faults = faults_of(sites[name], form)
            problems += [Problem(field, f"{fault} ({name})") for fault in faults]
            if faults:
                break
            found[name], by[name] = (sites[name], form), pattern
    if problems:
        raise PlanError(problems)
    return found


def followed_by_positions(placed: Mapping[str, Placement]) -> dict[str, Placement]:
    """Where learned positions lie: each rank looks up those of the tokens that it has of the
    embedding's output, and so has a part of the table's gradient, which is summed once a step.
    """
    name = "embedding.tokens"
    output = placed.get(name + OUTPUT, placed.get(name, ()))
    own = tuple(split if split in ("rows", "tokens") else None for split in output)
    return {POSITIONS: own} if any(own) else {}
