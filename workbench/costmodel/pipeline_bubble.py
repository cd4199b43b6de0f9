"""Seconds of all microbatches of a step: pipeline bubble in closed form, or simulated."""

from __future__ import annotations

from functools import lru_cache
from math import lcm

import numpy as np

from workbench.costmodel.inputs.config import Array, Number, named_table, stage_homes
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.microbatch_durations import MicrobatchDurations
from workbench.schedules import Table, Timeline, closed_forms, executable, receives_early, simulate

MAX_ACTIONS = 1536
"""Most actions that are simulated; what a longer step adds only repeats."""


def longest_passes(w: Workload, passes: Array) -> Number:
    """Seconds of a step of the rank that is busiest with its microbatches, each of `passes`
    seconds.
    """
    if w.fixed.in_turn:  # ranks have other numbers of them
        return np.asarray((w.microbatches * passes).max(axis=0))
    seconds: Number = w.microbatches * passes.max(axis=0)
    return seconds


def pipeline_bubble(w: Workload, d: MicrobatchDurations, busy: Number) -> Number:
    """Pipeline bubble of the slowest rank while the pipeline fills and drains, in closed form;
    `busy` are its other seconds.

    (p - 1)(F + B) under 1F1B, divided by the chunks of an interleaved schedule (2104.04473). Exact
    for equal stages (`schedules.closed_forms`). Unequal stages take the path through the slowest
    one, and mean stages where backward is split. Where a plan has its own table, or bounds what is
    in flight, the bubble is the simulator's.
    """
    if w.pipeline == 1:
        return 0.0
    s, m = w.fixed, w.microbatches
    if s.table is not None:
        return simulated_schedule(w, d, s.table).makespan - busy
    if s.in_flight or s.in_turn:
        return simulated_makespan(w, d) - busy
    if s.schedule == "gpipe":
        passes = [
            (w.rank_multiplicity * x).sum(axis=0) + (m - 1) * x.max(axis=0)
            for x in (d.forward, d.backward)
        ]
        bubble: Number = passes[0] + passes[1] - busy
        return bubble
    if not s.splits_backward:
        once = d.passes + d.hidden_transfers  # a transfer shows on the way down and back
        slowest = d.passes.max(axis=0)
        bubble = ((w.rank_multiplicity * once).sum(axis=0) - slowest) / s.chunks
        return bubble
    forward, backward, weight = (
        (w.rank_multiplicity * x).sum(axis=0) / w.pipeline
        for x in (d.forward, d.backward, d.weight_grad)
    )
    bubble = closed_forms.bubble(
        s.schedule, w.pipeline, m, s.chunks, forward, backward - weight, weight
    )
    return bubble


def forward_makespan(w: Workload, forward: Array) -> Number:
    """Seconds of the forward passes of all microbatches alone: the slowest rank's, and the others'
    of one microbatch while the pipeline fills.
    """
    slowest = forward.max(axis=0)
    fill = (w.rank_multiplicity * forward).sum(axis=0) - slowest
    seconds: Number = longest_passes(w, forward) + fill / w.fixed.chunks
    return seconds


def bubble_on_shared_cores(bubble: Number, busy: Number, sharing: float) -> Number:
    """What is left of a bubble where `sharing` CPU ranks share a core: while one waits, another
    runs.

    `busy` are the seconds of a rank beside its neighbors; alone it would need `sharing` times
    less.
    """
    return bubble if sharing <= 1 else np.maximum(0.0, (busy + bubble) / sharing - busy)


def simulated_schedule(w: Workload, d: MicrobatchDurations, table: Table) -> Timeline:
    """Compute of one plan's step by `table`, simulated.

    Transfers go in the order in which stages post them, over the plan's backend, where the
    framework's do; else they are taken to arrive as soon as they are sent. What is not hidden of
    them is part of the actions.
    """
    s = w.fixed
    each = float(d.hidden_transfers.sum()) / max(1, 2 * (w.pipeline - 1))
    if not s.framework.model_parallel.ordered_transfers:
        return simulate(table, stage_durations(w, d), each)
    timeline = simulate(
        _executed(table, receives_early(s.schedule, s.transport)),
        stage_durations(w, d),
        each,
        transport=s.transport,
        pair_groups=s.pair_groups,
    )
    return Timeline(tuple(timeline.compute), timeline.ranks)


def simulated_makespan(w: Workload, d: MicrobatchDurations) -> float:
    """Seconds of all microbatches of one plan, those of a long step from its first ones."""
    s, every = w.fixed, int(w.step_microbatches)
    ranks, turn = (sum(s.replicas), lcm(*s.replicas)) if s.in_turn else (s.pipeline, 1)
    held = max(s.in_flight, default=2 * ranks)

    def makespan(count: int) -> float:
        return simulated_schedule(w, d, named_table(s, count)).makespan

    return closed_forms.long_makespan(makespan, every, MAX_ACTIONS // (2 * s.pipeline), held, turn)


@lru_cache(maxsize=64)
def _executed(table: Table, early: bool) -> Table:
    return executable(table, early=early)


def stage_durations(w: Workload, d: MicrobatchDurations) -> dict[str, list[float]]:
    """Seconds of F, B, I and W of one plan by stage."""
    s = w.fixed
    homes = stage_homes(s.pipeline, s.schedule, len(s.partition), s.table)
    return {kind: by_rank[homes].tolist() for kind, by_rank in action_seconds(w, d).items()}


def action_seconds(w: Workload, d: MicrobatchDurations) -> dict[str, Array]:
    """Seconds of an F, B, I and W by rank, whose time is divided evenly over its stages."""
    by_action = {
        "F": d.forward,
        "B": d.backward,
        "I": d.backward - d.weight_grad,
        "W": d.weight_grad,
    }
    return {kind: by_rank / w.fixed.chunks for kind, by_rank in by_action.items()}
