"""Runs that stall: where a host is slow, or a card so full that its allocator retries, messages
between stages wait.

Of few nodes most runs meet no slow host, of many most do; an estimate is that of the run in the
middle.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number, Setting
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.peak_memory import peaks
from workbench.costmodel.rates.constants import Constants

NEAR_LIMIT = 0.95
"""Share of the card, fragments and the driver's part included, above which an allocator frees and
retries.
"""
RARE = 0.05
"""Chance below which the 90 % interval leaves a stall out."""


def chance(s: Setting, constants: Constants) -> float:
    """That at least one node of a run has a slow host; on one node nobody waits for it."""
    return 0.0 if s.world <= s.node else 1 - (1 - constants.stall_share) ** (s.world / s.node)


def crowded(s: Setting, constants: Constants) -> bool:
    """Whether a run more likely than not has a slow host."""
    return chance(s, constants) > 0.5


def waits(w: Workload, constants: Constants) -> Number:
    """Seconds that messages between stages would wait in a step of a run that stalls.

    A stage between others receives and sends one each way, an end half of that; filling the
    pipeline, one a stage.
    """
    messages = (4.0 if w.pipeline > 2 else 2.0) * w.setting.chunks * w.microbatches + (
        w.pipeline - 1
    )
    return 1e-3 * constants.stall_ms * (w.pipeline > 1) * messages


def stalls(w: Workload, constants: Constants) -> Number:
    """Whether the run in the middle stalls: with so many nodes, or so full a card."""
    if crowded(w.setting, constants):
        return np.True_
    return peaks(w, constants) > NEAR_LIMIT * w.setting.card.memory_gib * 2**30


def met(w: Workload, constants: Constants) -> Number:
    """Tensor ranks whose hosts a layer waits for: all under a pipeline over nodes or on full cards,
    a node's where many nodes stall, else none.
    """
    s = w.setting
    if s.pipeline > 1 and s.world > s.node:
        return w.tensor
    return (
        np.minimum(w.tensor, s.node) if crowded(s, constants) else w.tensor * stalls(w, constants)
    )
