"""What adapters change of a base model's weights: W + s B A, in the precision of what it is added
to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.adapters.lora_linear import LORA_A, LORA_B
from workbench.adapters.peft_names import WEIGHT, adapted_names
from workbench.checkpoint.checkpoint_format import Shard, Slices
from workbench.checkpoint.read_tensors import load_shards
from workbench.checkpoint.tensor_index import TensorSource
from workbench.kernels.four_bit_weight import round_to_four_bits
from workbench.runtime_facts.four_bit_sizes import FourBitFormat


@dataclass(frozen=True)
class LowRankUpdate:
    """s B A: `a` [..., rank, in], `b` [..., out, rank], fp32."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class FourBitRounding:
    """What adapters were trained beside: weights in 4 bits, of values in `dtype`."""

    names: frozenset[str]
    form: FourBitFormat
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightUpdates:
    """Updates by the name of the parameter; `replaced` parameters take a value in place of W, and
    W of a base in 4 bits is its dequantized value.
    """

    updates: Mapping[str, LowRankUpdate]
    replaced: Mapping[str, Tensor]
    four_bit: FourBitRounding | None = None

    def changes(self, name: str) -> bool:
        """Whether a parameter is updated, replaced or in 4 bits."""
        return name in self.updates or name in self.replaced or self._is_rounded(name)

    def _is_rounded(self, name: str) -> bool:
        return self.four_bit is not None and name in self.four_bit.names

    def apply(self, name: str, slices: Slices, value: Tensor) -> None:
        """Update a box of an unsharded parameter in place.

        Args:
            name: The parameter.
            slices: (start, stop) of each dim; complete rows of a base in 4 bits.
            value: W there, in fp32 or fp64.
        """
        if (given := self.replaced.get(name)) is not None:
            value.copy_(given[tuple(slice(*its) for its in slices)])
        if self.four_bit is not None and self._is_rounded(name):
            round_to_four_bits(value, self.four_bit.form, self.four_bit.dtype)
        update = self.updates.get(name)
        if update is None or not value.numel():
            return
        *lead, rows, columns = (slice(*its) for its in slices)
        b = update.b[(*lead, rows)].to(value.dtype)
        a = update.a[(*lead, slice(None), columns)].to(value.dtype)
        if lead:
            value.baddbmm_(b, a, alpha=update.scale)
        else:
            value.addmm_(b, a, alpha=update.scale)


def read_updates(
    source: TensorSource, scales: Mapping[str, float], replaced: Iterable[str] = ()
) -> WeightUpdates:
    """Read adapters into memory.

    Args:
        source: `NAME.lora_a` and `NAME.lora_b`.
        scales: Projection -> scale.
        replaced: Parameters that are stored complete.

    Raises:
        PlanError: A tensor is damaged, NaN or infinite.
    """
    names = adapted_names(name for name, kind in source.tensors if kind == "parameter")
    wanted = [f"{name}.{leaf}" for name in names for leaf in (LORA_A, LORA_B)]
    shards = {name: _shard(source, name) for name in (*wanted, *replaced)}
    load_shards(replace(source, exact=False), list(shards.values()))  # without moments, in fp32
    updates = {
        name + WEIGHT: LowRankUpdate(
            shards[f"{name}.{LORA_A}"].tensor, shards[f"{name}.{LORA_B}"].tensor, scales[name]
        )
        for name in names
    }
    return WeightUpdates(updates, {name: shards[name].tensor for name in replaced})


def _shard(source: TensorSource, name: str) -> Shard:
    shape = source.tensors[name, "parameter"].shape
    value = torch.empty(shape, dtype=torch.float32)
    return Shard(name, "parameter", value, shape, tuple((0, n) for n in shape))
