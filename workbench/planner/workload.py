"""What one plan asks of one rank: the few quantities that memory and time are functions of.

Numbers are scalars, or arrays with one entry a pipeline rank. Widths are those of one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.plan.errors import refuse
from workbench.plan.schema import Plan
from workbench.plan.shape import Shape
from workbench.plan.support import require

Array = NDArray[np.float64]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True)
class Workload:
    """Quantities of a plan, a rank at a time."""

    shape: Shape
    device: str
    kernels: str
    # degrees
    tensor: int
    context: int
    data: int
    pipeline: int
    chunks: int
    expert: int
    shard: int
    """Ranks over which ZeRO shards; divides data x context."""
    microbatches: int
    schedule: str
    # a microbatch on a rank
    sequences: int
    sequence_length: int
    """Of the whole sequence, before context splits it."""
    tokens: float
    """Tokens of one microbatch on one rank."""
    # widths of a tensor-parallel rank
    q_width: float
    k_width: float
    v_width: float
    o_width: float
    heads: float
    ffn: float
    vocab: int
    """Vocabulary rows of a rank, padding included."""
    sequence_parallel: int
    """Ranks over which norms and residuals are split: the tensor ranks, or 1."""
    # bytes an element
    element: int
    gradient_element: int
    moment_bytes: int
    """Optimizer moments, bytes a parameter."""
    master_bytes: int
    # strategy
    zero: int
    reduce_microbatch: bool
    keep_gathered: bool
    offload: str
    bucket_bytes: float
    recompute: str
    # by pipeline rank
    layers: Array
    recomputed: Array
    """Layers recomputed in full."""
    dense_layers: Array
    """Layers with a dense feed-forward; the rest are mixtures."""
    first: Array
    """1 where the embedding is."""
    last: Array
    """1 where the head is."""
    in_flight: Array
    """Microbatches whose activations are held at once (interleaved: sums of chunks, so fractions)."""

    @property
    def stream(self) -> float:
        """Bytes of one hidden-wide tensor of a microbatch, in the model's dtype."""
        return self.tokens * self.shape.hidden * self.element

    @property
    def wide(self) -> int:
        """Bytes of an element where the model's 16-bit tensors are widened."""
        return max(4, self.element)


def workload(plan: Plan) -> Workload:
    """The quantities of a complete plan. Raises PlanError naming a field that the planner does not model."""
    _refuse(plan)
    s, t, shape, sizes = plan.strategy, plan.training, plan.shape, plan.sizes
    ranks, tensor = sizes["pipeline"], sizes["tensor"]
    optimizer = t.optimizer
    moments = 8 if optimizer.name == "adamw" else 4 if optimizer.beta1 else 0
    element = BYTES[s.precision]
    replicas = sizes["data"] * sizes["context"]
    layers, dense, recomputed = _layers(plan)
    end = np.arange(ranks)
    mla = shape.mla
    return Workload(
        shape=shape, device=plan.card.device, kernels=s.kernels,
        tensor=tensor, context=sizes["context"], data=sizes["data"], pipeline=ranks, chunks=s.pipeline.chunks,
        expert=s.expert.size, shard=replicas if s.data.shard == "all" else int(s.data.shard),
        microbatches=plan.num_microbatches, schedule=s.pipeline.schedule,
        sequences=t.micro_batch, sequence_length=t.sequence_length,
        tokens=t.micro_batch * t.sequence_length / sizes["context"],
        q_width=shape.q_width / tensor,
        k_width=shape.q_width / tensor if mla else _kv_width(shape, tensor),
        v_width=shape.heads * mla.value_dim / tensor if mla else _kv_width(shape, tensor),
        o_width=(shape.heads * mla.value_dim if mla else shape.q_width) / tensor,
        heads=shape.heads / tensor, ffn=shape.ffn / tensor, vocab=-(-shape.vocab // tensor),
        sequence_parallel=tensor if s.tensor.sequence else 1,
        element=element, gradient_element=BYTES[s.gradient_dtype], moment_bytes=moments,
        master_bytes=4 if element < 4 else 0,
        zero=s.data.zero, reduce_microbatch=s.data.reduce == "microbatch" or plan.num_microbatches == 1,
        keep_gathered=s.data.keep_gathered, offload=s.data.offload, bucket_bytes=s.data.bucket_mib * 2**20,
        recompute=s.recompute if isinstance(s.recompute, str) else "list",
        layers=layers, recomputed=recomputed, dense_layers=dense,
        first=(end == 0).astype(float), last=(end == ranks - 1).astype(float),
        in_flight=in_flight(s.pipeline.schedule, ranks, s.pipeline.chunks, plan.num_microbatches),
    )  # fmt: skip


def in_flight(schedule: str, ranks: int, chunks: int, microbatches: int) -> Array:
    """Microbatches held at once by each pipeline rank (Huang 2019; 2104.04473); a chunk counts 1/chunks."""
    rank = np.arange(ranks)
    if schedule == "gpipe":
        return np.full(ranks, float(microbatches))
    if schedule == "1f1b":
        return np.minimum(microbatches, ranks - rank).astype(float)
    held = np.asarray((2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks)
    return np.minimum(microbatches, held)


def _kv_width(shape: Shape, tensor: int) -> float:
    """Key width of a tensor rank; heads are replicated where there are more ranks than heads."""
    return max(shape.kv_width / tensor, float(shape.head_dim or 0))


def _layers(plan: Plan) -> tuple[Array, Array, Array]:
    """(layers, those with a dense feed-forward, those recomputed in full) by pipeline rank."""
    partition = plan.strategy.pipeline.partition
    assert isinstance(partition, list), "complete() the plan first"
    ranks, recompute = plan.sizes["pipeline"], plan.strategy.recompute
    home = np.repeat(np.arange(len(partition)) % ranks, partition)
    index = np.arange(len(home))
    moe = plan.shape.moe
    dense = index < moe.first_dense if moe else np.ones(len(home), dtype=bool)
    full = np.isin(index, recompute) if isinstance(recompute, list) else np.full(len(home), recompute == "full")
    count = [np.bincount(home[mask], minlength=ranks).astype(float) for mask in (index >= 0, dense, full)]
    return count[0], count[1], count[2]


def _refuse(plan: Plan) -> None:
    require(plan, "estimate")
    s = plan.strategy
    if s.tensor.algorithm != "1d":
        raise refuse("strategy.tensor.algorithm", f"is {s.tensor.algorithm}; this version can estimate 1d")
    if s.pipeline.schedule not in SCHEDULES:
        raise refuse("strategy.pipeline.schedule", f"is {s.pipeline.schedule!r}; this version can estimate "
                     f"{', '.join(SCHEDULES)}")  # fmt: skip
    if s.precision == "fp8":
        raise refuse("strategy.precision", "is fp8; this version can estimate fp32, bf16, fp16")
