"""The collective call that the cost model counts, shared by 1-D and grid tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload


@dataclass(frozen=True)
class CollectiveCall:
    """Calls of one collective in a step, by pipeline rank."""

    axis: str
    """Mesh axis that it runs over: tensor, context, expert, pipeline, data or world."""
    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send or recv."""
    group_size: Number
    dtype: str
    bytes: Number
    """Bytes of the full (unsharded) tensor."""
    count: Number
    """Calls in a step."""
    action: str
    """Action in which it is called: F, B, REDUCE_GRAD, P2P, OPTIMIZER, CLIP or REFERENCE."""
    sub_axis: str = ""
    """Part of the axis that it runs over, where the parts have links of their own."""


REFERENCE = "REFERENCE"
"""Action of the forward passes of a preference's reference."""


def gradient_dtype_name(w: Workload) -> str:
    """Dtype in which gradients of one plan are reduced; a search over many plans does not ask for
    it.
    """
    alike = np.ndim(w.gradient_element_bytes) or float(w.gradient_element_bytes) == w.element_bytes
    return w.dtype if alike else "fp32"


def shared_kv_head_calls(w: Workload) -> list[CollectiveCall]:
    """All-reduce of key and value weight gradients, where there are fewer key-value heads than
    tensor ranks and several ranks hold the same head.
    """
    shape = w.shape
    if shape.mla is not None:
        return []
    columns = w.tiling.column_parts
    times = 2 * w.microbatches * w.layers * (columns > int(shape.kv_heads or 0))
    sizes = [
        shape.kv_width * w.weight_in_dim,
        *([shape.kv_width] if shape.biases in ("qkv", "all") else []),
    ]
    return [
        CollectiveCall("tensor", "all_reduce", columns, w.dtype, n * w.element_bytes, times, "B")
        for n in sizes
    ]


def width_norm_calls(w: Workload) -> list[CollectiveCall]:
    """Sums of squares of norms over all query and all key heads, and of what projects their
    gradients, each over the tensor ranks.
    """
    if w.shape.qk_norm != "width":
        return []
    times, size = 2 * w.microbatches * w.layers, w.tokens * w.upcast_bytes
    again = 2 * w.microbatches * w.recomputed_layers
    return [
        CollectiveCall("tensor", "all_reduce", w.tensor, "fp32", size, times, "F"),
        CollectiveCall("tensor", "all_reduce", w.tensor, "fp32", size, times + again, "B"),
    ]


def latents_are_apart(w: Workload) -> bool:
    """Whether tensor ranks all have latent attention's projections down to its latents, and only
    what follows them is column-parallel.
    """
    return w.shape.mla is not None and w.fixed.framework.kernels.pads_values


def latent_calls(w: Workload) -> list[CollectiveCall]:
    """Collectives of the latents and of the rotary key, by which heads' gradients come together;
    with sequence parallelism they are all-gathered, for the weight gradients of the latents once
    more.
    """
    mla = w.shape.mla
    if mla is None or not latents_are_apart(w):
        return []
    on, off, times = w.searched.sequence, 1 - w.searched.sequence, w.microbatches * w.layers
    again = w.microbatches * w.recomputed_layers
    found = []
    for width, is_read in ((mla.q_rank or 0, True), (mla.kv_rank, True), (mla.rope_dim, False)):
        size = w.tokens * width * w.element_bytes
        for kind, action, count in (
            ("all_reduce", "B", off * times),
            ("all_gather", "F", on * times),
            ("all_gather", "B", on * (times * is_read + again)),
            ("reduce_scatter", "B", on * times),
        ):
            found.append(CollectiveCall("tensor", kind, w.tensor, w.dtype, size, count, action))
    return found
