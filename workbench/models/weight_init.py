"""Initial weights that depend on a parameter's global name and the seed only.

A rank draws the unsharded tensor and keeps its slice, so that every mesh starts from the weights of
one device.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02


def initial_value(
    name: str, shape: tuple[int, ...], num_layers: int, seed: int, dtype: torch.dtype
) -> Tensor:
    """The initial value of parameter `name`, unsharded.

    Norms are 1, biases 0, matrices normal with deviation 0.02, those of projections into the
    residual stream divided by sqrt(2 layers) (GPT-2, Radford et al. 2019). Drawn in fp32 and
    rounded to `dtype` once.
    """
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if "norm" in name:
        return torch.ones(shape, dtype=dtype)
    deviation = STANDARD_DEVIATION
    if name.endswith(
        ("attention.o.weight", "mlp.down.weight", "experts.down.weight", "shared.down.weight")
    ):
        deviation /= math.sqrt(2 * num_layers)
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    return (
        torch.empty(shape, dtype=torch.float32)
        .normal_(0.0, deviation, generator=generator)
        .to(dtype)
    )


def seed_of(name: str, seed: int) -> int:
    """The seed of the generator that draws parameter `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")
