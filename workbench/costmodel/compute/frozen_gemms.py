"""GEMMs of a layer whose weights are frozen beside low-rank adapters (LoRA, 2106.09685): which of
the frozen ones have a backward, and the thin ones of the adapters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.costmodel.inputs.adapted_layers import (
    EXPERTS,
    AdaptedLayer,
    linear_widths,
    part_bytes,
)
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.layer_gemms import LayerGemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload

SEQUENCE_SHARDED = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
"""Column-parallel linears whose x A^T sequence parallelism computes of a rank's own tokens."""


class FrozenGemm(NamedTuple):
    """A GEMM by a frozen weight, and the adapter beside it."""

    base: LayerGemm
    has_input_gradient: bool
    """Whether what it reads has a gradient: the only one of its backward."""
    down: LayerGemm | None
    """x A^T of the adapter."""
    up: LayerGemm | None
    """(x A^T) B^T, which is added to the base's output."""
    joined: Number
    """1 where its adapter is computed with it, in whose GEMMs scales are factors and sums are
    results (`adapters/frozen_linear.py`): not experts', nor of an input that is all-gathered.
    """


def frozen_gemms(w: Workload, kind: AdaptedLayer) -> list[FrozenGemm]:
    """GEMMs of one layer's forward, in the order of `layer_gemms`. Linears that are one GEMM share
    an adapter, as Megatron-Bridge's of `linear_qkv` do.
    """
    return [_frozen_gemm(w, kind, gemm) for gemm in layer_gemms(w, kind.is_moe)]


def _frozen_gemm(w: Workload, kind: AdaptedLayer, base: LayerGemm) -> FrozenGemm:
    gradient = has_input_gradient(w, kind, base.names[0])
    own = [name for name in base.names if name in kind.adapted]
    if not own:
        return FrozenGemm(base, gradient, None, None, 1.0)
    rank, first = float(w.fixed.adapter_rank), own[0]
    gathered = first in SEQUENCE_SHARDED
    shards = w.sequence_parallel if gathered else 1.0
    joined = base.ungrouped & ~(gathered & np.greater(w.sequence_parallel, 1))
    outputs: Number = sum(linear_widths(w, name).outputs for name in own)
    thin = LayerGemm(base.rows, outputs, rank, base.count, base.ungrouped)
    return FrozenGemm(base, gradient, _down(w, thin, first, shards), thin, 1.0 * joined)


def _down(w: Workload, up: LayerGemm, name: str, shards: Number) -> LayerGemm:
    inputs = linear_widths(w, name).inputs
    return LayerGemm(up.rows / shards, up.inner, inputs, up.count, up.ungrouped)


def has_input_gradient(w: Workload, kind: AdaptedLayer, name: str) -> bool:
    """Whether the input of the linear `name` of a block has a gradient: in a first stage only
    behind the first adapter.
    """
    adapted, last = kind.adapted, name.rpartition(".")[2]
    if name == "attention.o":
        return kind.has_attention_backward
    if name.startswith("attention."):
        mla = w.shape.mla
        latent = {"q": "q_down" if mla and mla.q_rank else "", "kv_up": "kv_down"}.get(last, "")
        return kind.has_input_gradient or f"attention.{latent}" in adapted
    part = name.removesuffix(last)
    into = last == "down" and any(f"{part}{each}" in adapted for each in ("gate", "up"))
    return into or has_branch_gradient(w, kind)


def has_branch_gradient(w: Workload, kind: AdaptedLayer) -> bool:
    """Whether what the feed-forward layer reads has a gradient; parallel branches read what the
    layer reads.
    """
    if w.shape.parallel_residual:
        return kind.has_input_gradient
    return kind.has_branch_gradient


def dequantized_weight_bytes(w: Workload, gemm: FrozenGemm) -> Number:
    """Bytes that dequantizing the weight of a GEMM moves: 4 bits and scales read, the parameters'
    dtype written; 0 where it is not in 4 bits.
    """
    form = w.fixed.four_bit
    moved: Number = 0.0
    for name in gemm.base.names if form is not None else ():
        if name == "mlp.router":
            continue
        assert form is not None
        columns, rows, experts = linear_widths(w, name)
        stored: Number = sum(part_bytes(w, form, name), start=0.0)
        moved = moved + stored + experts * rows * columns * w.element_bytes
    return moved


def is_routed(gemm: LayerGemm) -> bool:
    """Whether it is a grouped GEMM of routed experts."""
    return gemm.names[0].startswith(EXPERTS)
