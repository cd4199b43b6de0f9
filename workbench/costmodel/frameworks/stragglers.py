"""Runs that stall: where a host is slow, or a card so full that its allocator retries, messages
between stages wait.

Of few nodes most runs meet no slow host, of many most do; an estimate is that of the run in the
middle.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import FixedConfig, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.peak_memory import max_peak_bytes
from workbench.costmodel.rates.constants import Constants

ALLOCATOR_RETRY_SHARE = 0.95
"""Share of the card, fragments and the driver's part included, above which an allocator frees and
retries.
"""
RARE_PROBABILITY = 0.05
"""Chance below which the 90 % interval leaves a stall out."""


def straggler_probability(s: FixedConfig, constants: Constants) -> float:
    """That at least one node of a run has a slow host; on one node nobody waits for it."""
    return (
        0.0
        if s.world_size <= s.gpus_per_node
        else 1 - (1 - constants.stall_share) ** (s.world_size / s.gpus_per_node)
    )


def straggler_likely(s: FixedConfig, constants: Constants) -> bool:
    """Whether a run more likely than not has a slow host."""
    return straggler_probability(s, constants) > 0.5


def stall_seconds(w: Workload, constants: Constants) -> Number:
    """Seconds that messages between stages would wait in a step of a run that stalls.

    A stage between others receives and sends one each way, an end half of that; filling the
    pipeline, one a stage.
    """
    messages = (4.0 if w.pipeline > 2 else 2.0) * w.fixed.chunks * w.microbatches + (w.pipeline - 1)
    return 1e-3 * constants.stall_ms * (w.pipeline > 1) * messages


def run_stalls(w: Workload, constants: Constants) -> Number:
    """Whether the run in the middle stalls: with so many nodes, or so full a card."""
    if straggler_likely(w.fixed, constants):
        return np.True_
    return max_peak_bytes(w, constants) > ALLOCATOR_RETRY_SHARE * w.fixed.gpu.memory_gib * 2**30


def ranks_waited_for(w: Workload, constants: Constants) -> Number:
    """Tensor ranks whose hosts a layer waits for: all under a pipeline over nodes or on full cards,
    a node's where many nodes stall, else none.
    """
    s = w.fixed
    if s.pipeline > 1 and s.world_size > s.gpus_per_node:
        return w.tensor
    return (
        np.minimum(w.tensor, s.gpus_per_node)
        if straggler_likely(s, constants)
        else w.tensor * run_stalls(w, constants)
    )
