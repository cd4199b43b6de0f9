"""Implicit replication: code between operators that mixes plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode


class ImplicitReplicate(TorchFunctionMode):
    """Within, a plain tensor that meets a DTensor in an operation is taken as replicated.

    torch's own `implicit_replication` converts in the dispatcher, below autograd. Converted here,
    above it, the plain tensor's gradient is reduced where it is partial.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

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
        return func(*args, **named)

    def _to_dtensors(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._to_dtensors(each) for name, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._to_dtensors(each) for each in value)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return DTensor.from_local(
                value, self.mesh, (Replicate(),) * self.mesh.ndim, run_check=False
            )
        return value


def _flatten(value: Any) -> Any:
    """All leaves of nested dictionaries, lists and tuples."""
    if isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _flatten(each)
    else:
        yield value
