"""Implicit replication: code between operators that mixes plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from workbench.parallel.operators.redistribution import RedistributionGrid
from workbench.plan.operators.tensor_layout import TensorLayout

ELEMENTWISE = frozenset({"add", "__add__", "__radd__", "sub", "__sub__", "mul", "__mul__"})
"""Operations of two tensors that each rank computes on its shards."""

_active: ContextVar[ImplicitReplicate | None] = ContextVar("active", default=None)


class ImplicitReplicate(TorchFunctionMode):
    """Within, a plain tensor that meets a DTensor in an operation is taken as replicated.

    torch's own `implicit_replication` converts in the dispatcher, below autograd. Converted here,
    above it, the plain tensor's gradient is reduced where it is partial.

    Two DTensors of one shape and unlike layouts that meet in an elementwise operation get the
    layout of one of them, by the steps of least time, before DTensor would redistribute them.
    """

    def __init__(self, grid: RedistributionGrid) -> None:
        super().__init__()
        self.grid = grid

    def __enter__(self) -> ImplicitReplicate:
        super().__enter__()
        self._token = _active.set(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.reset(self._token)
        super().__exit__(*exception)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, with all tensors as DTensors if any of them is one."""
        named = kwargs or {}
        if any(isinstance(x, DTensor) for x in _flatten((args, named))):
            args, named = self._to_dtensors(args), self._to_dtensors(named)
            if getattr(func, "__name__", "") in ELEMENTWISE:
                args = self._aligned(args)
        return func(*args, **named)

    def _aligned(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`args` with DTensors of the first one's shape in one layout."""
        found = [x for x in args if isinstance(x, DTensor)]
        alike = [x for x in found if x.shape == found[0].shape]
        if len({x.placements for x in alike}) < 2:
            return args
        layout = self.grid.common_layout(alike)
        return tuple(
            self.grid.laid_out(x, layout) if any(x is each for each in alike) else x for x in args
        )

    def _to_dtensors(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._to_dtensors(each) for name, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._to_dtensors(each) for each in value)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return self.grid.dtensor(value, TensorLayout(((),) * value.ndim))
        return value


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed forward and of its recomputation, for `torch.utils.checkpoint`.

    The recomputation runs in backward, after the model's forward has left the mode.
    """
    mode = _active.get()
    return nullcontext(), nullcontext() if mode is None else ImplicitReplicate(mode.grid)


def _flatten(value: Any) -> Any:
    """All leaves of nested dictionaries, lists and tuples."""
    if isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _flatten(each)
    else:
        yield value
