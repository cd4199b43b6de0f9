"""Column-parallel layers of frozen weights, some with an adapter.

Without gradients of weights nothing overlaps with the collective of the input's gradient, and
autograd's own order serves: what base and adapters add to that gradient is summed before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.adapters.four_bit_linear import FrozenWeight, frozen_linear
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
    full_BTD = gather_tokens(x_BTD, axis) if sequence else copy_to_tensor_region(x_BTD, axis)
    ys = [frozen_linear(full_BTD, weight, bias) for weight, bias, _, _ in layers]
    adapted = [(i, each[2], each[3]) for i, each in enumerate(layers) if each[2] is not None]
    adapted = [each for each in adapted if each[1] is not None and each[1].active]
    if not adapted:
        return tuple(ys)
    source = x_BTD if sequence else full_BTD
    downs = [adapter.down(source, local=sequence) for _, adapter, _ in adapted if adapter]
    if sequence:
        ranks = [down.shape[-1] for down in downs]
        downs = list(gather_tokens(torch.cat(downs, -1), axis).split(ranks, -1))
    for (index, adapter, b), down in zip(adapted, downs, strict=True):
        assert adapter is not None
        ys[index] = adapter.add_up(ys[index], down, b)
    return tuple(ys)
