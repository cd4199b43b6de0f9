"""Parameters of each pipeline rank, and the bytes of parameters, gradients and optimizer
(1910.02054 for ZeRO).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.plan.parameter_count import block_norms, norm


@dataclass(frozen=True)
class Held:
    """Parameters of one rank, by pipeline rank; experts apart, because they are replicated on fewer
    ranks.
    """

    dense: Array
    experts: Array
    layer: Number
    """Parameters of one dense layer: a unit that ZeRO-3 gathers."""
    adapters: Array
    """Parameters of low-rank adapters, replicated as the dense ones."""

    @property
    def total(self) -> Array:
        """All parameters."""
        return self.dense + self.experts + self.adapters

    @property
    def trained(self) -> Array:
        """Those that have gradients and moments: the adapters alone where there are any."""
        return np.where(self.adapters > 0, self.adapters, self.total)


def held(w: Workload) -> Held:
    """Parameters that a rank holds before data parallelism shards anything."""
    shape = w.shape
    layer = attention_parameters(w) + block_norms(shape) * w.tiling.vector
    mlp = feed_forward_parameters(w, w.ffn)
    sparse = w.layers - w.dense_layers
    moe = shape.moe
    expert = feed_forward_parameters(w, w.expert_ffn) if moe else 0.0
    shared = feed_forward_parameters(w, w.shared_ffn) if moe and moe.shared else 0.0
    router = w.height * moe.experts / w.tiling.hidden + shared if moe else 0.0
    dense = w.layers * layer + w.dense_layers * mlp + sparse * router + _ends(w)
    experts = sparse * (moe.experts / w.knobs.expert * expert if moe else 0.0)
    unit = layer + (mlp if moe is None else router + moe.experts / w.knobs.expert * expert)
    return Held(dense, experts, unit, w.layers * _adapter(w))


def _adapter(w: Workload) -> Number:
    """Parameters of one layer's adapters (2106.09685): rank x (inputs + outputs) of each projection
    that has one.
    """
    rank, h, thin = w.setting.adapter_rank, w.height / w.tiling.hidden, w.tiling.thin
    attention = 4 * h + thin * (w.q_width + w.k_width + w.v_width + w.o_width)
    wide = (2 if w.shape.gated else 1) * (h + thin * w.ffn) + thin * w.ffn + h
    return rank * (attention + wide * w.setting.adapter_everywhere)


def attention_parameters(w: Workload) -> Number:
    """Of one block's attention, on a tensor rank: columns of q, k, v and rows of o are split, o's
    bias is not.
    """
    shape, h, thin = w.shape, w.height, w.tiling.thin
    if shape.mla is None:
        bias = (w.q_width + 2 * w.k_width) * (shape.biases in ("qkv", "all")) + w.hidden * (
            shape.biases == "all"
        )
        return h * (w.q_width + w.k_width + w.v_width + w.o_width) + bias
    m, latent = shape.mla, h / w.tiling.hidden
    query = latent * m.q_rank + thin * m.q_rank * w.q_width if m.q_rank else h * w.q_width
    up = thin * m.kv_rank * w.heads * (m.nope_dim + m.value_dim)
    return query + latent * (m.kv_rank + m.rope_dim) + up + w.o_width * h


def feed_forward_parameters(w: Workload, width: Number) -> Number:
    """Of one feed-forward layer whose local width is `width`."""
    wide = 2 if w.shape.gated else 1
    bias = wide * width + w.hidden if w.shape.biases == "all" else 0.0
    return (wide + 1) * w.height * width + bias


def _ends(w: Workload) -> Array:
    shape, table, part = w.shape, w.vocab * w.height, w.tiling.vector
    positions = part * shape.max_positions * shape.hidden if shape.positions == "learned" else 0
    head = table * (1.0 - w.first * float(shape.tied))
    first = w.first * (table + positions + part * shape.embedding_norm * norm(shape, shape.hidden))
    return np.asarray(first + w.last * (head + part * norm(shape, shape.hidden)))


@dataclass(frozen=True)
class States:
    """Bytes that persist from step to step, by pipeline rank."""

    parameters: Array
    gradients: Array
    optimizer: Array
    master: Array


def states(w: Workload, p: Held) -> States:
    """Parameters, gradients and optimizer as ZeRO's stage shards them.

    Gradients stay whole where ZeRO-2 or 3 reduces them only once a step of several microbatches.
    """
    whole, shards = p.trained, sharded(w, p)
    if w.setting.adapter_rank:
        shards = whole / w.knobs.shard
    optimizer = shards if w.zero >= 1 else whole
    gradients = whole
    if w.zero >= 2:
        gradients = np.where(w.reduce_microbatch > 0, shards, whole)
    widened = w.setting.software.widened_gradients * (w.setting.precision == "fp16")
    return States(
        parameters=(sharded(w, p) if w.zero == 3 else p.total) * w.setting.parameter_bytes,
        gradients=gradients * w.stored_gradient
        + whole * w.setting.accumulator_bytes
        + optimizer * widened,
        optimizer=optimizer * w.setting.moment_bytes,
        master=optimizer * w.setting.master_bytes,
    )


def sharded(w: Workload, p: Held) -> Array:
    """Parameters of one rank after sharding over data x context; experts over what expert ranks
    leave of it.
    """
    shard, expert = w.knobs.shard, w.knobs.expert
    return np.asarray((p.dense + p.adapters) / shard + p.experts / np.maximum(1.0, shard / expert))
