"""Device memory of each pipeline rank: live sets at the instants that can be the peak, by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.planner.activations import INDEX
from workbench.planner.constants import Constants
from workbench.planner.instants import Live, instants, plus
from workbench.planner.states import States, held, states
from workbench.planner.workload import Array, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes by pipeline rank: moment -> category -> array. `host` is what lives in host memory."""

    moments: dict[str, Live]
    host: Live

    @property
    def peak(self) -> Array:
        """Largest sum at one instant, by pipeline rank."""
        return total(self.moments["peak"])


def total(live: Live) -> Array:
    """Sum over categories."""
    return np.asarray(sum(live.values()))


def memory(w: Workload, constants: Constants) -> Memory:
    """All moments of `profile.MOMENTS`."""
    parameters = held(w)
    persistent, host = _persistent(w, states(w, parameters))
    lives = {name: plus(persistent, live) for name, live in instants(w, parameters).items()}
    forward_end = lives.pop("first_forward")
    peak = _at_largest(list(lives.values()))
    fixed = np.full(w.pipeline, (constants.workspace_mib + constants.context_mib) * 2**20)
    overhead = {"overhead": fixed + constants.fragmentation * total(peak)}
    moments = {
        "initialised": plus(persistent, {"overhead": fixed}),
        "forward_end": forward_end,
        "peak": peak,
        "before_optimizer": persistent,
        "after_optimizer": persistent,
        "maximum": _own_maxima(list(lives.values())),
    }
    return Memory({m: live if m == "initialised" else plus(live, overhead) for m, live in moments.items()}, host)


def _persistent(w: Workload, s: States) -> tuple[Live, Live]:
    """(on the device, on the host): states, and the tokens and targets of a step."""
    nothing = np.zeros(w.pipeline)
    batch = 2 * INDEX * w.microbatches * w.sequences * w.sequence_length
    device = {"parameters": s.parameters, "gradients": s.gradients, "optimizer": s.optimizer, "master": s.master}
    host: Live = {}
    if s.optimizer_on_host:
        host |= {"optimizer": device["optimizer"], "master": device["master"]}
        device |= {"optimizer": nothing, "master": nothing}
    if s.parameters_on_host:
        host["parameters"] = device["parameters"]
        device["parameters"] = nothing
    return device | {"overhead": np.full(w.pipeline, float(batch))}, host


def _at_largest(lives: list[Live]) -> Live:
    """Each rank's live set at the instant of its own largest sum."""
    names = sorted({category for live in lives for category in live})
    worst = np.argmax([total(live) for live in lives], axis=0)
    ranks = np.arange(len(worst))
    return {n: np.stack([live.get(n, np.zeros(len(worst))) for live in lives])[worst, ranks] for n in names}


def _own_maxima(lives: list[Live]) -> Live:
    names = sorted({category for live in lives for category in live})
    zero = np.zeros_like(total(lives[0]))
    return {n: np.max([live.get(n, zero) for live in lives], axis=0) for n in names}
