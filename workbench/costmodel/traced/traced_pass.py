"""One microbatch through a stage of a traced module: what it keeps, its largest live sets, its
calls and work.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.costmodel.communication.gradient_buffers import GradientBuffers
from workbench.costmodel.communication.packed_buckets import rank_buckets
from workbench.costmodel.inputs.config import stage_homes
from workbench.costmodel.inputs.operator_stages import stages_of
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.inputs.traced_stages import TracedStages
from workbench.costmodel.operators.stage_pass import StagePass, phases_of
from workbench.costmodel.operators.symbolic_autograd import Node, SymbolicTensor, leaf, run_backward
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.traced_run import TracedRun

FORWARD, BACKWARD = "forward", "feed_forward"
"""Phases of `memory/live_sets`."""


def traced_pass(w: Workload, traced: TracedStages, stage: int) -> StagePass:
    """Run a microbatch through a stage.

    Its tokens and targets are counted elsewhere, and so are parameters and their gradients.
    """
    r = SymbolicRank(w, traced.sides, traced.least)
    batch, length = int(w.sequences), int(w.tokens / w.sequences)
    received: list[SymbolicTensor] = []
    r.enter("stage")
    parameters = _parameters(r, traced, stage)
    targets = x = r.empty((batch, length), 0)
    if stage:
        x = r.empty(traced.boundary)
        x = replace(x, node=leaf(received.append, "stage"))
    y = TracedRun(r, traced, traced.stages[stage], parameters).forward(x, targets)
    r.tape.end_action("activations")
    forward, is_last = phases_of(r.tape.largest, {}, FORWARD), stage == len(traced.stages) - 1
    if not is_last:
        # Backward starts from the graph's edge: the output is the schedule's.
        y = replace(y, storage=r.tape.allocate(0))
        r.tape.end_action("activations")
    kept = r.tape.live
    r.tape.largest, r.action = {}, "B"
    gradient = replace(y, storage=r.tape.allocate(0 if is_last else y.bytes), node=None)
    roots = [(y, gradient)]
    del y
    run_backward(r.tape, roots)  # which the stage's input and its output's gradient outlive
    del x
    r.tape.end_action("communication")
    backward = phases_of(r.tape.largest, {}, BACKWARD)
    return StagePass(kept, forward, backward, r.calls, r.axis_calls, r.work)


def _parameters(r: SymbolicRank, traced: TracedStages, stage: int) -> dict[str, SymbolicTensor]:
    """A rank's parameters of a stage, by name; their gradients go to buffers, where they have
    any.
    """
    own = {p.name: r.parameter(*p.shape) for p in traced.of_stage(stage)}
    w = r.w
    if w.zero < 2 or not np.all(w.reduce_microbatch):
        return own
    s = w.fixed
    rank = int(stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)[stage])
    buckets = rank_buckets(w, rank)[stages_of(s, rank).index(stage)]
    # With nobody to reduce with, a reduction is over at once.
    alone = float(w.searched.shard) == 1
    in_flight = 0 if len(traced.stages) > 1 else 1 if alone else s.num_zero_in_flight
    size = float(w.gradient_element_bytes)
    buffers = GradientBuffers(r.tape, buckets, own, size, in_flight)

    def into(name: str) -> Node:
        return leaf(lambda _: buffers.accumulate(name), r.tape.part, buffers.reduce_complete)

    return {name: replace(x, node=into(name)) for name, x in own.items()}
