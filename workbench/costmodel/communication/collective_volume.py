"""Every collective of a step: how many, how large, over which axis. The words are those that a run
measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.communication import bucket_volume
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload

LOSS_BYTES = 12.0
"""Loss, squared norm and stop sign: three fp32 numbers that all ranks add once a step."""


@dataclass(frozen=True)
class Call:
    """Calls of one collective a step, by pipeline rank; `bytes` is the full tensor's."""

    axis: str
    kind: str
    group_size: Number
    dtype: str
    bytes: Number
    count: Number
    action: str


def calls(w: Workload) -> list[Call]:
    """All collectives of a step. Buckets of gradients count as equal; `exactly` packs them as the
    engine does.
    """
    everyone = Call("world", "all_reduce", w.setting.world, "fp32", LOSS_BYTES, 1.0, "CLIP")
    return [*_tensor(w), *_loss(w), *_context(w), *_experts(w), *_pipeline(w), *_data(w), everyone]


def exactly(w: Workload, all_calls: list[Call], rank: int) -> list[Call]:
    """The calls of pipeline rank `rank` of one plan: buckets of their own sizes, none that moves
    nothing.
    """
    own = [_on_rank(call, rank) for call in all_calls]
    if w.setting.stack == "workbench":
        dtypes = {"parameter": w.dtype, "gradient": gradient_dtype(w)}
        packed = [
            Call(axis, kind, group, dtypes[dtype], size, float(count), action)
            for (axis, kind, group, dtype, size, action), count in bucket_volume.traffic(
                w, rank
            ).items()
        ]
        own = [
            call for call in own if call.axis != "data" and call.action != "REDUCE_GRAD"
        ] + packed
    return [call for call in own if call.group_size > 1 and call.count > 0 and call.bytes > 0]


def _on_rank(call: Call, rank: int) -> Call:
    group_size, size, count = (
        _at(value, rank) for value in (call.group_size, call.bytes, call.count)
    )
    return replace(call, group_size=round(group_size), bytes=size, count=count)


def _at(value: Number, rank: int) -> float:
    return float(value[rank] if np.ndim(value) else value)


def _tensor(w: Workload) -> list[Call]:
    """Two sums a layer and pass; the embedding's and the head's (1909.08053); with sequence
    parallel the same bytes as gathers and scatters, and a gather of each input again for the
    weights' gradients (2205.05198).
    """
    if w.setting.algorithm != "1d":
        from workbench.costmodel.communication.grid_volume import tiled

        return tiled(w)
    t, m, dtype, stream = w.tensor, w.microbatches, w.dtype, w.stream
    two, first, last, gathered = 2 * w.layers, w.first, w.last, 2 * w.recomputed
    # What nothing needs is not made again: the sum at a layer's end, unless a stack runs whole
    # layers.
    again = (1 + w.setting.software.repeats_whole) * w.recomputed
    on, off = w.knobs.sequence, 1 - w.knobs.sequence
    kept = w.layers - w.dense_layers  # a mixture keeps its gathered input
    return [
        Call("tensor", "all_reduce", t, dtype, stream, off * m * (two + first), "F"),
        Call("tensor", "all_reduce", t, dtype, stream, off * m * (two + last + again), "B"),
        Call("tensor", "all_gather", t, dtype, stream, on * m * (two + last), "F"),
        Call("tensor", "reduce_scatter", t, dtype, stream, on * m * (two + first), "F"),
        Call(
            "tensor",
            "all_gather",
            t,
            dtype,
            stream,
            on * m * (two + first + two + last + gathered - kept),
            "B",
        ),
        Call("tensor", "reduce_scatter", t, dtype, stream, on * m * (two + last + again), "B"),
        *shared_heads(w),
    ]


def shared_heads(w: Workload) -> list[Call]:
    """Gradients of key and value projections that several tensor ranks hold alike, where heads are
    fewer than ranks.
    """
    shape = w.shape
    if shape.mla is not None:
        return []
    columns = w.tiling.columns
    times = 2 * w.microbatches * w.layers * (columns > int(shape.kv_heads or 0))
    sizes = [
        shape.kv_width * w.height,
        *([shape.kv_width] if shape.biases in ("qkv", "all") else []),
    ]
    return [
        Call("tensor", "all_reduce", columns, w.dtype, n * w.element, times, "B") for n in sizes
    ]


def _loss(w: Workload) -> list[Call]:
    count = w.microbatches * w.last
    return [
        Call("tensor", "all_reduce", w.tiling.columns, "fp32", n * 4 * w.tokens, count, "F")
        for n in (1, 2)
    ]


def _context(w: Workload) -> list[Call]:
    """Ring: keys and values go round, in backward with their gradients, in fp32 or better
    (2310.01889). Ulysses: heads for tokens, queries, keys and values at once, and the result back
    (2309.14509).
    """
    c, dtype, times = w.knobs.context, w.dtype, w.microbatches * w.layers
    keys = (w.k_width + w.v_width) * w.tokens * w.element
    again = w.microbatches * (w.recomputed + w.knobs.selective * w.layers)
    if w.setting.context_algorithm == "ring":
        wide = "fp32" if w.element < w.wide else dtype
        around = [
            ("F", dtype, keys, times),
            ("B", dtype, keys, times + again),
            ("B", wide, keys * (w.wide / w.element), times),
        ]
        return [
            Call("context", kind, c, name, size, often * (c - 1), action)
            for action, name, size, often in around
            for kind in ("send", "recv")
        ]
    keys = keys * w.repeated_heads
    sizes = (keys + w.q_width * w.tokens * w.element, w.o_width * w.tokens * w.element)
    often = {"F": times, "B": times + w.microbatches * w.recomputed}
    return [
        Call("context", "all_to_all", c, dtype, size, often[action], action)
        for action in often
        for size in sizes
    ]


def _experts(w: Workload) -> list[Call]:
    """Tokens go to their experts and come back, each way; how many go where is told before, unless
    that is fixed.
    """
    moe, dtype = w.shape.moe, w.dtype
    if moe is None:
        return []
    e, sparse = w.knobs.expert, w.layers - w.dense_layers
    times, again = (
        w.microbatches * sparse,
        w.microbatches * w.recomputed * sparse / np.maximum(w.layers, 1),
    )
    size, told = w.stream * w.visits, float(moe.capacity is None)
    counts = {"F": times, "B": times + again}
    return [
        *(
            Call("expert", "all_to_all", e, dtype, size, 2 * counts[action], action)
            for action in counts
        ),
        Call("expert", "all_to_all", e, "int64", 8.0 * moe.experts, told * times, "F"),
        Call("expert", "all_to_all", e, "int64", 8.0 * moe.experts, told * again, "B"),
        *_balance(w, times, again),
    ]


def _balance(w: Workload, times: Number, again: Number) -> list[Call]:
    """Ranks that share sequences count together how often each expert is chosen."""
    moe = w.shape.moe
    if moe is None or moe.auxiliary_loss == 0:
        return []
    size, c = w.knobs.micro_batch * moe.experts * float(w.wide), w.knobs.context
    return [
        Call("context", "all_reduce", c, "fp32", size, often, action)
        for often, action in ((times, "F"), (again, "B"))
    ]


def _pipeline(w: Workload) -> list[Call]:
    """What crosses stage boundaries, and a tied weight's gradient between the ends."""
    p, dtype = w.pipeline, w.dtype
    if p == 1:
        return []
    boundary = w.stream / w.sequence_parallel
    out = w.microbatches * (w.nothing + w.neighbours)
    ends = w.nothing + float(w.shape.tied) * abs(w.first - w.last)
    table = np.ceil(w.vocab * w.height / (w.knobs.shard if w.zero else 1)) * w.gradient_element
    return [
        Call("pipeline", kind, p, kind_dtype, size, count, "P2P")
        for size, count, kind_dtype in ((boundary, out, dtype), (table, ends, gradient_dtype(w)))
        for kind in ("send", "recv")
    ]


def gradient_dtype(w: Workload) -> str:
    """Of one plan; of many it is not asked for."""
    alike = np.ndim(w.gradient_element) or float(w.gradient_element) == w.element
    return w.dtype if alike else "fp32"


def _data(w: Workload) -> list[Call]:
    """Gradients once a step in buckets; ZeRO scatters them and gathers parameters (1910.02054)."""
    group, shard, dtype, gradient = (
        w.data * w.knobs.context,
        w.knobs.shard,
        w.dtype,
        gradient_dtype(w),
    )
    action = "B" if w.pipeline == 1 else "REDUCE_GRAD"
    elements, gathered = w.held.trained, w.held.total
    size = elements * w.gradient_element
    pieces = np.maximum(1.0, np.ceil(size / w.knobs.bucket_bytes))
    if w.zero == 0:
        return [Call("data", "all_reduce", group, gradient, size / pieces, pieces, action)]
    units = w.layers + w.first + w.last
    each = w.reduce_microbatch * float(w.zero >= 2)
    times = 1 + each * (w.microbatches - 1)
    if w.zero == 3:
        pieces = units
    scatter = [
        Call("data", "reduce_scatter", shard, gradient, size / pieces, times * pieces, action),
        Call("data", "all_reduce", group / shard, gradient, size / shard, times, action),
    ]
    if w.zero == 1 and w.setting.software.late_reduce:
        scatter = [Call("data", "all_reduce", group, gradient, size, 1.0, "REDUCE_GRAD")]
    if w.zero < 3:
        return [
            *scatter,
            Call("data", "all_gather", shard, dtype, elements * w.element, 1.0, "OPTIMIZER"),
        ]
    kept = np.maximum(w.knobs.keep_gathered, w.pipeline > 1)
    unit = gathered * w.element / units
    forward = units * (kept + (1 - kept) * w.microbatches)
    return [
        *scatter,
        Call("data", "all_gather", shard, dtype, unit, forward, "F"),
        Call("data", "all_gather", shard, dtype, unit, units * (1 - kept) * w.microbatches, "B"),
    ]
