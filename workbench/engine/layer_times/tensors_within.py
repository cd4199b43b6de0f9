"""Tensors among what a module takes or gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`: itself, or in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_within(each)
    elif isinstance(value, dict):
        yield from tensors_within(list(value.values()))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(each, change) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(with_tensors(each, change) for each in value)
    if isinstance(value, dict):
        return {key: with_tensors(each, change) for key, each in value.items()}
    return value
