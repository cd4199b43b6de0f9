"""Torch's dispatch modes, which see every operator: a private API, imported here only."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.models.torch_dispatch uses torch's private dispatch modes of 2.11 to 2.13, not "
        f"{torch.__version__}"
    )
