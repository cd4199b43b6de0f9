"""Plain operators under torch.compile; logs each compilation.

torch caches compiled code on disk (FX graph cache), so that a second run, or a second rank, only
loads it.
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
"""Logs compilations at level INFO."""


VIEW_DISPATCH_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""Excluded, or code would be compiled again under a dispatch mode, below which autograd's view
tracking has already run.
"""


COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}
"""Compile in the calling thread: a process forked from one with compiler threads would wait for
them forever, and a chain of operators is one kernel.
"""


def torch_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: compile a function of tensors, without autograd, per kind of arguments.

    On CPU one code serves all sizes, which costs nothing beyond the smallest and keeps the warm-up
    small; on GPUs code is specialised on sizes, because tiles depend on them. Torch function modes
    around a call (of a split backward) do not apply inside. Each kind is compiled from its own copy
    of the function, because torch.compile gives up on a function after too many recompilations.
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
                _copy(function), dynamic=True if on_cpu else None, options=COMPILE_OPTIONS
            )
        with (
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(VIEW_DISPATCH_KEYS),
            torch.no_grad(),
        ):
            return fast[kind](*map(_bare, args), **{name: _bare(x) for name, x in kwargs.items()})

    return call


def _bare(x: Any) -> Any:
    """A detached tensor, so that code is not specialised on parameters and views."""
    return x.detach() if isinstance(x, Tensor) else x


def _kind(x: object) -> Any:
    return (x.dtype, x.ndim, x.device.type, _layout(x)) if isinstance(x, Tensor) else x


def _layout(x: Tensor) -> tuple[int, ...] | None:
    """Dims of more than one entry, innermost first; None where contiguous."""
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
