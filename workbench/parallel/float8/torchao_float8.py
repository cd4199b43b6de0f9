"""torchao's fp8 for training, which is no public API of it: imported here only.

Tried with torchao 0.17 and 0.18.
"""

from __future__ import annotations

from workbench.errors import refuse

try:
    from torchao.float8.float8_training_tensor import GemmInputRole as GemmInputRole
    from torchao.float8.float8_training_tensor import LinearMMConfig as LinearMMConfig
    from torchao.float8.float8_training_tensor import ScaledMMConfig as ScaledMMConfig
    from torchao.float8.float8_training_tensor import (
        hp_tensor_and_scale_to_float8 as hp_tensor_and_scale_to_float8,
    )
    from torchao.float8.float8_utils import amax_to_scale as amax_to_scale
    from torchao.float8.float8_utils import tensor_to_amax as tensor_to_amax
except ImportError as error:
    raise refuse(
        "strategy.precision",
        f"is fp8, which needs torchao (`pip install torchao`): {error}; legal: bf16",
    ) from None
