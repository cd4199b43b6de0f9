"""Per-rank problem sizes of each candidate: widths, tokens, layers and microbatches of one rank.

Floats or arrays as `config` says; what differs between pipeline ranks has them along the first
axis. Widths are those of the widest tensor-parallel rank, to which all the others are padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.frameworks.framework_profile import WORKBENCH
from workbench.costmodel.inputs.config import Array, FixedConfig, Number, SearchedConfig
from workbench.costmodel.inputs.tensor_tiling import TensorTiling
from workbench.plan.model_shape import Shape, rows_of_an_expert
from workbench.plan.schema import STORED


@dataclass(frozen=True)
class RankShapes:
    """Quantities of candidates, a rank at a time."""

    fixed: FixedConfig
    searched: SearchedConfig
    data: Number
    """Ranks over which a stage is replicated, context apart."""
    microbatches: Number
    tokens: Number
    """Tokens of one microbatch on one rank."""
    tiling: TensorTiling
    """How tensor ranks cut activations and weights."""
    hidden_per_rank: Number
    """Width of a rank's part of a hidden-wide activation."""
    weight_in_dim: Number
    """Hidden-long side of a rank's part of a weight."""
    # widths of a tensor-parallel rank
    q_width: Number
    k_width: Number
    v_width: Number
    o_width: Number
    heads: Number
    ffn: Number
    expert_ffn: Number
    """Of one expert."""
    shared_ffn: Number
    """Of all shared experts side by side."""
    vocab_rows: Number
    """Vocabulary rows of a rank, padding included."""
    sequence_parallel: Number
    """Ranks over which norms and residuals are split: the tensor ranks, or 1."""
    element_bytes: int
    """Bytes of a parameter and of an activation."""
    gradient_element_bytes: Number
    """Bytes of a gradient as it adds up and is reduced."""
    reduce_microbatch: Number
    """1 where gradients are reduced after every microbatch."""
    # by pipeline rank
    rank_multiplicity: Array
    """Pipeline ranks that this one stands for."""
    layers: Array
    dense_layers: Array
    """Layers with a dense feed-forward; the rest are mixtures."""
    has_embedding: Array
    """1 where the embedding is."""
    has_head: Array
    """1 where the head is."""
    num_boundary_transfers: Array
    """Other ranks' stages that the rank's own hand over to, forward or backward: transfers of a
    microbatch each way.
    """
    microbatches_in_flight: Array
    """Microbatches whose activations are held at once (of chunks: sums, so fractions)."""
    deferred_microbatches: Array
    """How many of those wait for their weight gradients alone."""
    losses_in_flight: Number
    """Microbatches of the last stage whose loss has not run backward yet."""

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return self.fixed.shape

    @property
    def pipeline(self) -> int:
        """Pipeline ranks."""
        return self.fixed.pipeline

    @property
    def zero(self) -> int:
        """ZeRO stage."""
        return self.fixed.zero

    @property
    def tensor(self) -> Number:
        """Tensor-parallel ranks."""
        return self.searched.tensor

    @property
    def recomputed_layers(self) -> Array:
        """Layers recomputed in full, by pipeline rank."""
        return self.searched.recomputed_layers

    @property
    def layers_after_recomputed(self) -> Array:
        """Layers behind the last of them on its rank, which keep all."""
        return self.searched.layers_after_recomputed

    @property
    def dtype(self) -> str:
        """Of parameters and activations."""
        return STORED.get(self.fixed.precision, self.fixed.precision)

    @property
    def stored_gradient_bytes(self) -> Number:
        """Bytes of a gradient as it is kept."""
        return (
            self.gradient_element_bytes
            if self.fixed.gradient_bytes < 0
            else self.fixed.gradient_bytes
        )

    @property
    def hidden_activation_bytes(self) -> Number:
        """Bytes of one hidden-wide tensor of a microbatch, in the model's dtype."""
        return self.tokens * (self.hidden_per_rank * self.element_bytes)

    @property
    def kv_head_repeats(self) -> Number:
        """How often Ulysses repeats a key-value head so that the context ranks share them
        evenly.
        """
        if self.shape.mla is not None:
            return 1.0
        heads = np.maximum(
            1, np.asarray(self.k_width / int(self.shape.head_dim or 1), dtype=np.int64)
        )
        return self.searched.context / np.gcd(
            heads, np.asarray(self.searched.context, dtype=np.int64)
        )

    @property
    def upcast_bytes(self) -> int:
        """Bytes of an element where the model's 16-bit tensors are widened."""
        return max(4, self.element_bytes)

    @property
    def uses_fused_kernels(self) -> bool:
        """Whether our own fused or compiled operators run; other stacks' are in their constants."""
        return self.fixed.stack == WORKBENCH and self.fixed.kernels != "eager"

    @property
    def routed_rows_per_token(self) -> Number:
        """Rows of experts that a token makes: its choices, or an even share of what experts have
        room for.
        """
        moe = self.shape.moe
        if moe is None or moe.capacity is None:
            return moe.top_k if moe else 0
        length = self.fixed.sequence_length
        return moe.experts * rows_of_an_expert(length, moe) / length

    @property
    def zeros(self) -> Array:
        """Zero on every pipeline rank."""
        return np.zeros_like(self.has_embedding)
