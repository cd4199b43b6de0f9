"""Chains of plain operators under torch.compile, where it pays; what is compiled is told as it
happens.

Compiled code is kept on disk by torch (its FX graph cache), so that a second run, or a second rank,
only loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)
"""Says, at level INFO, what is about to be compiled."""


VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""Code would be compiled once more for where a dispatch mode watches: there autograd's views are
past.
"""


IN_THIS_THREAD: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}
"""A process forked from one whose compiler has threads would wait for them for ever, and a chain is
one kernel.
"""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of tensors, without autograd, compiled at its first call for each kind of
    argument.

    Processors take one code for all sizes, which costs them nothing beyond the smallest and lets a
    warm-up be small; on GPUs sizes are compiled in, for tiles depend on them. Torch function modes
    round it (a split backward's) do not reach into it. Every kind is compiled from a copy of its
    own, for torch gives up on a function that it has compiled too often.
    """
    assert isinstance(function, FunctionType)
    fast: dict[tuple[Any, ...], Callable[P, R]] = {}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kind = tuple(_kind(x) for x in (*args, *kwargs.values()))
        if kind not in fast:
            log.info("compiling %s.%s", function.__module__, function.__name__)
            on_cpu = all(
                x.device.type == "cpu" for x in (*args, *kwargs.values()) if isinstance(x, Tensor)
            )
            fast[kind] = torch.compile(
                _copy(function), dynamic=True if on_cpu else None, options=IN_THIS_THREAD
            )
        with (
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(VIEWS),
            torch.no_grad(),
        ):
            return fast[kind](*map(_bare, args), **{name: _bare(x) for name, x in kwargs.items()})

    return call


def _bare(x: Any) -> Any:
    """A tensor without what code would be compiled for beside: whose parameter or view it is, and
    for whom.
    """
    return x.detach() if isinstance(x, Tensor) else x


def _kind(x: object) -> Any:
    return (x.dtype, x.ndim, x.device.type, _layout(x)) if isinstance(x, Tensor) else x


def _layout(x: Tensor) -> tuple[int, ...] | None:
    """Dimensions of more than one entry, the densest first; None where contiguous."""
    return (
        None
        if x.is_contiguous()
        else tuple(sorted((d for d in range(x.ndim) if x.shape[d] != 1), key=x.stride))
    )


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
