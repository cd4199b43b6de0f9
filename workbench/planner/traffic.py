"""Every collective of a step: how many, how large, over which axis. The words are those that a run measures."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.plan.schema import Plan
from workbench.planner.collectives import Link, joint, seconds
from workbench.planner.constants import Constants
from workbench.planner.states import feed_forward_parameters
from workbench.planner.workload import Workload


@dataclass(frozen=True)
class Call:
    """Calls of one collective a step, on one pipeline rank; `bytes` is the full tensor's."""

    axis: str
    kind: str
    group_size: int
    dtype: str
    bytes: float
    count: float
    action: str


def calls(plan: Plan, w: Workload, rank: int) -> list[Call]:
    """All collectives of pipeline rank `rank` in a step."""
    dtype = plan.strategy.precision
    return [
        call
        for call in (
            *_tensor(w, rank, dtype),
            *_context(w, rank, dtype, plan.strategy.context.algorithm),
            *_experts(w, rank, dtype),
            *_pipeline(w, rank, dtype),
            *_data(plan, w, rank),
            Call("world", "all_reduce", plan.world_size, "fp32", 12.0, 1, "CLIP"),
        )
        if call.group_size > 1 and call.count > 0 and call.bytes > 0
    ]


def _tensor(w: Workload, rank: int, dtype: str) -> list[Call]:
    """Two sums a layer and pass; the embedding's, the head's, and the loss's two numbers a token (1909.08053)."""
    t, m, layers = w.tensor, w.microbatches, float(w.layers[rank])
    first, last, again = w.first[rank], w.last[rank], float(w.recomputed[rank])
    if w.sequence_parallel > 1:
        forward, backward = 2 * layers + first, 2 * layers + last
        return [
            Call("tensor", "all_gather", t, dtype, w.stream, m * (2 * layers + last), "F"),
            Call("tensor", "reduce_scatter", t, dtype, w.stream, m * forward, "F"),
            Call("tensor", "all_gather", t, dtype, w.stream, m * (forward + 2 * layers + 2 * again), "B"),
            Call("tensor", "reduce_scatter", t, dtype, w.stream, m * (backward + 2 * again), "B"),
            *_shared_heads(w, m * layers, dtype),
            *_loss(w, last),
        ]
    return [
        Call("tensor", "all_reduce", t, dtype, w.stream, m * (2 * layers + first), "F"),
        Call("tensor", "all_reduce", t, dtype, w.stream, m * (2 * layers + last + 2 * again), "B"),
        *_shared_heads(w, m * layers, dtype),
        *_loss(w, last),
    ]


def _shared_heads(w: Workload, times: float, dtype: str) -> list[Call]:
    """Gradients of key and value projections that several tensor ranks hold alike, where heads are fewer than ranks."""
    shape = w.shape
    if shape.mla is not None or int(shape.kv_heads or 0) >= w.tensor:
        return []
    sizes = [shape.kv_width * shape.hidden, *([shape.kv_width] if shape.biases in ("qkv", "all") else [])]
    return [Call("tensor", "all_reduce", w.tensor, dtype, n * w.element, 2 * times, "B") for n in sizes]


def _loss(w: Workload, last: float) -> list[Call]:
    return [
        Call("tensor", "all_reduce", w.tensor, "fp32", n * 4 * w.tokens, w.microbatches * last, "F") for n in (1, 2)
    ]


def _context(w: Workload, rank: int, dtype: str, algorithm: str) -> list[Call]:
    """Ring: keys and values go round, twice that backward (2310.01889). Ulysses: heads for sequence (2309.14509)."""
    c, times = w.context, w.microbatches * float(w.layers[rank])
    keys = (w.k_width + w.v_width) * w.tokens * w.element
    if algorithm == "ring":
        hops = times * (c - 1)
        return [
            Call("context", kind, c, dtype, keys * share, hops, action)
            for action, share in (("F", 1), ("B", 2))
            for kind in ("send", "recv")
        ]
    heads = keys + (w.q_width + w.o_width) * w.tokens * w.element
    return [Call("context", "all_to_all", c, dtype, heads, times, action) for action in ("F", "B")]


def _experts(w: Workload, rank: int, dtype: str) -> list[Call]:
    """Tokens go to their experts and come back, each way."""
    moe = w.shape.moe
    if moe is None:
        return []
    times = 2 * w.microbatches * float(w.layers[rank] - w.dense_layers[rank])
    return [Call("expert", "all_to_all", w.expert, dtype, w.stream * moe.top_k, times, action) for action in ("F", "B")]


def _pipeline(w: Workload, rank: int, dtype: str) -> list[Call]:
    """What crosses stage boundaries, and a tied weight's gradient between the ends."""
    p, m = w.pipeline, w.microbatches * w.chunks
    boundary = w.stream / w.sequence_parallel
    wrap = w.microbatches * (w.chunks - 1) * 2.0
    out = m * (1 - w.last[rank]) + m * (1 - w.first[rank]) + wrap * (w.first[rank] + w.last[rank]) / 2
    ends = float(w.shape.tied) * max(w.first[rank], w.last[rank])
    table = w.vocab * w.shape.hidden * w.gradient_element
    gradient = "fp32" if w.gradient_element == 4 else dtype
    return [
        Call("pipeline", kind, p, kind_dtype, size, count, "P2P")
        for size, count, kind_dtype in ((boundary, float(out), dtype), (table, float(ends), gradient))
        for kind in ("send", "recv")
    ]


def _data(plan: Plan, w: Workload, rank: int) -> list[Call]:
    """Gradients once a step in buckets; ZeRO scatters them and gathers parameters (1910.02054)."""
    group, s = w.data * w.context, plan.strategy
    gradient = s.gradient_dtype
    action = "B" if w.pipeline == 1 else "REDUCE_GRAD"
    sizes = buckets(w, rank)
    if w.zero == 0:
        count = {size: sizes.count(size) for size in dict.fromkeys(sizes)}
        return [Call("data", "all_reduce", group, gradient, size, n, action) for size, n in count.items()]
    elements = sum(sizes) / w.gradient_element
    units = float(w.layers[rank] + w.first[rank] + w.last[rank])
    times = w.microbatches if w.reduce_microbatch and w.zero >= 2 else 1
    pieces = units if w.zero == 3 else len(sizes)
    scatter = [Call("data", "reduce_scatter", w.shard, gradient, sum(sizes) / pieces, times * pieces, action)]
    if w.shard < group:
        scatter.append(Call("data", "all_reduce", group // w.shard, gradient, sum(sizes) / w.shard, times, action))
    if w.zero < 3:
        return [*scatter, Call("data", "all_gather", w.shard, s.precision, elements * w.element, 1, "OPTIMIZER")]
    kept = w.keep_gathered or w.pipeline > 1
    return [
        *scatter,
        Call("data", "all_gather", w.shard, s.precision, elements * w.element / units,
             units * (1 if kept else w.microbatches), "F"),
        Call("data", "all_gather", w.shard, s.precision, elements * w.element / units,
             units * (0 if kept else w.microbatches), "B"),
    ]  # fmt: skip


def buckets(w: Workload, rank: int) -> list[float]:
    """Bytes of each gradient bucket, in the order in which backward fills them: as `GradientBuckets` groups them."""
    sizes: list[float] = []
    size = 0.0
    for parameters in reversed(_parameters(w, rank)):
        nbytes = parameters * w.gradient_element
        if size and size + nbytes > w.bucket_bytes:
            sizes.append(size)
            size = 0.0
        size += nbytes
    return [*sizes, size]


def _parameters(w: Workload, rank: int) -> list[float]:
    """Elements of every parameter of a pipeline rank, in the model's order; a mixture counts as one."""
    shape, h = w.shape, w.shape.hidden
    table = float(w.vocab * h)
    norm = [float(h)] * (2 if shape.norm == "layernorm" else 1)
    head = [] if shape.tied and w.first[rank] else [table]
    start = [table, *([float(shape.max_positions * h)] if shape.positions == "learned" else [])]
    start += norm if shape.embedding_norm else []
    block = [*norm, *_attention(w), *norm, *_mlp(w)]
    layers = int(w.layers[rank])
    return (start if w.first[rank] else []) + block * layers + ([*norm, *head] if w.last[rank] else [])


def _attention(w: Workload) -> list[float]:
    h, biases = w.shape.hidden, w.shape.biases
    result = []
    for width in (w.q_width, w.k_width, w.v_width):
        result += [h * width, *([width] if biases in ("qkv", "all") else [])]
    return [*result, h * w.o_width, *([float(h)] if biases == "all" else [])]


def _mlp(w: Workload) -> list[float]:
    moe, bias = w.shape.moe, w.shape.biases == "all"
    if moe is not None:
        return [feed_forward_parameters(w, moe.ffn / w.tensor) * (moe.experts / w.expert + moe.shared)]
    up = [w.shape.hidden * w.ffn, *([w.ffn] if bias else [])] * (2 if w.shape.gated else 1)
    return [*up, w.shape.hidden * w.ffn, *([float(w.shape.hidden)] if bias else [])]


def axis_seconds(
    calls: list[Call], links: dict[str, Link], constants: Constants, axis: str, action: str | None = None
) -> float:
    """Seconds that a pipeline rank spends in the collectives of one axis (and action) in a step."""
    link = joint(links, ("data", "context")) if axis in ("data", "expert") else links[axis]
    return sum(
        call.count * seconds(call.kind, call.bytes, Link(call.group_size, link.bandwidth, link.latency), constants)
        for call in calls
        if call.axis == axis and action in (None, call.action) and call.kind != "recv"
    )
