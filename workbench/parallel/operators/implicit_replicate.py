"""Where code between operators brings split and whole tensors together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode


class ImplicitReplicate(TorchFunctionMode):
    """Inside, a plain tensor that meets a split one is what it means everywhere: the same whole
    tensor on every rank.

    It is so before autograd sees it, so that its gradient is summed where it has to be.
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
        """Call `func`, on split tensors alone if there is one."""
        told = kwargs or {}
        if any(isinstance(x, DTensor) for x in _flat((args, told))):
            args, told = self._split(args), self._split(told)
        return func(*args, **told)

    def _split(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._split(each) for name, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._split(each) for each in value)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return DTensor.from_local(
                value, self.mesh, (Replicate(),) * self.mesh.ndim, run_check=False
            )
        return value


def _flat(value: Any) -> Any:
    """All that is in nested dictionaries, lists and tuples."""
    if isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _flat(each)
    else:
        yield value
