"""Stragglers: hosts that delay messages between stages, and GPUs so full that the allocator
retries.

On few nodes most runs have no slow host, on many nodes most do; an estimate is of the median run.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import FixedConfig, Mask, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.peak_memory import max_peak_bytes
from workbench.costmodel.rates.constants import Constants

ALLOCATOR_RETRY_SHARE = 0.95
"""Share of GPU memory, fragmentation and driver included, above which the allocator frees and
retries.
"""
RARE_PROBABILITY = 0.05
"""Probability below which the 90 % interval leaves stragglers out."""


def straggler_probability(s: FixedConfig, constants: Constants) -> float:
    """Probability that at least one node of a run has a slow host; zero on one node."""
    return (
        0.0
        if s.world_size <= s.gpus_per_node
        else 1 - (1 - constants.stall_share) ** (s.world_size / s.gpus_per_node)
    )


def straggler_likely(s: FixedConfig, constants: Constants) -> bool:
    """Whether the median run has a slow host."""
    return straggler_probability(s, constants) > 0.5


def stall_seconds(w: Workload, constants: Constants) -> Number:
    """Seconds that messages between stages wait in a step of a run with a straggler.

    A middle stage receives and sends one message each way per microbatch, an end half of that;
    filling the pipeline takes one per stage.
    """
    messages = (4.0 if w.pipeline > 2 else 2.0) * w.fixed.chunks * w.microbatches + (w.pipeline - 1)
    return 1e-3 * constants.stall_ms * (w.pipeline > 1) * messages


def run_stalls(w: Workload, constants: Constants) -> Mask:
    """Whether the median run stalls: on so many nodes, or on so full a GPU."""
    if straggler_likely(w.fixed, constants):
        return np.True_
    return max_peak_bytes(w, constants) > ALLOCATOR_RETRY_SHARE * w.fixed.gpu.memory_gib * 2**30


def ranks_waited_for(w: Workload, constants: Constants) -> Number:
    """Tensor-parallel ranks whose hosts a layer waits for.

    All of them under a pipeline across nodes or on full GPUs, those of a node where a straggler is
    likely, else none.
    """
    s = w.fixed
    if s.pipeline > 1 and s.world_size > s.gpus_per_node:
        return w.tensor
    return (
        np.minimum(w.tensor, s.gpus_per_node)
        if straggler_likely(s, constants)
        else w.tensor * run_stalls(w, constants)
    )
