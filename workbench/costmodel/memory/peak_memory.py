"""Device memory of each pipeline rank: live sets at the instants that can be the peak, by
category.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import live_sets, zero_buffers
from workbench.costmodel.memory.activation_memory import INDEX
from workbench.costmodel.memory.live_sets import Live, plus
from workbench.costmodel.memory.model_states import States, sharded, states
from workbench.costmodel.rates.constants import Constants


@dataclass(frozen=True)
class Memory:
    """Bytes by pipeline rank: moment -> category -> array. `host` is what lives in host memory."""

    moments: dict[str, Live]
    host: Live
    live: Array
    """The peak without workspaces, fragmentation, communicators and the driver's context."""

    @property
    def peak(self) -> Array:
        """Largest sum at one instant, by pipeline rank."""
        return total(self.moments["peak"])


def total(live: Live) -> Array:
    """Sum over categories."""
    return np.asarray(sum(live.values()))


def memory(w: Workload, constants: Constants) -> Memory:
    """All moments of `profile.MOMENTS`, of one plan."""
    parameters = w.held
    persistent, host = _persistent(w, states(w, parameters))
    working = live_sets.working(w, parameters)
    early = persistent | {
        "gradients": np.asarray(persistent["gradients"] * live_sets.early_gradients(w))
    }
    lives = {
        name: plus(persistent if name in live_sets.LATE else early, live, working)
        for name, live in live_sets.passes(w).items()
    }
    for name, change in zero_buffers.changes(w, parameters).items():
        lives[name] = plus(lives[name], change)
    forward_end = lives.pop("first_forward")
    lives["optimizer"] = plus(persistent, live_sets.optimizer(w, parameters))
    peak = _at_largest(list(lives.values()))
    fixed = w.nothing + _fixed(w, constants)
    overhead = {"overhead": fixed + constants.fragmentation * total(peak)}
    moments = {
        "initialised": plus(persistent, {"overhead": fixed}),
        "forward_end": forward_end,
        "peak": peak,
        "before_optimizer": persistent,
        "after_optimizer": persistent,
        "maximum": _own_maxima(
            [*lives.values(), {"gathered": working["gathered"]} if "gathered" in working else {}]
        ),
    }
    whole = {m: live if m == "initialised" else plus(live, overhead) for m, live in moments.items()}
    return Memory(whole, host, total(peak))


def peaks(w: Workload, constants: Constants) -> Array:
    """The largest peak over the pipeline ranks of each candidate, bytes: `memory` without its
    categories.

    What depends on the layers alone is reduced to its largest instant before the states' axes join
    in.
    """
    parameters = w.held
    persistent, _ = _persistent(w, states(w, parameters))
    lives = live_sets.passes(w)
    del lives["first_forward"]
    if moved := zero_buffers.changes(w, parameters):
        lives = {name: plus(live, moved.get(name, {})) for name, live in lives.items()}
    late = [total(lives.pop(name)) for name in live_sets.LATE if name in lives]
    passes = _largest([total(live) for live in lives.values()] + late)
    if w.setting.software.late_gradients:
        missing = persistent["gradients"] * (1 - live_sets.early_gradients(w))
        passes = _largest([_largest([total(live) for live in lives.values()]) - missing, *late])
    if working := live_sets.working(w, parameters):
        passes = passes + total(working)
    live = total(persistent) + np.maximum(passes, total(live_sets.optimizer(w, parameters)))
    return np.asarray(live.max(axis=0) * (1 + constants.fragmentation) + _fixed(w, constants))


def _largest(sums: list[Array]) -> Array:
    most = sums[0]
    for each in sums[1:]:
        most = np.maximum(most, each)
    return most


def _fixed(w: Workload, constants: Constants) -> Number:
    """Workspaces, the driver's context and the communicators' buffers."""
    outside = constants.context_mib + constants.communicator_mib * communicators(w)
    return (constants.workspace_mib + outside) * 2**20


def communicators(w: Workload) -> Number:
    """Groups in which a rank communicates: one for each axis longer than one, and one of all
    ranks.
    """
    k = w.knobs
    rest = w.setting.world / (k.tensor * k.context * w.pipeline)
    axes = np.asarray(k.tensor > 1, float) + (k.context > 1) + (rest > 1) + (w.pipeline > 1)
    return axes + (w.setting.world > 1)


def _persistent(w: Workload, s: States) -> tuple[Live, Live]:
    """(on the device, on the host): states, and the tokens and targets of a step."""
    k = w.knobs
    sequences = w.microbatches * k.micro_batch
    states_ = {"optimizer": s.optimizer, "master": s.master}
    device: Live = {"parameters": s.parameters * (1 - k.offload_parameters)}
    device["gradients"] = s.gradients * (
        1 - k.offload_optimizer * w.setting.software.offload_gradients
    )
    device |= {name: value * (1 - k.offload_optimizer) for name, value in states_.items()}
    device["overhead"] = w.nothing + 2 * INDEX * w.setting.sequence_length * sequences
    host = {name: value * k.offload_optimizer for name, value in states_.items()}
    if w.setting.stack == "workbench":  # gradients on their way down, and values on their way up
        shards = sharded(w, w.held) * k.offload_optimizer
        host["communication"] = shards * (
            w.gradient_element + w.element * (1 - k.offload_parameters)
        )
    return device, host | {"parameters": s.parameters * k.offload_parameters}


def _at_largest(lives: list[Live]) -> Live:
    """Each rank's live set at the instant of its own largest sum."""
    names = sorted({category for live in lives for category in live})
    worst = np.argmax([total(live) for live in lives], axis=0)
    ranks = np.arange(len(worst))
    return {
        n: np.stack([live.get(n, np.zeros(len(worst))) for live in lives])[worst, ranks]
        for n in names
    }


def _own_maxima(lives: list[Live]) -> Live:
    names = sorted({category for live in lives for category in live})
    zero = np.zeros_like(total(lives[0]))
    return {n: np.max([live.get(n, zero) for live in lives], axis=0) for n in names}
