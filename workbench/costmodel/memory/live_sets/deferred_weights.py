"""What a split backward leaves for its weight gradients (W)."""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload


def deferred_weight_bytes(w: Workload, is_moe: bool = False) -> Number:
    """Bytes that a layer saves between I and W (zero bubble): inputs and output gradients of its
    GEMMs.

    Where sequences are all-gathered, column-parallel layers compute W at once, since they would
    have to keep full-sequence gradients. On a tensor grid no W is deferred. In an MoE layer
    attention alone defers, and experts that every token visits: routers and grouped GEMMs compute
    their weights' gradients in I, as adapters beside frozen weights do.
    """
    if w.fixed.algorithm != "1d" or w.fixed.adapter_rank:
        return w.zeros
    bytes_of_width, hidden = w.tokens * w.element_bytes, w.hidden_activation_bytes
    ffn = w.shared_ffn if is_moe else w.ffn
    wide, has_wide = ffn * bytes_of_width, np.greater(ffn, 0)
    attention = 2 * hidden + (_projected_width(w) + w.o_width) * bytes_of_width
    all_layers = attention + has_wide * (2 * hidden + (3 if w.shape.gated else 2) * wide)
    row_parallel = hidden + w.o_width * bytes_of_width + has_wide * (hidden + wide)
    if w.shape.mla is not None:  # those onto latents are deferred all the same
        onto = (w.shape.mla.q_rank or 0) + w.shape.mla.kv_rank + w.shape.mla.rope_dim
        row_parallel = row_parallel + (w.hidden_per_rank + onto) * bytes_of_width / w.tensor
    return np.where(w.sequence_parallel > 1, row_parallel, all_layers)


def _projected_width(w: Workload) -> Number:
    """Outputs of the projections in front of attention, and inputs of those that read latents."""
    mla = w.shape.mla
    if mla is None:
        return w.q_width + w.k_width + w.v_width
    latents = 2 * ((mla.q_rank or 0) + mla.kv_rank) + mla.rope_dim
    return latents + w.q_width + w.heads * (mla.nope_dim + mla.value_dim)
