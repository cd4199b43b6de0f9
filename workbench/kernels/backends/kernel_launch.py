"""Launches Triton kernels for little of the host's time.

Triton's launcher finds the compiled code by every argument's type, alignment and value class: some
80 Python calls, a third of a fused layer's time on the host. What a layer launches again and again
is found here by one key, and pointers are passed as integers, which Triton does not look up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.kernels.backends.triton_compat import INTERPRETED

MAX_COMPILED = 1024
"""Launches remembered: the widths and flags of a model are few, numbers of tokens may be many."""
ALIGNMENT = 16
"""Bytes: Triton compiles other code for pointers that are not so aligned."""

_compiled: dict[Any, tuple[Any, tuple[None, ...]]] = {}
"""Kernel, device, constants, numbers and dtypes -> (compiled kernel, values for its constants)."""


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    **constants: Any,
) -> None:
    """Launch `kernel[(programs,)](*tensors, *numbers, **constants)` on the current stream.

    Args:
        kernel: A function of `triton_compat.jit`, whose tensors come first, then its numbers.
        programs: At least 1.
        tensors: On the current device, the first of them not None.
        numbers: Part of the key: for values that change in every call, call the kernel itself.
        constants: By name, and options such as `num_warps`; one call site passes them in one order.
    """
    pointers: list[int | None] = []
    key: list[Any] = [id(kernel), tensors[0].device, *constants.values()]  # type: ignore[union-attr]
    bits = 0
    for x in tensors:
        if x is None:
            pointers.append(None)
            key.append(None)
        else:
            pointer = x.data_ptr()
            bits |= pointer
            pointers.append(pointer)
            key.append(x.dtype)
    found = _compiled.get((*key, numbers)) if bits % ALIGNMENT == 0 else None
    if found is None:
        code = kernel[(programs,)](*tensors, *numbers, **constants)
        if bits % ALIGNMENT == 0 and not INTERPRETED:
            _remember((*key, numbers), code, len(kernel.arg_names) - len(tensors) - len(numbers))
        return
    code, constant_values = found
    code[programs, 1, 1](*pointers, *numbers, *constant_values)


def _remember(key: Any, code: Any, num_constants: int) -> None:
    """Compiled code takes a value for each constant, and does not look at it."""
    if len(_compiled) >= MAX_COMPILED:
        _compiled.clear()
    _compiled[key] = code, (None,) * num_constants
