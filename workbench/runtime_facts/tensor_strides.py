"""How tensors lie in memory: strides of views, and of what operators allocate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Shape = tuple[int, ...]
Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Strides of dims that lie in memory in their order."""
    lengths = (max(1, length) for length in reversed(shape[1:]))
    return tuple(reversed([*accumulate(lengths, lambda a, b: a * b, initial=1)])) if shape else ()


def heads_first_strides(shape: Sequence[int]) -> Strides:
    """Strides of [B, T, heads, depth] whose heads lie in memory before its tokens."""
    _, length, heads, depth = shape
    return heads * length * depth, depth, length * depth, 1


def strides_of(shape: Sequence[int], strides: Strides | None) -> Strides:
    """The strides, where None stands for dims in their order."""
    return contiguous_strides(shape) if strides is None else strides


def lie_in_order(shape: Shape, strides: Strides) -> bool:
    """Whether dims longer than 1 lie in memory in their order, without gaps."""
    return _long(shape, strides) == _long(shape, contiguous_strides(shape))


def _long(shape: Shape, strides: Strides) -> list[int]:
    return [stride for length, stride in zip(shape, strides) if length != 1]


def viewed_strides(shape: Shape, strides: Strides, wanted: Shape) -> Strides | None:
    """Strides of a tensor seen in another shape; None where it must be copied (torch's
    `computeStride`).
    """
    if not wanted:
        return ()
    found: list[int] = []
    left, base, length = list(wanted), strides[-1] if strides else 1, 1
    for dim in reversed(range(len(shape))):
        length *= shape[dim]
        ends = dim == 0 or (
            shape[dim - 1] != 1 and strides[dim - 1] != length * base and length >= 1
        )
        if not ends:
            continue
        made = 1
        while left and (made < length or left[-1] == 1):
            found.append(made * base)
            made *= left.pop()
        if made != length:
            return None
        if dim:
            base, length = strides[dim - 1], 1
    found += [found[-1] if found else 1] * len(left)
    return tuple(reversed(found)) if all(n == 1 for n in left) else None


def combined_strides(shape: Shape, inputs: Sequence[tuple[Shape, Strides]]) -> Strides:
    """Strides of the result of an operator that computes element by element (torch's
    `TensorIterator`): dims in the order in which those of the first inputs lie.
    """
    seen = [_broadcast(shape, *each) for each in inputs]
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for before in reversed(range(start)):
            compared = _compare(shape, seen, order[before], order[at])
            if compared > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif compared < 0:
                break
    return _in_memory_order(shape, order)


def _broadcast(shape: Shape, own: Shape, strides: Strides) -> list[int]:
    """An input's strides along all dims of the result; 0 where it is repeated."""
    missing = len(shape) - len(own)
    found = [0] * missing
    for length, stride, wanted in zip(own, strides, shape[missing:]):
        found.append(0 if length == 1 and wanted != 1 else stride)
    return found


def _compare(shape: Shape, inputs: Sequence[Sequence[int]], inner: int, outer: int) -> int:
    """Whether dim `inner` lies within `outer` (-1), outside of it (1), or either (0)."""
    for strides in inputs:
        a, b = strides[inner], strides[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return -1 if a < b else 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _in_memory_order(shape: Shape, order: Sequence[int]) -> Strides:
    """Strides of dims that lie in memory in an order, the innermost first."""
    found = [0] * len(shape)
    for at, dim in enumerate(order):
        found[dim] = math.prod(max(1, shape[each]) for each in order[:at])
    return tuple(found)
