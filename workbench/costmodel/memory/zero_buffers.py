"""What of ZeRO's working set is there at which instant, in the workbench's own engine.

`instants.working` counts the most that is there at once; other stacks hold that throughout.
"""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import shared_here, trained
from workbench.costmodel.memory.live_sets import Live, gathered
from workbench.costmodel.memory.model_states import Held

HEAD = ("first_forward", "forward", "product", "loss", "projection", "final_norm")
"""Instants at which backward has not yet come to a layer."""


def changes(w: Workload, p: Held) -> dict[str, Live]:
    """Instant -> what is there more (or less) than `instants.working` says, bytes by category;
    nothing elsewhere.
    """
    if w.setting.stack != "workbench" or w.zero < 2:
        return {}
    most = gathered(w, p)
    layer = _layer(w, p)
    backward = (
        "layer",
        "columns",
        "norm",
        *(("attention", "first_norm") if w.setting.split else ()),
    )
    sets = {
        **dict.fromkeys(HEAD, _head(w, p)),
        **dict.fromkeys(backward, layer),
        "embedding": _end(w, p),
    }
    return {
        name: {category: live[category] - most[category] for category in most}
        for name, live in sets.items()
    }


def _kept(w: Workload) -> Number:
    return np.maximum(w.knobs.keep_gathered, w.pipeline > 1) if w.zero == 3 else 1.0


def _whole(w: Workload, p: Held, units: Number) -> Number:
    """Bytes of gathered parameters, where `units` of them are."""
    return (w.zero == 3) * w.element * np.where(_kept(w) > 0, p.total, np.minimum(units, p.total))


def _head(w: Workload, p: Held) -> Live:
    """The last unit (with a tied table the embedding too), and the layers before it on their way;
    no gradient.
    """
    table = w.vocab * w.height
    beside = w.first * (p.total - w.layers * p.layer - table) * float(shared_here(w))
    return {
        "gathered": w.nothing
        + _whole(w, p, w.last * table + beside + (w.setting.in_flight - 1) * p.layer),
        "communication": w.nothing,
    }


def _layer(w: Workload, p: Held) -> Live:
    """A layer and the next on their way; the gradient of a layer, and of what is still being
    reduced: the head.
    """
    made = np.minimum(w.knobs.bucket_bytes / w.gradient_element, p.trained)
    if w.zero == 3:
        made = p.layer + (w.setting.in_flight > 1) * w.last * w.vocab * w.height * (
            1 - float(shared_here(w))
        )
    return {
        "gathered": w.nothing + _whole(w, p, w.setting.in_flight * p.layer),
        "communication": w.nothing + _gradient(w, made),
    }


def _end(w: Workload, p: Held) -> Live:
    """Nothing that is gathered for a table; the gradients in flight, or all where a pipeline's are
    together.
    """
    table, most = w.first * w.vocab * w.height, w.setting.in_flight
    each = (
        (most - 1) * p.layer + table
        if w.zero == 3
        else most * w.knobs.bucket_bytes / w.gradient_element
    )
    made = p.trained if w.pipeline > 1 else np.minimum(p.trained, each)
    return {
        "gathered": w.nothing + _whole(w, p, w.nothing),
        "communication": w.nothing + _gradient(w, made),
    }


def _gradient(w: Workload, elements: Number) -> Number:
    return elements * w.gradient_element * w.reduce_microbatch * trained(w)
