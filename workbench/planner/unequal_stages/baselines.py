"""What unequal stages are compared with on the same layer profile: PipeDream's planner, GPipe's
straight split, and data parallelism.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.stage_partition import dealt
from workbench.planner.unequal_stages.memory import activation_bytes, stage_state_bytes
from workbench.planner.unequal_stages.overlapped_all_reduce import exposed_all_reduce
from workbench.planner.unequal_stages.parameter_bytes import stage_parameter_bytes
from workbench.planner.unequal_stages.placements import APPEND, placed
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology

Array = NDArray[np.float64]


def gpipe_stages(profile: LayerProfile, topology: Topology) -> tuple[Stage, ...]:
    """As many stages as devices (or layers), one device each, the slowest as quick as may be."""
    costs = [layer.forward_s + layer.backward_s for layer in profile.layers]
    count = min(len(costs), topology.world_size)
    ends = np.cumsum(dealt(costs, count)).tolist()
    return placed(ends, [1] * count, [APPEND] * count, topology)


def data_parallel_seconds(
    profile: LayerProfile, topology: Topology, batch: Batch, overlap: bool
) -> float | None:
    """Seconds of a step of which each device takes an equal part of the sequences, as many at a
    time as memory allows; None where it allows none.

    With `overlap` a layer's gradients are all-reduced, one layer after the other, as soon as the
    last sequences have run backward through it.
    """
    sequences = batch.microbatches * batch.sequences / topology.world_size
    if batch.whole_sequences:
        sequences = math.ceil(sequences)
    at_once = _at_once(profile, topology, batch)
    if at_once is None:
        return None
    per_byte = float(topology.all_reduce_per_byte([topology.devices] * topology.nodes))
    per_byte *= batch.gradient_factor
    at_once = min(at_once, sequences)
    part = float(batch.passes_at_once(at_once, profile))
    last = float(batch.passes_at_once(sequences % at_once, profile))
    passes = sequences // at_once * part + last
    compute = passes * (profile.forward[-1] + profile.backward[-1])
    if not overlap:
        return compute + per_byte * profile.parameters[-1]
    return compute + exposed_all_reduce(profile, part, per_byte)


def _at_once(profile: LayerProfile, topology: Topology, batch: Batch) -> float | None:
    """Sequences that a device with the whole model can keep for backward, None if not one."""
    whole = Stage(0, len(profile.layers), (topology.devices,) * topology.nodes)
    one_each = replace(batch, microbatches=1, sequences=topology.world_size)
    free = topology.memory - float(stage_state_bytes(profile, whole, one_each))
    each = float(activation_bytes(profile, whole, one_each))
    if each > free:
        return None
    return free // each if each and math.isfinite(free) else math.inf


def pipedream_stages(profile: LayerProfile, topology: Topology) -> tuple[Stage, ...]:
    """PipeDream's plan (Narayanan et al., SOSP'19, section 3.1): its asynchronous pipeline is as
    quick as its slowest stage, stages being planned inside a node first and then over nodes.
    """
    compute = np.array(profile.forward) + np.array(profile.backward)
    inner = _Level(profile, _spans(compute), topology.devices, topology.device_rate)
    outer = _Level(profile, inner.best[-1], topology.nodes, topology.network_rate)
    found: list[Stage] = []
    node = 0
    for first, end, nodes in outer.stages(0, len(profile.layers), topology.nodes):
        on = range(node, node + nodes)
        for begin, until, each in inner.stages(first, end, topology.devices):
            counts = tuple(each if n in on else 0 for n in range(topology.nodes))
            found.append(Stage(begin, until, counts))
        node += nodes
    return tuple(found)


def _spans(sums: Array) -> Array:
    """The sum from layer i to before layer j at [i, j]; infinite where there is no layer."""
    spans = sums[None, :] - sums[:, None]
    found: Array = np.where(np.arange(len(sums))[:, None] < np.arange(len(sums)), spans, np.inf)
    return found


class _Level:
    """The dynamic programming of one level of links: `best[m - 1]` has the slowest stage of layers
    i to before j on m parts, each of which takes `alone` for them.
    """

    def __init__(self, profile: LayerProfile, alone: Array, parts: int, rate: float) -> None:
        bounds = np.arange(len(profile.layers) + 1)
        sums = stage_parameter_bytes(profile, bounds[:, None], bounds)
        stage = [np.maximum(alone, 2 * (m - 1) * sums / rate) / m for m in range(1, parts + 1)]
        sent = 2 * np.array(profile.crossing) / rate
        self.best = [found.copy() for found in stage]
        self._cut = np.zeros((parts, *alone.shape), dtype=np.int64)
        self._last = np.zeros((parts, *alone.shape), dtype=np.int64)
        for m in range(2, parts + 1):
            for last in range(1, m):
                for cut in range(1, len(alone) - 1):
                    rest = np.maximum(self.best[m - last - 1][:, cut], sent[cut])
                    self._improve(m, cut, last, np.maximum.outer(rest, stage[last - 1][cut]))

    def _improve(self, m: int, cut: int, last: int, seconds: Array) -> None:
        better = seconds < self.best[m - 1]
        self.best[m - 1][better] = seconds[better]
        self._cut[m - 1][better] = cut
        self._last[m - 1][better] = last

    def stages(self, first: int, end: int, parts: int) -> list[tuple[int, int, int]]:
        """(first layer, layer before which it ends, parts) of each stage."""
        cut, last = self._cut[parts - 1][first, end], self._last[parts - 1][first, end]
        if not last:
            return [(first, end, parts)]
        before = self.stages(first, int(cut), parts - int(last))
        return [*before, (int(cut), end, int(last))]
