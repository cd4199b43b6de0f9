"""Per-rank problem sizes of each candidate: widths, tokens, layers and microbatches of one rank.

Floats or arrays as `config` says; what differs between the ranks of `places` has them along the
first axis: one of each pipeline stage, or several where stages have replicas of their own. Widths
are those of the widest tensor-parallel rank, to which the others are padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from workbench.costmodel.inputs.config import Array, FixedConfig, Mask, Number, SearchedConfig
from workbench.costmodel.inputs.quantized_formats import FORMATS, QuantizedFormat
from workbench.costmodel.inputs.tensor_tiling import TensorTiling
from workbench.plan.model.model_shape import Shape, rows_of_an_expert
from workbench.plan.rank_placement import RankPlace
from workbench.plan.schema import STORED


@dataclass(frozen=True, eq=False)
class RankShapes:
    """Problem sizes of one rank, per candidate."""

    fixed: FixedConfig
    searched: SearchedConfig
    places: tuple[RankPlace, ...]
    """The ranks that are evaluated."""
    data: Number
    """Number of data-parallel ranks, context ranks not counted."""
    microbatches: Number
    """Number of microbatches of a step that a rank takes."""
    sequences: Number
    """Sequences of one microbatch that a rank has a part of."""
    tokens: Number
    """Tokens of one microbatch on one rank."""
    tiling: TensorTiling
    """How tensor ranks shard activations and weights."""
    hidden_per_rank: Number
    """Width of a rank's shard of an activation as wide as the model's hidden size."""
    weight_in_dim: Number
    """Size of the hidden dim of a rank's shard of a weight."""
    # widths of a tensor-parallel rank
    q_width: Number
    k_width: Number
    v_width: Number
    o_width: Number
    heads: Number
    ffn: Number
    expert_ffn: Number
    """Width of one expert."""
    shared_ffn: Number
    """Width of all shared experts together."""
    vocab_rows: Number
    """Vocabulary rows of a rank, padding included."""
    head_rows: Number
    """The same of the head, which operator strategies may shard in another way."""
    sequence_parallel: Number
    """Number of ranks over which norms and residuals are sharded: the tensor ranks, or 1."""
    element_bytes: int
    """Bytes per element of parameters and activations."""
    gradient_element_bytes: Number
    """Bytes per gradient as it is accumulated and reduced."""
    reduce_microbatch: Number
    """1 where gradients are reduced after every microbatch."""
    # by rank of `places`
    alike: tuple[tuple[int, ...], ...]
    """Rows of the schedule's table that this entry stands for."""
    rank_multiplicity: Array
    """How many they are."""
    layer_indices: tuple[tuple[int, ...], ...]
    """Indices of the layers of each."""
    layers: Array
    dense_layers: Array
    """Layers with a dense feed-forward; the others are MoE layers."""
    recomputed_layers: Array
    """Number of fully recomputed layers."""
    has_embedding: Array
    """1 on the rank of the embedding."""
    has_head: Array
    """1 on the rank of the head."""
    num_boundary_transfers: Array
    """Stage boundaries of the rank that lie between two ranks: sends per microbatch and direction.
    """
    microbatches_in_flight: Array
    """Microbatches whose activations are live at once; a chunk counts 1/chunks."""
    inputs_ahead: Array
    """Tensors of a stage's boundary that have arrived by the backward at the peak, and are needed
    later.
    """
    losses_in_flight: Number
    """Microbatches of the last stage whose loss has not run backward yet."""

    @property
    def shape(self) -> Shape:
        """Shape of the model."""
        return self.fixed.shape

    @property
    def pipeline(self) -> int:
        """Number of pipeline ranks."""
        return self.fixed.pipeline

    @property
    def zero(self) -> int:
        """ZeRO stage."""
        return self.fixed.zero

    @property
    def tensor(self) -> Number:
        """Number of tensor-parallel ranks."""
        return self.searched.tensor

    @property
    def layers_after_recomputed(self) -> Array:
        """Number of layers behind the last recomputed one, where a rank has one stage."""
        return self.searched.layers_after_recomputed

    @property
    def dtype(self) -> str:
        """Dtype of parameters and activations."""
        return STORED.get(self.fixed.precision, self.fixed.precision)

    @property
    def quantized_format(self) -> QuantizedFormat | None:
        """What operands of layers' GEMMs are quantized to; None: wider than 8 bits."""
        return FORMATS.get(self.fixed.precision)

    @property
    def stored_gradient_bytes(self) -> Number:
        """Bytes per gradient as it is stored."""
        stored = self.fixed.gradient_bytes
        return self.gradient_element_bytes if stored is None else stored

    @property
    def hidden_activation_bytes(self) -> Number:
        """Bytes of one `[tokens, hidden_per_rank]` activation of a microbatch."""
        return self.tokens * (self.hidden_per_rank * self.element_bytes)

    @property
    def residual_bytes(self) -> Number:
        """Bytes of one residual-stream activation, sharded under sequence parallelism; under
        operator strategies, as it passes between stages.
        """
        named = self.fixed.operators
        shards = self.sequence_parallel if named is None else named.ranks_over(named.boundary)
        return self.hidden_activation_bytes / shards

    @property
    def step_microbatches(self) -> Number:
        """Microbatches of a step that a stage takes, with all its `busy_replicas`."""
        if not self.fixed.in_turn:
            return self.microbatches
        return self.fixed.global_batch / self.searched.micro_batch

    @property
    def busy_replicas(self) -> Number:
        """Data-parallel ranks that compute a microbatch, each counted by its share of the sequences
        that the first has.
        """
        if self.fixed.in_turn:
            return 1.0
        if not self.fixed.replicas:
            return self.data
        return np.asarray(self.searched.micro_batch / self.sequences)

    @property
    def table_params(self) -> Number:
        """Parameters of the larger of the embedding table and the head on one tensor rank."""
        return np.maximum(self.vocab_rows, self.head_rows) * self.weight_in_dim

    @property
    def attended_width(self) -> Number:
        """Width of attention's output, which latent attention may have padded."""
        return self.o_width if self.shape.mla is None else self.v_width

    @property
    def padded_output_width(self) -> Number:
        """The same where it is a tensor beside the output projection's input; else 0."""
        return self.attended_width * np.greater(self.attended_width, self.o_width)

    @property
    def head_params(self) -> Number:
        """Parameters of the head on one tensor rank."""
        return self.head_rows * self.weight_in_dim

    @property
    def ulysses(self) -> Number:
        """Context ranks between which an all-to-all exchanges heads for tokens (2309.14509)."""
        c = self.searched.context
        if self.fixed.context_algorithm == "usp":
            return np.minimum(c, self.fixed.ulysses_size)
        return c if self.fixed.context_algorithm == "ulysses" else 1.0

    @property
    def ring(self) -> Number:
        """Context ranks around which keys and values are sent (2310.01889)."""
        return self.searched.context / self.ulysses

    @property
    def kv_head_repeats(self) -> Number:
        """Copies of each key-value head with which Ulysses (2309.14509) gives every rank of its
        all-to-all whole heads.
        """
        if self.shape.mla is not None:
            return 1.0
        heads = np.maximum(
            1, np.asarray(self.k_width / int(self.shape.head_dim or 1), dtype=np.int64)
        )
        ratio: Number = self.ulysses / np.gcd(heads, np.asarray(self.ulysses, dtype=np.int64))
        return ratio

    @property
    def upcast_bytes(self) -> int:
        """Bytes per element where 16-bit tensors are upcast to fp32; 8 for an fp64 model."""
        return max(4, self.element_bytes)

    @property
    def uses_fused_kernels(self) -> bool:
        """Whether fused or compiled seams run that are counted; those of other frameworks are part
        of the textbook counts.
        """
        return self.fixed.framework.kernels.runs_fused_seams(self.fixed.kernels)

    @property
    def fuses_head(self) -> Mask:
        """True where head and loss are one operator over chunks of tokens that keeps no logits."""
        if self.fixed.framework.loss.kind == "fused_linear":
            return True
        own: Mask = np.asarray(self.tensor) == 1
        return self.uses_fused_kernels & own

    @property
    def experts_over_tensor(self) -> Number:
        """Tensor ranks between which experts are spread in place of split: each has the rows of as
        many fewer tokens.
        """
        own = self.fixed.expert_tensor
        return self.tensor / own if own else 1.0

    @property
    def routed_rows_per_token(self) -> Number:
        """Expert rows per token on a rank: top-k, or with a capacity factor an even share of the
        experts' capacity.
        """
        moe = self.shape.moe
        if moe is None:
            return 0
        if moe.capacity is None:
            return moe.top_k / self.experts_over_tensor
        length = self.fixed.sequence_length
        rows = moe.experts * rows_of_an_expert(length, moe) / length
        return rows / self.experts_over_tensor

    @cached_property
    def zeros(self) -> Array:
        """Zero on every rank of `places`, for broadcasting."""
        return np.zeros_like(self.has_embedding)
