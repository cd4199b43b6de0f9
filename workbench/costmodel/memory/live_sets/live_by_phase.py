"""Live sets: phases of a step at which memory can peak, and what is live then besides model
states.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import last_layer_activations
from workbench.costmodel.memory.live_sets.activations_in_flight import activations_in_flight
from workbench.costmodel.memory.live_sets.operator_live_sets import operator_live_sets
from workbench.costmodel.memory.live_sets.several_stages import (
    counts_by_action,
    several_stages_live_sets,
)
from workbench.costmodel.memory.live_sets.stage_phases import (
    MemoryByCategory,
    backward_phases,
    forward_phases,
)
from workbench.costmodel.memory.loss_memory import head_memory

PHASES_WITH_ALL_GRADIENTS = ("embedding", "optimizer")
"""Phases at which all gradients exist, whatever the framework."""


def gradients_persist(w: Workload) -> Number:
    """1 where gradients exist from the start of the step, 0 where its only backward allocates
    them.
    """
    if not w.fixed.framework.model_states.frees_gradients:
        return 1.0
    return np.where(w.microbatches > 1, 1.0, 0.0)


def live_by_phase(w: Workload, by_category: bool = True) -> dict[str, MemoryByCategory]:
    """Activations, logits and temporaries live at each phase of forward and backward that can be
    the peak.

    Returns:
        Phase -> category -> bytes by pipeline rank; `first_forward` is the state after the first
        microbatch's forward. Else than `by_category`, only the sum over categories counts.
    """
    if w.fixed.grid is not None:
        return operator_live_sets(w)
    if counts_by_action(w):
        return several_stages_live_sets(w, by_category)
    head, layer = head_memory(w), last_layer_activations(w)
    flight = activations_in_flight(w, head)
    full = {"activations": flight.total, "logits": flight.logits}
    return {
        "first_forward": {name: size / w.microbatches_in_flight for name, size in full.items()},
        **forward_phases(w, head, layer, flight),
        **backward_phases(w, head, layer, flight, is_split=False),
    }
