"""Activation memory beside frozen weights (LoRA, 2106.09685): what adapters save for backward, and
what only gradients of frozen weights would read.

A saves the adapter's input, or with dropout its own copy of it; B saves s x A^T, [tokens, rank].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.adapted_layers import (
    EXPERTS,
    SHARED,
    AdaptedLayer,
    dequantized_bytes,
    linear_widths,
)
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.plan.model.block_linears import ATTENTION, ROW_PARALLEL
from workbench.runtime_facts.cast_sizes import DROPOUT_CHUNK_NUMEL

RANDOM_BYTES = 8
"""Bytes of the random bits of an element, and of what they are hashed with."""


@dataclass(frozen=True)
class BaseSaved:
    """Bytes that a layer saves whose weights all have gradients, by what reads them."""

    first_norm: Number
    """Input and statistics of the norm before attention."""
    last_norm: Number
    """The same of the norm before the feed-forward layer, where branches do not share one."""
    first_output: Number
    """Output of the first of them."""
    last_output: Number
    """Of the second, and its all-gathered copy before an MoE layer."""
    last_output_read: Number
    """What of it the linears behind the second norm read."""
    attention: Number
    """What attention saves, from the outputs of its projections to its own."""
    unread_output: Number
    """Of it what the output projection alone reads."""
    activation: Number
    """What the activation saves, but for its output."""
    gate_operators: Number
    """1 where these are the gate, the activated gate and up, saved by operators of their own."""
    routing: Number
    """What only gradients of the router read."""
    dense_product: Number
    """Output of the activation that a down projection alone reads."""
    routed_product: Number
    """The same of routed experts."""
    routed_input: Number
    """Rows dispatched to experts."""

    @property
    def feed_forward(self) -> Number:
        """What the feed-forward layer saves, but for its input in the order of tokens."""
        product = self.dense_product + self.routed_product
        return self.activation + self.routing + product + self.routed_input

    @property
    def total(self) -> Number:
        """All of it."""
        norms = self.first_norm + self.first_output + self.last_norm + self.last_output
        return norms + self.attention + self.feed_forward


@dataclass(frozen=True)
class SavedWithAdapters:
    """Bytes that a layer with a frozen base saves, by when backward frees them."""

    attention: Number
    """All in front of the norm before the feed-forward layer."""
    norm: Number
    """That norm, and its output."""
    feed_forward: Number


def saved_with_adapters(w: Workload, layer: AdaptedLayer, base: BaseSaved) -> SavedWithAdapters:
    """What a kind of layer saves.

    Args:
        w: Per-rank problem sizes.
        layer: Which of its linears have adapters.
        base: What its linears and seams would save if every weight had a gradient.
    """
    kept = 0.0 if w.fixed.drops_adapter_inputs else 1.0
    first = attention_inputs(w)
    reads_first = kept * any(name in first for name in layer.adapted)
    reads_last = bool(_readers_of_last_norm(layer)) * kept
    if w.shape.parallel_residual == "one_norm":
        reads_first, reads_last = max(reads_first, reads_last), 0.0
    norm = layer.has_input_gradient * base.first_norm + reads_first * base.first_output
    last = layer.has_branch_gradient * base.last_norm
    return SavedWithAdapters(
        norm + _attention(w, layer, base, kept) + _own(w, layer.of(ATTENTION)),
        last + reads_last * base.last_output_read,
        _feed_forward(layer, base, kept) + _own(w, layer.of("mlp.")),
    )


def frozen_feed_forward_backward(
    w: Workload, wide: Number, layer: AdaptedLayer, base: BaseSaved
) -> Number:
    """Temporaries during the backward of the down projection and the activation, where weights are
    frozen; of an MoE layer that of shared experts runs first and frees what they saved.

    Args:
        w: Per-rank problem sizes.
        wide: Bytes of one tensor of feed-forward width.
        layer: Which of its linears have adapters.
        base: What its linears and seams would save if every weight had a gradient.
    """
    if not layer.is_moe:
        return _down_and_activation(w, wide, layer, base.gate_operators)
    shared = w.shared_ffn * w.tokens * w.element_bytes
    down = bool(layer.of(SHARED + "down")) and not w.fixed.drops_adapter_inputs
    freed = base.activation * shared / wide + base.dense_product * down
    first, second = (
        _down_and_activation(w, part, _with_experts(layer, start), base.gate_operators)
        for part, start in ((shared, SHARED), (wide - shared, EXPERTS))
    )
    peak: Number = np.maximum(first, second - freed)
    return peak


def _with_experts(layer: AdaptedLayer, start: str) -> AdaptedLayer:
    """An MoE layer with those of its adapted experts alone whose names start so."""
    own = (name for name in layer.adapted if name.startswith((start, ATTENTION)))
    return layer._replace(adapted=tuple(own))


def _down_and_activation(
    w: Workload, wide: Number, layer: AdaptedLayer, gate_operators: Number
) -> Number:
    """Of a down projection with an adapter the gradient of its input, to which the adapter adds in
    place; of experts, and with dropout, there are both gradients and their sum.

    What A reads is freed before the activation runs, but where ReLU saved it too; so is, under
    sequence parallelism, the all-gathered gradient of the output.
    """
    adapted = layer.last("down")
    in_front = layer.has_branch_gradient or bool(layer.last("gate", "up"))
    if not (in_front or adapted):
        return 0.0 * wide
    drops = w.fixed.drops_adapter_inputs and bool(adapted)
    frees = bool(adapted) and (drops or w.shape.mlp != "relu")
    summed = 3 * (drops or any(name.startswith(EXPERTS) for name in adapted)) * in_front
    one_side = gate_operators * (_saved_of_gate(layer) < 1)
    activated = ((3 if w.shape.gated else 2) - one_side) * in_front
    gathered = w.hidden_activation_bytes - w.residual_bytes
    of_gemm = np.maximum((1 + drops) * wide, wide + dequantized_bytes(w, layer.is_moe)) + gathered
    dropped = (summed - frees) * wide + drops * in_front * drawn_mask_bytes(w, layer)
    peak: Number = np.maximum(of_gemm, np.maximum(dropped, (activated - frees) * wide))
    return peak


def drawn_mask_bytes(w: Workload, layer: AdaptedLayer) -> Number:
    """Bytes of random bits while the input of the down projection's adapter is dropped by plain
    operators; fused kernels draw in registers, but on a CPU.
    """
    if not (w.fixed.drops_adapter_inputs and w.fixed.framework.kernels.counts_operators):
        return 0.0
    if w.uses_fused_kernels and (w.fixed.kernels == "compiled" or w.fixed.gpu.device != "cpu"):
        return 0.0
    widths = [linear_widths(w, name).inputs for name in layer.last("down")]
    drawn: Number = 0.0
    for width in widths:
        rows = np.minimum(w.tokens, np.maximum(1, DROPOUT_CHUNK_NUMEL // np.maximum(1, width)))
        drawn = np.maximum(drawn, rows * width * RANDOM_BYTES)
    return drawn


def frozen_forward(w: Workload, wide: Number, layer: AdaptedLayer, base: BaseSaved) -> Number:
    """Temporaries of a layer's forward at its end, besides what it saves: of one without a backward
    what the activation reads and writes, of an adapter with dropout the drawn bits, of experts
    their rows and outputs. Beside them are the branches that were added to the residual stream, and
    what no backward reads of that.
    """
    branches: Number = (2 + (w.layers > 1)) * w.residual_bytes
    if not layer.has_backward and not layer.is_moe:
        gated = 4.0 - w.uses_fused_kernels if w.shape.gated else 2.0
        return gated * wide + branches + 2 * w.residual_bytes
    if layer.is_moe:
        return branches + w.residual_bytes + _moe_outputs(w, layer, base)
    drawn = drawn_mask_bytes(w, layer)
    dropped: Number = (drawn + wide + branches) * np.greater(drawn, 0)
    return dropped


def _moe_outputs(w: Workload, layer: AdaptedLayer, base: BaseSaved) -> Number:
    """What an MoE layer holds besides what it saves when its outputs are added: those of routed and
    of shared experts, under sequence parallelism also their shard and the all-gathered input, and
    the dispatched rows that no adapter saves.
    """
    shards = w.sequence_parallel > 1
    gathered = base.last_output_read * shards * (not _readers_of_last_norm(layer))
    reads_rows = any(name.startswith(EXPERTS) for name in layer.last("gate", "up"))
    outputs = w.hidden_activation_bytes * (1 + (w.shared_ffn > 0)) + w.residual_bytes * shards
    total: Number = outputs + gathered + base.routed_input * (not reads_rows)
    return total


def unsaved_product(layer: AdaptedLayer, base: BaseSaved) -> Number:
    """Output of the activation of a dense layer while the down projection runs, where no adapter
    of that saves it.
    """
    return base.dense_product * (not layer.is_moe and not layer.last("down"))


def attention_inputs(w: Workload) -> tuple[str, ...]:
    """Names of the linears of a block that read attention's normed input."""
    mla = w.shape.mla
    if mla is None:
        return ("attention.q", "attention.k", "attention.v")
    return ("attention.q_down" if mla.q_rank else "attention.q", "attention.kv_down")


def _readers_of_last_norm(layer: AdaptedLayer) -> list[str]:
    """Adapted linears that read the normed input of the feed-forward layer in the order of
    tokens.
    """
    return [name for name in layer.last("gate", "up") if not name.startswith(EXPERTS)]


def _saved_of_gate(layer: AdaptedLayer) -> float:
    """Share that is saved of gate, activated gate and up, where in a first stage only one side may
    have a gradient: up's reads the activated gate, the gate's all but that.
    """
    sides = {name.rpartition(".")[2] for name in layer.last("gate", "up")}
    if layer.has_branch_gradient or len(sides) != 1:
        return 1.0
    return 1 / 3 if sides == {"up"} else 2 / 3


def _attention(w: Workload, layer: AdaptedLayer, base: BaseSaved, kept: float) -> Number:
    has_output = bool(layer.of("attention.o")) * kept
    if not layer.has_attention_backward:
        return has_output * w.o_width * w.tokens * w.element_bytes
    return base.attention - base.unread_output * (1 - has_output)


def _feed_forward(layer: AdaptedLayer, base: BaseSaved, kept: float) -> Number:
    into, down = layer.last("gate", "up"), layer.last("down")
    routed = [name.startswith(EXPERTS) for name in down]
    share = base.gate_operators * _saved_of_gate(layer) + (1 - base.gate_operators)
    saved = (layer.has_branch_gradient or bool(into)) * base.activation * share
    saved = saved + layer.has_branch_gradient * base.routing
    saved = saved + kept * base.dense_product * (False in routed)
    saved = saved + base.routed_product * (True in routed)
    return saved + base.routed_input * any(name.startswith(EXPERTS) for name in into)


def _own(w: Workload, names: list[str]) -> Number:
    """Bytes that adapters save for themselves: inputs of B, and with dropout those of A."""
    saved: Number = 0.0
    for name in names:
        saved = saved + adapter_rows(w, name) * w.fixed.adapter_rank * w.element_bytes
        if w.fixed.drops_adapter_inputs:
            saved = saved + _input_bytes(w, name)
    return saved


def _input_bytes(w: Workload, name: str) -> Number:
    """Bytes of the input of A, of column-parallel linears a rank's shard of the sequence."""
    shards = 1.0 if name.rpartition(".")[2] in ROW_PARALLEL else w.sequence_parallel
    width = linear_widths(w, name).inputs
    return adapter_rows(w, name) * width * w.element_bytes / shards


def adapter_rows(w: Workload, name: str) -> Number:
    """Rows of the input of a linear, of a microbatch."""
    return w.tokens * (w.routed_rows_per_token if name.startswith(EXPERTS) else 1.0)
