"""What candidates ask of one rank: the few quantities that memory and time are functions of.

Floats or arrays as `setting` says; what differs between pipeline ranks has them along the first
axis. Widths are those of the widest tensor-parallel rank, as which all the others pad theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from workbench.costmodel.frameworks.framework_profile import OWN
from workbench.costmodel.inputs.config import (
    Array,
    Knobs,
    Number,
    Setting,
    home,
    knobs_of,
    setting_of,
    stage_homes,
)
from workbench.costmodel.inputs.tensor_tiling import Tiling, tiling
from workbench.plan.head_split import kv_heads, rooms
from workbench.plan.model_shape import Shape, rows_of_an_expert
from workbench.plan.optimizer_state import DTYPE_BYTES
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import STORED
from workbench.schedules import closed_forms, most_losses, waiting
from workbench.schedules import in_flight as most_held

if TYPE_CHECKING:
    from workbench.costmodel.memory.model_states import Held


@dataclass(frozen=True)
class Workload:
    """Quantities of candidates, a rank at a time."""

    setting: Setting
    knobs: Knobs
    data: Number
    """Ranks over which a stage is replicated, context apart."""
    microbatches: Number
    tokens: Number
    """Tokens of one microbatch on one rank."""
    tiling: Tiling
    """How tensor ranks cut activations and weights."""
    hidden: Number
    """Width of a rank's part of a hidden-wide activation."""
    height: Number
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
    vocab: Number
    """Vocabulary rows of a rank, padding included."""
    sequence_parallel: Number
    """Ranks over which norms and residuals are split: the tensor ranks, or 1."""
    element: int
    """Bytes of a parameter and of an activation."""
    gradient_element: Number
    """Bytes of a gradient as it adds up and is reduced."""
    reduce_microbatch: Number
    """1 where gradients are reduced after every microbatch."""
    # by pipeline rank
    weight: Array
    """Pipeline ranks that this one stands for."""
    layers: Array
    dense_layers: Array
    """Layers with a dense feed-forward; the rest are mixtures."""
    first: Array
    """1 where the embedding is."""
    last: Array
    """1 where the head is."""
    neighbours: Array
    """Other ranks' stages that the rank's own hand over to, forward or backward: transfers of a
    microbatch each way.
    """
    in_flight: Array
    """Microbatches whose activations are held at once (of chunks: sums, so fractions)."""
    put_aside: Array
    """How many of those wait for their weight gradients alone."""
    head_in_flight: Number
    """Microbatches of the last stage whose loss has not run backward yet."""

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return self.setting.shape

    @property
    def pipeline(self) -> int:
        """Pipeline ranks."""
        return self.setting.pipeline

    @property
    def zero(self) -> int:
        """ZeRO stage."""
        return self.setting.zero

    @property
    def tensor(self) -> Number:
        """Tensor-parallel ranks."""
        return self.knobs.tensor

    @property
    def recomputed(self) -> Array:
        """Layers recomputed in full, by pipeline rank."""
        return self.knobs.recomputed

    @property
    def kept_after(self) -> Array:
        """Layers behind the last of them on its rank, which keep all."""
        return self.knobs.kept_after

    @cached_property
    def held(self) -> Held:
        """Parameters of each pipeline rank before data parallelism shards anything."""
        from workbench.costmodel.memory.model_states import held

        return held(self)

    @property
    def dtype(self) -> str:
        """Of parameters and activations."""
        return STORED.get(self.setting.precision, self.setting.precision)

    @property
    def stored_gradient(self) -> Number:
        """Bytes of a gradient as it is kept."""
        return (
            self.gradient_element
            if self.setting.gradient_bytes < 0
            else self.setting.gradient_bytes
        )

    @property
    def stream(self) -> Number:
        """Bytes of one hidden-wide tensor of a microbatch, in the model's dtype."""
        return self.tokens * (self.hidden * self.element)

    @property
    def repeated_heads(self) -> Number:
        """How often Ulysses repeats a key-value head so that the context ranks share them
        evenly.
        """
        if self.shape.mla is not None:
            return 1.0
        heads = np.maximum(
            1, np.asarray(self.k_width / int(self.shape.head_dim or 1), dtype=np.int64)
        )
        return self.knobs.context / np.gcd(heads, np.asarray(self.knobs.context, dtype=np.int64))

    @property
    def wide(self) -> int:
        """Bytes of an element where the model's 16-bit tensors are widened."""
        return max(4, self.element)

    @property
    def fused(self) -> bool:
        """Whether our own fused or compiled operators run; other stacks' are in their constants."""
        return self.setting.stack == OWN and self.setting.kernels != "eager"

    @property
    def visits(self) -> Number:
        """Rows of experts that a token makes: its choices, or an even share of what experts have
        room for.
        """
        moe = self.shape.moe
        if moe is None or moe.capacity is None:
            return moe.top_k if moe else 0
        length = self.setting.sequence_length
        return moe.experts * rows_of_an_expert(length, moe) / length

    @property
    def nothing(self) -> Array:
        """Zero on every pipeline rank."""
        return np.zeros_like(self.first)


def workload(plan: ResolvedPlan) -> Workload:
    """The quantities of a complete plan. Raises PlanError naming a field that the planner does not
    model.
    """
    _refuse(plan)
    return assemble(
        setting_of(plan), knobs_of(plan), np.arange(plan.strategy.pipeline.size, dtype=float)
    )


def assemble(s: Setting, k: Knobs, ranks: Array, weight: Array | None = None) -> Workload:
    """The quantities of candidates `k` on pipeline ranks `ranks` (first axis), which stand for
    `weight` ranks each.
    """
    shape, blocks = s.shape, tiling(s.algorithm, k)
    data = s.world / (k.tensor * k.context * s.pipeline)
    layers, dense = stage_layers(s)
    at, parts = ranks.astype(int), data
    if s.replicas:  # all stages take the same microbatch, each splits it over its own replicas
        data, parts = np.array(s.replicas, dtype=float)[at], float(math.lcm(*s.replicas))
    microbatches = s.global_batch / (k.micro_batch * parts)
    return Workload(
        setting=s,
        knobs=k,
        data=data,
        microbatches=microbatches,
        tokens=k.micro_batch
        * s.sequence_length
        / (k.context * blocks.tokens)
        * (parts / data if s.replicas else 1.0),
        tiling=blocks,
        hidden=shape.hidden / blocks.hidden,
        height=shape.hidden / blocks.height,
        **widths(shape, blocks.columns),
        vocab=_rows(shape, blocks),
        sequence_parallel=1 + k.sequence * (k.tensor - 1),
        element=DTYPE_BYTES[s.precision],
        gradient_element=_gradient_element(s, k.gradient_element, microbatches),
        reduce_microbatch=np.maximum(k.reduce_microbatch, microbatches == 1),
        weight=np.ones_like(ranks, dtype=float) if weight is None else weight,
        layers=layers[at],
        dense_layers=dense[at],
        first=(at == 0).astype(float),
        last=(at == _last_rank(s)).astype(float),
        neighbours=neighbours(s)[at],
        in_flight=in_flight(s, microbatches, ranks),
        put_aside=put_aside(s, microbatches, ranks),
        head_in_flight=losses_in_flight(s, microbatches),
    )


def widths(shape: Shape, columns: Number, padded: bool = True) -> dict[str, Number]:
    """Widths of the widest of `columns` tensor ranks; without `padded` an even share of them.

    Key-value heads are replicated where there are more ranks than heads.
    """
    even = shape.heads / columns, np.maximum(kv_heads(shape) / columns, 1.0)
    heads, kv = rooms(shape, columns) if padded else even
    mla, head = shape.mla, float(shape.head_dim or 0)
    moe = shape.moe
    expert, shared = (moe.ffn, moe.shared * moe.ffn) if moe else (0, 0)
    ffn, expert_ffn, shared_ffn = (
        -(-width // columns) if padded else width / columns for width in (shape.ffn, expert, shared)
    )
    q, k, v = (shape.q_width / shape.heads,) * 2 + (mla.value_dim,) if mla else (head, head, head)
    return {
        "q_width": heads * q,
        "k_width": kv * k,
        "v_width": kv * v,
        "o_width": heads * v,
        "heads": heads,
        "ffn": ffn,
        "expert_ffn": expert_ffn,
        "shared_ffn": shared_ffn,
    }


def stage_layers(s: Setting) -> tuple[Array, Array]:
    """(layers, those with a dense feed-forward) of each pipeline rank."""
    where = home(s)
    moe = s.shape.moe
    dense = np.arange(len(where)) < moe.first_dense if moe else np.ones(len(where), dtype=bool)
    every, some = (
        np.bincount(x, minlength=s.pipeline).astype(float) for x in (where, where[dense])
    )
    return every, some


def _last_rank(s: Setting) -> int:
    """Where the head is: on the first rank where stages go there and back."""
    return int(home(s)[-1])


def in_flight(s: Setting, microbatches: Number, rank: Number) -> Array:
    """Microbatches held at once by each pipeline rank; a chunk counts 1/chunks."""
    if s.pipeline == 1:
        return np.asarray(1.0 + 0 * rank)
    if s.table is not None:
        return np.asarray(most_held(s.table), dtype=float)[rank.astype(int)] / s.chunks
    held = closed_forms.in_flight(s.schedule, rank, s.pipeline, microbatches, s.chunks)
    return np.asarray(held / s.chunks, dtype=float)


def neighbours(s: Setting) -> Array:
    """Stages on other ranks that each pipeline rank's stages hand over to; V shapes turn round
    without a transfer.
    """
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    apart = homes[1:] != homes[:-1]
    both = np.concatenate((homes[1:][apart], homes[:-1][apart]))
    return np.bincount(both, minlength=s.pipeline).astype(float)


def put_aside(s: Setting, microbatches: Number, rank: Number) -> Array:
    """Microbatches that wait for their weight gradients when a rank holds most: ZB-H1 and ZB-H2
    delay them by rank.

    V shapes multiply them at once while they are full, and delay them while they drain.
    """
    if s.table is not None:
        return np.asarray(waiting(s.table), dtype=float)[rank.astype(int)] / s.chunks
    late = {"zb-h1": 1.0, "zb-h2": 2.0}.get(s.schedule, 0.0) if s.pipeline > 1 else 0.0
    before = late * (s.pipeline - 1 - rank)
    return np.asarray(
        np.minimum(late * rank, np.maximum(0.0, microbatches - before - 1)) * np.ones_like(rank)
    )


def losses_in_flight(s: Setting, microbatches: Number) -> Number:
    """Microbatches of the last stage between loss and backward: it turns round at once, but for
    GPipe.
    """
    if s.table is not None:
        return float(most_losses(s.table))
    return microbatches if s.schedule == "gpipe" and s.pipeline > 1 else 1.0


def _rows(shape: Shape, blocks: Tiling) -> Number:
    """Rows of the vocabulary on a tensor rank, padding included: a multiple of the blocks that are
    gathered at once.
    """
    return np.ceil(shape.vocab / (blocks.columns * blocks.gathered)) * blocks.gathered


def _gradient_element(s: Setting, written: Number, microbatches: Number) -> Number:
    """As written; else fp32 where gradients of several microbatches add up, and the parameters'
    dtype under ZeRO.
    """
    parameters = DTYPE_BYTES[s.precision]
    if np.ndim(written) == 0 and written:
        return written
    adds_up = np.maximum(microbatches > 1, s.pipeline > 1) * (s.zero == 0)
    return np.where(written == 0, parameters + (4 - parameters) * adds_up, written)


def _refuse(plan: ResolvedPlan) -> None:
    require(plan, "estimate")
