"""Dims of all tensors of a graph as products of factors, the same ones for all that share them.

A reshape makes one dim of several or several of one: a projection's columns of query, key and value
are 3 x heads x depth. Factors are followed through the graph both ways, so that each operator can
be sharded by any of them (as Shardy's and GSPMD's dims of a sharding are).
"""

from __future__ import annotations

from collections.abc import Sequence

Factor = int
"""Index of a factor; equal ones are the same."""


class Factors:
    """Factors with a size each, which may turn out to be equal to others, or products of them."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._same: list[Factor] = []
        self._parts: dict[Factor, tuple[Factor, ...]] = {}

    def new(self, size: int) -> Factor:
        """A new factor."""
        self._sizes.append(size)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def size(self, factor: Factor) -> int:
        """Its size."""
        return self._sizes[self._root(factor)]

    def resolved(self, factors: Sequence[Factor]) -> list[Factor]:
        """The same product in the finest factors known."""
        found: list[Factor] = []
        for factor in map(self._root, factors):
            parts = self._parts.get(factor)
            found += [factor] if parts is None else self.resolved(parts)
        return found

    def unite(self, left: Sequence[Factor], right: Sequence[Factor]) -> bool:
        """Make two products of one size the same; False where their factors interleave."""
        a, b = self.resolved(left), self.resolved(right)
        while a and b:
            small, large = (a, b) if self.size(a[0]) <= self.size(b[0]) else (b, a)
            size, whole = self.size(small[0]), self.size(large[0])
            if size < whole:
                if whole % size:
                    return False
                self._parts[large[0]] = self.new(size), self.new(whole // size)
                large[:1] = self._parts[large[0]]
            self._same[large.pop(0)] = small.pop(0)
            # What was split meanwhile may stand further on.
            a, b = self.resolved(a), self.resolved(b)
        return not a and not b

    def _root(self, factor: Factor) -> Factor:
        while self._same[factor] != factor:
            factor = self._same[factor]
        return factor
