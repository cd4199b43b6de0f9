"""Torch's dispatch modes and fake tensors: private APIs, imported here only."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "fake_device",
    "is_traceable_wrapper_subclass",
    "without_dispatch_modes",
]

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.models.torch_dispatch uses torch's private dispatch modes of 2.11 to 2.13, not "
        f"{torch.__version__}"
    )

_DEVICE = torch.ops.prim.device.default


def fake_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """The answer where `func` asks a fake tensor for its device, which is what most calls of a mode
    do; None for others.
    """
    if func is not _DEVICE or type(args[0]) is not FakeTensor:
        return None
    return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
