"""Initial weights, which depend on a parameter's global name, an entry's place and the seed only.

A rank draws the slices that it holds (`counter_normal`), and every mesh starts from the weights of
one device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.counter_normal import NormalDrawer

STANDARD_DEVIATION = 0.02
INTO_RESIDUAL = (
    "attention.o.weight",
    "mlp.down.weight",
    "experts.down.weight",
    "shared.down.weight",
)
"""How the names of projections into the residual stream end."""


@dataclass(frozen=True)
class WeightInit:
    """Initial values of our models' parameters.

    Norms are `norm_weight`, biases 0, matrices normal with deviation 0.02, those of projections
    into the residual stream divided by sqrt(2 layers) (GPT-2, Radford et al. 2019). Drawn in fp32
    and rounded once.
    """

    num_layers: int
    seed: int
    drawer: NormalDrawer
    norm_weight: float = 1.0
    """Of norms: 0 where they multiply by 1 + weight."""

    def fill(
        self, into: Tensor, slices: Sequence[tuple[int, int]], name: str, shape: Sequence[int]
    ) -> None:
        """Fill a box of parameter `name`.

        Args:
            into: The box.
            slices: [start, stop) of the global tensor along each dim.
            name: The global name.
            shape: The global shape.
        """
        if name.endswith("bias"):
            into.zero_()
        elif "norm" in name:
            into.fill_(self.norm_weight)
        elif name.endswith("lora_b"):  # an adapter adds nothing at first
            into.zero_()
        else:
            key = seed_of(name, self.seed)
            self.drawer.fill(into, slices, shape, key, self.deviation(name, shape[-1]))

    def deviation(self, name: str, inputs: int) -> float:
        """Standard deviation of a matrix of so many inputs; of an adapter's as wide as PEFT's
        uniform distribution to 1 / sqrt(inputs).
        """
        if name.endswith("lora_a"):
            return 1 / math.sqrt(3 * inputs)
        if name.endswith(INTO_RESIDUAL):
            return STANDARD_DEVIATION / math.sqrt(2 * self.num_layers)
        return STANDARD_DEVIATION


def initial_value(
    name: str, shape: tuple[int, ...], num_layers: int, seed: int, dtype: torch.dtype
) -> Tensor:
    """The initial value of parameter `name`, unsharded, as one device has it."""
    value = torch.empty(shape, dtype=dtype)
    init = WeightInit(num_layers, seed, NormalDrawer(value.device))
    init.fill(value, [(0, length) for length in shape], name, shape)
    return value


def seed_of(name: str, seed: int) -> int:
    """The key of what is drawn for the parameter or module `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")
