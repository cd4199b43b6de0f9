"""Bytes of a stage's parameters, copies of those that an earlier stage has too among them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from workbench.plan.model.layer_profile import LayerProfile
from workbench.planner.unequal_stages.topology import Floats


def stage_parameter_bytes(profile: LayerProfile, first: ArrayLike, end: ArrayLike) -> Floats:
    """Bytes of the parameters of stages; a stage has a tied weight once.

    Args:
        profile: The layers.
        first: The first layer of each stage, `[...]`.
        end: The layer before which it ends; both broadcast.
    """
    sums, first, end = np.array(profile.parameters), np.asarray(first), np.asarray(end)
    found: Floats = sums[end] - sums[first]
    for tie in profile.ties:
        apart = (tie.earlier < first) & (first <= tie.layer) & (tie.layer < end)
        found = found + tie.bytes * apart
    return found
