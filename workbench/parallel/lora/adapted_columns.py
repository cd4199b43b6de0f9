"""Column-parallel layers of frozen weights, some with an adapter.

Without gradients of weights nothing overlaps with the collective of the input's gradient, and
autograd's own order serves: what base and adapters add to that gradient is summed before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.adapters.four_bit_tensor import FrozenWeight
from workbench.adapters.frozen_linear import frozen_linear
from workbench.adapters.lora_linear import LoraAdapter
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor.tensor_collectives import copy_to_tensor_region, gather_tokens

AdaptedLayer = tuple[FrozenWeight, Tensor | None, LoraAdapter | None, Tensor | None]
"""Weight [out, in], bias [out], the adapter and its `lora_b` [out, rank]."""


def adapted_column_parallel_linear(
    x_BTD: Tensor, layers: Sequence[AdaptedLayer], axis: MeshAxis, sequence: bool
) -> tuple[Tensor, ...]:
    """y_i = x W_i^T + b_i + s (x A_i^T) B_i^T of layers that are sharded by outputs over `axis`.

    With sequence parallelism x A^T is computed of this rank's tokens, and gathered: [B, T, rank] of
    each adapter, in one all-gather.

    Args:
        x_BTD: [B, T, D], equal on all ranks; with sequence parallelism this rank's tokens.
        layers: The layers that read it.
        axis: The tensor axis.
        sequence: Whether the input is sharded by tokens.

    Returns:
        [B, T, out / ranks] of each layer.
    """
    if not sequence:
        full_BTD = copy_to_tensor_region(x_BTD, axis)
        return tuple(
            frozen_linear(full_BTD, weight, bias)
            if adapter is None
            else adapter.linear(full_BTD, weight, bias, b=b)
            for weight, bias, adapter, b in layers
        )
    full_BTD = gather_tokens(x_BTD, axis)
    ys = [frozen_linear(full_BTD, weight, bias) for weight, bias, _, _ in layers]
    adapted = [
        (i, adapter, b)
        for i, (_, _, adapter, b) in enumerate(layers)
        if adapter is not None and adapter.active
    ]
    if adapted:
        downs = [adapter.down(x_BTD, local=True) for _, adapter, _ in adapted]
        full_downs = gather_tokens(torch.cat(downs, -1), axis)
        ranks = [down.shape[-1] for down in downs]
        for (i, adapter, b), down in zip(adapted, full_downs.split(ranks, -1), strict=True):
            ys[i] = adapter.add_up(ys[i], down, b)
    return tuple(ys)
