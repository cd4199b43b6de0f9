"""Bytes that one operator reads and writes, from its arguments and results.

Every operand counts once, as far as it is read: what a kernel reads again from a cache is no
traffic, and neither is a view. What torch's schema does not tell stands in the tables here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from workbench.engine.measure.recorded_collective import tensors_in

MAKES_NOTHING = frozenset(
    {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "device"}
    | {"_unsafe_view", "_reshape_alias", "lift_fresh", "_local_scalar_dense", "detach_"}
    | {"resize_storage_bytes_", "set_", "requires_grad_", "record_stream"}
)
"""Operators that move no bytes, though they are no views to torch."""
COPIES_IF_STRIDED = frozenset({"contiguous"})
"""Views to torch's schema, that copy what does not lie in memory as they return it."""
OVERWRITES = frozenset({"copy_", "zero_", "fill_"})
"""In-place operators that do not read what they write over."""
ROWWISE_READS = frozenset({"embedding", "index_select", "gather", "index", "take_along_dim"})
"""Operators that read as many entries of their first operand as they write."""
ROWWISE_WRITES = {"scatter_add_": 3, "scatter_": 3, "index_add_": 3, "index_copy_": 3}
"""In-place operators that touch as many entries of their first operand as they are given -> the
argument that gives them.
"""
READS_SIZES = frozenset(
    {"nll_loss_forward", "nll_loss_backward", "zeros_like", "full_like", "ones_like", "new_zeros"}
    | {"new_full", "new_ones"}
)
"""Operators that read of their tensors no more than an entry a row, or their sizes alone."""
KEEPS = {"_fused_adamw_": "grads"}
"""Operator -> argument that its schema says is written, and its kernel only reads."""
READS_TWICE = {"native_layer_norm_backward": 2}
"""Operators of two kernels -> operands that both read: gradients of the input, and of weight and
bias (`layer_norm_kernel.cu` of torch 2.13).
"""


class Traffic(NamedTuple):
    """Bytes read and written by one call."""

    read: int
    written: int


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Traffic | None:
    """Bytes that a call moved; None where it moved none: a view, or memory without content."""
    name = func.overloadpacket.__name__
    if name in MAKES_NOTHING or (func.is_view and not _is_copy(name, args, out)):
        return None
    if name in ROWWISE_WRITES:
        touched = _size(args[ROWWISE_WRITES[name]]) if len(args) > 3 else 0
        index = _size(args[2])
        return Traffic(2 * touched + index, touched)
    read = written = 0
    for argument, value in _arguments(func, args, kwargs):
        size = sum(_size(x) for x in tensors_in([value]))
        is_written = _is_written(argument) and KEEPS.get(name) != argument.name
        written += size * is_written
        read += size * (not is_written or not (name in OVERWRITES or argument.is_out))
    results = [x for x in tensors_in([out]) if not _is_one_of(x, args, kwargs)]
    made = sum(_size(x) for x in results)
    if name in ROWWISE_READS:
        read = made + sum(_size(x) for x in tensors_in(args[1:]))
    if name in READS_SIZES:
        read = 0
    for argument in args[: READS_TWICE.get(name, 0)]:
        read += _size(argument)
    return Traffic(read, written + made) if read + written + made else None


def _is_copy(name: str, args: tuple[Any, ...], out: Any) -> bool:
    return name in COPIES_IF_STRIDED and bool(out.stride() != args[0].stride())


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """(argument of the schema, its value) of a call."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_one_of(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(x is y for y in tensors_in([args, *kwargs.values()]))


def _size(x: Tensor) -> int:
    """Bytes of the entries of `x`, those of an expanded dim once."""
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride()):
        count *= length if stride or length == 0 else 1
    return count
