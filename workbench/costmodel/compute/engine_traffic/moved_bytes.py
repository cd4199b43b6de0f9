"""Bytes that memory-bound operators move, and how many kernels they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Number

Moved: TypeAlias = int | Number | NDArray[np.signedinteger[Any]]
"""Bytes of one operator, an element."""


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that operators move and how many kernels they are, in forward and backward."""

    forward: Number = 0.0
    backward: Number = 0.0
    forward_kernels: Number = 0.0
    backward_kernels: Number = 0.0

    def __add__(self, other: MovedBytes) -> MovedBytes:
        return MovedBytes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
        )

    def times(self, often: Number) -> MovedBytes:
        """So many of them, each as one kernel."""
        return MovedBytes(
            self.forward * often,
            self.backward * often,
            self.forward_kernels * often,
            self.backward_kernels * often,
        )

    def wide(self, elements: Number) -> MovedBytes:
        """On tensors of so many elements, where bytes are those of one element."""
        return MovedBytes(
            self.forward * elements,
            self.backward * elements,
            self.forward_kernels,
            self.backward_kernels,
        )


def moved_by(forward: Sequence[Moved], backward: Sequence[Moved]) -> MovedBytes:
    """Of operators that each move so many bytes; 0 where one does not run."""
    kernels = ([1.0 * (np.asarray(x) > 0) for x in some] for some in (forward, backward))
    return MovedBytes(_total(forward), _total(backward), *map(_total, kernels))


def _total(values: Sequence[Moved]) -> Number:
    """Sum of numbers and arrays."""
    result: Number = 0.0
    for value in values:
        result = result + value
    return result
