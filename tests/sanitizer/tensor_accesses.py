"""Which tensors an operator or a collective reads, writes and resizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

METADATA_ONLY = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("_unsafe_view", "is_same_size", "is_pinned", "record_stream"),
    )
)
"""Operators that take a tensor for its shape, dtype or device, and touch none of its bytes."""

RESIZES = frozenset(("resize_", "resize_as_", "set_", "resize_storage_bytes_"))
"""Operators that give a tensor's storage another size, or the tensor another storage."""

IN_PLACE = frozenset(
    ["allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "recv_", "recv_any_source_"]
)
"""Collectives of c10d that read and write the same tensors."""

COPIES_INPUT = frozenset(("all_reduce", "all_reduce_coalesced", "broadcast"))
"""Functional collectives that run in place on a copy of their input."""


class TensorAccesses(NamedTuple):
    """What a call does to its tensors."""

    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()
    resizes: Sequence[Tensor] = ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in an argument or result, nested in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def operator_accesses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TensorAccesses:
    """Of an operator that is no collective, by its schema."""
    name = func.overloadpacket.__name__
    if name in RESIZES:
        return TensorAccesses(resizes=list(tensors_in(args[0])))
    if name in METADATA_ONLY or _is_view(func):
        return TensorAccesses()
    accesses = TensorAccesses([], [])
    for argument, value in _named(func, args, kwargs):
        written = argument.alias_info is not None and argument.alias_info.is_write
        side = accesses.writes if written else accesses.reads
        side += list(tensors_in(value))
    return accesses


@cache
def _is_view(func: Any) -> bool:
    """Whether results alias arguments without a write: views, also in place (`t_`)."""
    if torch.Tag.inplace_view in func.tags:
        return True
    aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def collective_accesses(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], rank: int
) -> TensorAccesses:
    """Of a collective or P2P operator of c10d, between its start and its wait.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its arguments by name.
        rank: This rank's index in the group; a broadcast's root only reads.
    """
    name = func.overloadpacket.__name__
    if name == "barrier":
        return TensorAccesses()
    values = {argument.name: value for argument, value in _named(func, args, kwargs)}
    if name == "send" or (name == "broadcast_" and values["root_rank"] == rank):
        return TensorAccesses(reads=list(tensors_in(values["tensors"])))
    if name in IN_PLACE:
        return TensorAccesses(writes=list(tensors_in(values["tensors"])))
    sides = {
        side: [
            x for key, value in values.items() if key.startswith(side) for x in tensors_in(value)
        ]
        for side in ("input", "output")
    }
    if not any(sides.values()) and list(tensors_in(list(values.values()))):
        raise NotImplementedError(f"what {func} reads and writes is not known: {func._schema}")
    return TensorAccesses(sides["input"], sides["output"])


def functional_accesses(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> TensorAccesses:
    """Of a functional collective, between its start and `wait_tensor` of its results `out`."""
    reads = [] if func.overloadpacket.__name__ in COPIES_INPUT else list(tensors_in(list(args)))
    return TensorAccesses(reads, list(tensors_in(out)))


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(argument of the schema, its value), of those that are given."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
