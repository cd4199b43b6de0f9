"""One microbatch through the stages of a rank: what it keeps, its largest live sets, its calls and
work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import numpy as np

from workbench.costmodel.communication.gradient_buffers import buffers_on_tape
from workbench.costmodel.inputs.operator_stages import StageParts
from workbench.costmodel.inputs.operator_strategies import LayerKind, OperatorStrategies
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.allocation_tape import LiveSet
from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor, leaf, run_backward
from workbench.costmodel.operators.symbolic_rank import (
    AxisCall,
    DeferredWeights,
    GridCall,
    SymbolicRank,
    Work,
)
from workbench.costmodel.operators.symbolic_sharding import as_shard
from workbench.costmodel.operators.symbolic_split_backward import run_weight_gradients
from workbench.costmodel.operators.symbolic_stage import Layers, SymbolicStage
from workbench.plan.model.model_shape import Shape

RUN_OF_A_KIND = 3
"""Layers alike in a row of which each runs at least: the first, one that stands for all between,
and the last.
"""
FORWARD_PHASES = {"head": "head_forward", "loss": "head_forward"}
"""Part of a stage -> the phase of its forward, where that is not the layers'."""
BACKWARD_PHASES = {
    "loss": "loss",
    "head": "final_norm",
    "embedding": "embedding",
    "input": "embedding",
}
"""The same of its backward."""


@dataclass(frozen=True, eq=False)
class StagePass:
    """A microbatch through one stage on one rank: what each action needs at most, by phase of
    `memory/live_sets`, and what it leaves, beside what the schedule keeps between actions
    (inputs, outputs and gradients that are passed on).
    """

    kept: LiveSet
    """What a forward leaves for backward, the stage's input included."""
    forward: dict[str, LiveSet]
    backward: dict[str, LiveSet]
    calls: Counter[GridCall]
    axis_calls: Counter[AxisCall]
    work: Counter[tuple[str, Work]]
    deferred: LiveSet = field(default_factory=dict)
    """What a backward that is split leaves for weight gradients."""
    weights: dict[str, LiveSet] = field(default_factory=dict)


def stage_pass(
    w: Workload, named: OperatorStrategies, parts: StageParts, is_split: bool = False
) -> StagePass:
    """Run a microbatch through a stage.

    Its tokens and targets are counted elsewhere, and so are parameters and their gradients.

    Args:
        w: Per-rank problem sizes.
        named: The plan's operator strategies.
        parts: Which layers the stage has.
        is_split: Whether its weight gradients (W) are computed apart from backward (I).
    """
    r = SymbolicRank(w, named.sides, named.least)
    x, y, gradients = _forward(r, named, parts)
    r.tape.end_action("activations")
    forward = phases_of(r.tape.largest, FORWARD_PHASES, "forward")
    if not parts.has_head:
        # Backward starts from the graph's edge: the output is the schedule's.
        y = replace(y, storage=r.tape.allocate(0))
        r.tape.end_action("activations")
    kept = r.tape.live
    r.tape.largest, r.action = {}, "B"
    deferred = r.deferred = DeferredWeights() if is_split else None
    gradient = replace(y, storage=r.tape.allocate(0 if parts.has_head else y.bytes), node=None)
    roots = [(y, gradient)]
    del y
    run_backward(r.tape, roots)  # which the stage's input and its output's gradient outlive
    del x
    if deferred is not None:
        deferred.outlive_action()
    r.tape.end_action("communication")
    backward = phases_of(r.tape.largest, BACKWARD_PHASES, "feed_forward")
    if deferred is None:
        return StagePass(kept, forward, backward, r.calls, r.axis_calls, r.work)
    del gradient
    gradients.clear()
    r.tape.end_action("temporary")
    left, r.tape.largest = r.tape.live, {}
    run_weight_gradients(r, deferred)
    r.tape.end_action("temporary")
    weights = phases_of(r.tape.largest, {}, "weights")
    return StagePass(kept, forward, backward, r.calls, r.axis_calls, r.work, left, weights)


def _forward(
    r: SymbolicRank, named: OperatorStrategies, parts: StageParts
) -> tuple[SymbolicTensor, SymbolicTensor, list[SymbolicTensor]]:
    """(the stage's input, its output, where its input's gradient comes)."""
    # Behind a layer's backward, buffers of as many layers are under way.
    behind = r.w.fixed.num_zero_in_flight + 1 if buffers_on_tape(r.w) else 0
    runs = tuple(_runs(named, r.w.shape, parts.layers, behind))
    stage = SymbolicStage(r, named, Layers(runs, parts.has_embedding, parts.has_head))
    batch, length = int(r.w.sequences), int(r.w.tokens / r.w.sequences)
    gradients: list[SymbolicTensor] = []
    r.enter("input")
    targets = x = r.empty((batch, length), 0)
    if not parts.has_embedding:
        own = length // named.ranks_over(named.boundary)
        x = r.empty((batch, own, r.w.shape.hidden))
        x = replace(x, node=leaf(gradients.append, "input"))
        x = as_shard(r, x, named.boundary_layout) if named.boundary else x
    return x, stage.forward(x, targets), gradients


def shared_stage_pass(
    w: Workload, named: OperatorStrategies, parts: StageParts, is_split: bool = False
) -> StagePass:
    """The same, run once for stages alike."""
    key = _stage_key(w, named, parts, is_split)
    if key not in named.passes:
        named.passes[key] = stage_pass(w, named, parts, is_split)
    found: StagePass = named.passes[key]
    return found


def _stage_key(
    w: Workload, named: OperatorStrategies, parts: StageParts, is_split: bool
) -> Hashable:
    """What a stage's pass depends on, of one model on one mesh."""
    ends = parts.has_embedding, parts.has_head
    layers = tuple((kind, len(alike)) for kind, alike in _alike(named, w.shape, parts.layers))
    kinds = named.kinds.get("", frozenset()) if any(ends) else None
    sizes = float(w.sequences), float(np.max(w.tokens)), float(w.gradient_element_bytes)
    return named.sides, named.boundary, ends, kinds, layers, sizes, is_split, _buffers_key(w)


def _buffers_key(w: Workload) -> Hashable:
    """Values that its buffers of gradients depend on."""
    if not buffers_on_tape(w):
        return None
    k, flight = w.searched, w.fixed.num_zero_in_flight
    sizes = (k.shard, k.bucket_bytes, k.offload_optimizer, w.microbatches)
    return w.zero, flight, tuple(float(np.max(size)) for size in sizes)


def _alike(
    named: OperatorStrategies, shape: Shape, numbers: Sequence[int]
) -> Iterator[tuple[LayerKind, list[int]]]:
    """(kind, layers) of each run of layers of a kind."""
    kind_of = partial(named.kind_of, shape)
    yield from ((kind, list(group)) for kind, group in groupby(numbers, kind_of))


def _runs(
    named: OperatorStrategies, shape: Shape, numbers: Sequence[int], behind: int
) -> Iterator[tuple[int, int]]:
    """Layers that run, and how many each stands for; `behind` more of them at the end."""
    for _, alike in _alike(named, shape, numbers):
        if len(alike) <= RUN_OF_A_KIND + behind:
            yield from ((layer, 1) for layer in alike)
        else:
            last = alike[-1 - behind :]
            yield from ((alike[0], 1), (alike[1], len(alike) - 1 - len(last)))
            yield from ((layer, 1) for layer in last)


def _largest(sets: Iterable[LiveSet]) -> LiveSet:
    return max(sets, key=lambda live: sum(live.values()))


def phases_of(
    parts: dict[str, LiveSet], named: Mapping[str, str], layers: str
) -> dict[str, LiveSet]:
    """The largest live set of each phase that has any of these parts; `layers` is the layers'."""
    found: dict[str, list[LiveSet]] = {}
    for part, live in parts.items():
        found.setdefault(named.get(part, layers), []).append(live)
    return {phase: _largest(sets) for phase, sets in found.items()}
