"""How many kernels this engine launches for a microbatch on a GPU, counted one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.costmodel.compute.engine_traffic.engine_operators import (
    attention_bytes,
    casts_eagerly,
    chunked_head,
    embedding_bytes,
    head_bytes,
    layer_bytes,
)
from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes
from workbench.costmodel.compute.frozen_gemms import FrozenGemm, frozen_gemms
from workbench.costmodel.compute.frozen_layers import frozen_layer_bytes
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer, adapted_layers
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.layer_gemms import layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import has_weight_gradients

ROTARY_TABLE_KERNELS = 12
"""Of the tables of cosines and sines, which each stage makes anew for a microbatch."""
VOCAB_PARALLEL_KERNELS = 16, 4
"""Of a vocabulary-parallel loss on numbers of each token (forward, backward)."""
LOOKUP_KERNELS = 4
"""Of a vocabulary-parallel embedding on tokens."""
SHARED_HEAD_KERNELS = 3
"""Of summing the gradient of a weight that several tensor ranks hold (GQA)."""


THIN_GEMMS = 2, 3
"""GEMMs of an adapter (forward, backward) but for its input's gradient."""
THIN_ACCUMULATION_KERNELS = 3
"""Of adding the gradients of both its weights to those before; B's, computed transposed, is copied.
"""


def layer_kernels(w: Workload, is_moe: bool) -> tuple[Number, Number]:
    """Kernels of one layer (forward, backward), with its GEMMs, attention, and the statistics of
    eager norms; backward adds every weight's gradient to those before.
    """
    gemms = len(layer_gemms(w, is_moe))
    counted = _with_attention(w, layer_bytes(w, is_moe))
    norms = _statistics(w)
    biases = {"qkv": 3, "all": gemms}.get(w.shape.biases, 0)
    weights = w.shape.num_residual_norms * (1 + (w.shape.norm == "layernorm"))
    shared = (
        SHARED_HEAD_KERNELS
        * (2 + 2 * (biases > 0))
        * (w.tensor > (w.shape.kv_heads or w.shape.heads))
    )
    return (
        counted.forward_kernels + gemms + 1 + 2 * norms,
        counted.backward_kernels
        + 3 * gemms
        + 2
        + norms
        + weights
        + 2 * bool(w.shape.qk_norm)
        + biases
        + shared,
    )


def _with_attention(w: Workload, moved: MovedBytes) -> MovedBytes:
    """And what is beside an attention kernel: each further block of a ring, attention to it and how
    its rows are weighted.
    """
    blocks = (w.ring - 1) * 1.0 if w.fixed.has_context_parallel else 0.0
    return moved + attention_bytes(w) + MovedBytes(0.0, 0.0, 8 * blocks, 2 * blocks)


def _statistics(w: Workload) -> int:
    """Norms of a layer that are eager RMSNorms: each adds epsilon and takes a root of each row, and
    backward casts its weight's gradient.
    """
    of_stream = w.shape.num_residual_norms * (w.shape.norm == "rmsnorm")
    return (of_stream + 2 * bool(w.shape.qk_norm)) * (not w.uses_fused_kernels)


def frozen_layer_kernels(w: Workload, kind: AdaptedLayer) -> tuple[Number, Number]:
    """The same of a layer whose weights are frozen beside adapters."""
    gemms = frozen_gemms(w, kind)
    moved, around = frozen_layer_bytes(w, kind, 0.0), _with_attention(w, MovedBytes())
    thin = adapter_gemm_kernels(gemms)
    shared = SHARED_HEAD_KERNELS * (w.tensor > (w.shape.kv_heads or w.shape.heads))
    attended = 1.0 * kind.has_attention_backward
    return (
        moved.forward_kernels
        + around.forward_kernels
        + len(gemms)
        + thin[0]
        + 1
        + 2 * _statistics(w),
        moved.backward_kernels
        + sum(gemm.has_input_gradient for gemm in gemms)
        + thin[1]
        + 2 * shared * bool(kind.of("attention.k", "attention.v"))
        + attended * (around.backward_kernels + 2),
    )


def adapter_gemm_kernels(gemms: list[FrozenGemm]) -> tuple[int, int]:
    """Kernels (forward, backward) of adapters' GEMMs and of adding up their weights' gradients."""
    adapters = [gemm for gemm in gemms if gemm.down is not None]
    own = THIN_GEMMS[1] + THIN_ACCUMULATION_KERNELS
    backward = sum(own + gemm.has_input_gradient for gemm in adapters)
    return THIN_GEMMS[0] * len(adapters), backward


def stage_kernels(w: Workload) -> tuple[Number, Number]:
    """Kernels (forward, backward) of a microbatch by pipeline rank: layers, rotary tables,
    embedding and head, whose weights' gradients are added to those before. Recomputed layers run
    their forward once more in backward.
    """
    table, head, trained = embedding_bytes(w), head_bytes(w), has_weight_gradients(w)
    of_layers = _layers_kernels(w)
    chunks = w.tokens / chunked_head(w, w.tokens)
    gemms = (1 + (1 + trained) * w.uses_fused_kernels) * chunks
    tables = ROTARY_TABLE_KERNELS * (w.shape.positions == "rope")
    split = 1.0 * (w.tensor > 1)
    loss = [split * kernels for kernels in VOCAB_PARALLEL_KERNELS]
    forward = w.has_embedding * (table.forward_kernels + split * LOOKUP_KERNELS)
    in_backward = (1 + trained) * (1 - w.uses_fused_kernels) + loss[1] + 2 + 2 * trained
    return (
        of_layers[0] + tables + forward + w.has_head * (head.forward_kernels + gemms + loss[0] + 2),
        of_layers[1]
        + w.has_embedding * (table.backward_kernels + 1) * trained
        + 2 * w.layers * w.searched.selective
        + w.has_head * (head.backward_kernels + in_backward),
    )


def _layers_kernels(w: Workload) -> tuple[Number, Number]:
    """Kernels (forward, backward) of all layers, by pipeline rank."""
    if w.fixed.adapter_rank:
        kinds = [(frozen_layer_kernels(w, kind), count) for kind, count in adapted_layers(w)]
    else:
        dense = layer_kernels(w, False)
        moe = layer_kernels(w, True) if w.shape.moe else dense
        kinds = [(dense, w.dense_layers), (moe, w.layers - w.dense_layers)]
    forward, backward = (
        sum((count * kernels[at] for kernels, count in kinds), w.zeros) for at in (0, 1)
    )
    return forward, backward + w.recomputed_layers * (_repeated(w, kinds) - 1 + casts_eagerly(w))


def _repeated(w: Workload, kinds: Sequence[tuple[tuple[Number, Number], Number]]) -> Number:
    """Forward kernels of a recomputed layer: of layers beside adapters the mean of those that have
    a backward, which alone are recomputed.
    """
    if not w.fixed.adapter_rank:
        return kinds[-1][0][0]
    own = [
        (kernels[0], n)
        for (kernels, n), (kind, _) in zip(kinds, adapted_layers(w))
        if kind.has_backward
    ]
    layers = sum((n for _, n in own), w.zeros)
    total = sum((n * kernels for kernels, n in own), w.zeros)
    return np.asarray(total / np.maximum(layers, 1))
