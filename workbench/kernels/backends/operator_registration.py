"""Registers the fused operators with torch's dispatcher.

A layer calls a dozen of them a microbatch, and a GPU should not wait for that: a call of an
operator of `torch.library.custom_op` spends three times the host's time on wrappers in Python, for
autograd, aliases and version counters. Here the dispatcher calls the function, so that fake tensors
and dispatch modes see one operator, and autograd is the caller's `torch.autograd.Function`: one
without `setup_context`, for which torch binds the arguments' names in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.library import Library, infer_schema

F = TypeVar("F", bound=Callable[..., Any])
_LIBRARY = Library("workbench", "FRAGMENT")


def fused_operator(
    name: str, mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Decorator: registers a function of tensors as the operator `workbench::name`.

    Args:
        name: Of the operator.
        mutates_args: Arguments that the function writes to; their version counters advance.

    Returns:
        The operator, which has no gradient, and needs `register_fake`.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        _LIBRARY.define(name + infer_schema(function, mutates_args=mutates_args))
        _LIBRARY.impl(name, _advancing(function, mutates_args), "CompositeExplicitAutograd")
        operator: OpOverload = getattr(torch.ops.workbench, name).default
        return operator

    return register


def register_fake(operator: OpOverload) -> Callable[[F], F]:
    """Decorator: what an operator returns for fake tensors."""
    decorator: Callable[[F], F] = torch.library.register_fake(operator)
    return decorator


def _advancing(function: Callable[..., Any], mutated: tuple[str, ...]) -> Callable[..., Any]:
    """The function, which advances the version counters of what it has written to."""
    if not mutated:
        return function
    places = [place for place, each in enumerate(signature(function).parameters) if each in mutated]

    @wraps(function)
    def call(*args: Any) -> Any:
        result = function(*args)
        for place in places:
            # The dispatcher leaves out trailing arguments that have their default.
            if place < len(args) and args[place] is not None:
                torch.autograd.graph.increment_version(args[place])
        return result

    return call
