"""Memory of attention over tiles, where scores have a window, biases or a soft-cap.

Counted as `models/attention/blockwise_attention.py` and `parallel/context/blockwise_ring.py`
allocate.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.runtime_facts.attention_tiles import TILE_QUERIES

POSITION_BYTES = 8
"""Bytes of an int64 distance between two tokens."""


def runs_tiles(w: Workload) -> bool:
    """Whether attention is over tiles: of this engine, where scores are changed, but for math."""
    counts = w.fixed.framework.kernels.counts_operators
    changed = w.fixed.separate_documents or w.shape.changes_scores(w.fixed.sequence_length)
    return counts and changed and w.fixed.attention != "math"


def tiled_backward_bytes(w: Workload) -> Number:
    """Temporaries of attention's backward: gradients of output, queries, keys and values, and one
    tile's; of a ring also the keys and values that travel, and their gradients.
    """
    wide = w.upcast_bytes
    kv_width = (w.k_width + w.v_width) * w.tokens
    alone = w.q_width * w.tokens * w.element_bytes + wide * kv_width
    around = wide * w.q_width * w.tokens + kv_width * _ring_bytes_of_kv(w)
    gradients = np.where(w.ring > 1, around, alone)
    return w.attended_width * w.tokens * w.element_bytes + gradients + _tile_bytes(w)


def _ring_bytes_of_kv(w: Workload) -> Number:
    """Bytes by element of this rank's keys and values: those here and on their way, and their
    gradients here, of this rank's own and on their way, at the step that has the most.
    """
    e, wide = w.element_bytes, w.upcast_bytes
    of_two: Number = np.maximum(2 * e + wide, e + 2 * wide)
    return np.where(w.ring > 3, 2 * e + 4 * wide, np.where(w.ring > 2, e + 4 * wide, of_two))


def _tile_bytes(w: Workload) -> Number:
    """Temporaries of the largest tile: of a layer that attends to all, where some do.

    Torch's kernel: the mask, and then the tile's gradients or the distances that the mask is made
    of. Plain operators: probabilities, their gradients and the soft-cap's derivative, the tile's
    gradients, and rows of queries and of output that share key-value heads, copied.
    """
    queries, keys = _tile_lengths(w)
    sequences, wide = w.tokens * w.searched.context / w.fixed.sequence_length, w.upcast_bytes
    pairs, heads = queries * keys, w.heads / w.ulysses
    of_queries = sequences * w.q_width / w.ulysses * queries
    of_keys = sequences * (w.k_width + w.v_width) / w.ulysses * keys
    if w.fixed.attention == "flash":
        masks = sequences if w.fixed.separate_documents else 1.0
        mask = wide * np.where(w.shape.positions == "alibi", heads, 1.0) * masks * pairs
        made = np.maximum((of_queries + of_keys) * w.element_bytes, masks * pairs)
        masked: Number = mask + np.maximum(made, (POSITION_BYTES + wide) * pairs)
        return masked
    scores = 2 + (w.shape.attention_softcap is not None)
    tile: Number = scores * sequences * heads * pairs + of_keys + 3 * of_queries
    return tile * wide


def _tile_lengths(w: Workload) -> tuple[Number, Number]:
    """(queries, keys)."""
    s, shape = w.fixed, w.shape
    length = np.where(w.ring > 1, s.sequence_length / (2 * w.ring), s.sequence_length)
    queries = np.minimum(TILE_QUERIES, length)
    every = shape.full_attention_every
    if shape.window is None or (every is not None and every <= shape.layers):
        return queries, length
    return queries, np.minimum(length, shape.window + queries - 1)
