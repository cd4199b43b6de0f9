"""Peak memory of each pipeline rank: the largest live set of a step, by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, Mask, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory import offload_memory, zero_buffers
from workbench.costmodel.memory.activation_memory import TOKEN_ID_BYTES, dummy_weight_gradient_bytes
from workbench.costmodel.memory.live_sets.live_by_phase import (
    PHASES_WITH_ALL_GRADIENTS,
    gradients_persist,
    live_by_phase,
)
from workbench.costmodel.memory.live_sets.stage_phases import (
    MemoryByCategory,
    add_categories,
    total_bytes,
)
from workbench.costmodel.memory.model_states import ModelStates, model_states
from workbench.costmodel.memory.optimizer_step import optimizer_step_buffers
from workbench.costmodel.memory.step_buffers import most_gathered, step_buffers
from workbench.costmodel.rates.constants import Constants
from workbench.vocabulary import FRAGMENTATION, OUTSIDE


@dataclass(frozen=True)
class PeakMemory:
    """Bytes by pipeline rank."""

    moments: dict[str, MemoryByCategory]
    """Moment of `profile.MOMENTS` -> category -> bytes."""
    beyond: dict[str, MemoryByCategory]
    """Tier (host, disk) -> category -> bytes."""
    phases: MemoryByCategory
    """Phase of `live_sets` -> bytes; the peak is the largest of them."""
    live: Array
    """Peak without workspaces, fragmentation, communicator buffers and the driver's context."""
    live_in_first_step: Array
    """The same of a run's first step, whose optimizer allocates its moments at its end."""

    @property
    def peak(self) -> Array:
        """Largest sum at one instant, by pipeline rank."""
        return total_bytes(self.moments["peak"])


def peak_memory(w: Workload, constants: Constants) -> PeakMemory:
    """Memory of one plan at all moments of `profile.MOMENTS`.

    Args:
        w: Per-rank problem sizes of one plan.
        constants: Workspaces, fragmentation and communicator buffers.
    """
    parameters = w.param_counts
    persistent, beyond = _persistent(w, model_states(w, parameters))
    buffers = step_buffers(w, w.packed_counts)
    without_gradients = persistent | {
        "gradients": np.asarray(persistent["gradients"] * gradients_persist(w))
    }
    phases = {
        name: add_categories(
            persistent if name in PHASES_WITH_ALL_GRADIENTS else without_gradients, live, buffers
        )
        for name, live in live_by_phase(w).items()
    }
    changes = zero_buffers.zero_buffer_deltas(w, w.packed_counts)
    phases = {name: add_categories(live, changes.get(name, {})) for name, live in phases.items()}
    forward_end = phases.pop("first_forward")
    phases["optimizer"] = add_categories(persistent, optimizer_step_buffers(w, parameters))
    peak = _at_largest(list(phases.values()))
    first = _largest(
        [
            total_bytes(live) - persistent["optimizer"] * (name != "optimizer")
            for name, live in phases.items()
        ]
    )
    fixed = {
        "overhead": w.zeros + constants.workspace_mib * 2**20,
        OUTSIDE: w.zeros + _outside_bytes(w, constants),
    }
    reserved = {**fixed, FRAGMENTATION: constants.fragmentation * total_bytes(peak)}
    moments = {
        "initialised": add_categories(persistent, fixed),
        "forward_end": forward_end,
        "peak": peak,
        "before_optimizer": persistent,
        "after_optimizer": persistent,
        "maximum": _own_maxima([*phases.values(), _most_gathered(w, buffers)]),
    }
    with_overhead = {
        m: live if m == "initialised" else add_categories(live, reserved)
        for m, live in moments.items()
    }
    kept = sum(fixed.values(), w.zeros)
    by_phase = {
        name: (1 + constants.fragmentation) * total_bytes(live) + kept
        for name, live in phases.items()
    }
    return PeakMemory(with_overhead, beyond, by_phase, total_bytes(peak), first)


def _most_gathered(w: Workload, buffers: MemoryByCategory) -> MemoryByCategory:
    if "gathered" not in buffers:
        return {}
    return {"gathered": most_gathered(w, w.packed_counts, buffers["gathered"])}


def largest_peaks(w: Workload, constants: Constants) -> tuple[Array, Mask]:
    """(largest peak over the pipeline ranks of each candidate, bytes, whether a rank's share of its
    node's host memory holds what it offloads): `peak_memory` without categories.

    What depends on the layers alone is reduced to its largest phase before the axes of the model
    states are broadcast in; a search over millions of candidates stays in cache.
    """
    parameters = w.param_counts
    persistent, beyond = _persistent(w, model_states(w, parameters))
    phases = live_by_phase(w, by_category=False)
    del phases["first_forward"]
    if deltas := zero_buffers.zero_buffer_deltas(w, w.packed_counts):
        phases = {name: add_categories(live, deltas.get(name, {})) for name, live in phases.items()}
    late = [total_bytes(phases.pop(name)) for name in PHASES_WITH_ALL_GRADIENTS if name in phases]
    passes = _largest([total_bytes(live) for live in phases.values()] + late)
    if w.fixed.framework.model_states.frees_gradients:
        unallocated = persistent["gradients"] * (1 - gradients_persist(w))
        passes = _largest(
            [_largest([total_bytes(live) for live in phases.values()]) - unallocated, *late]
        )
    if buffers := step_buffers(w, w.packed_counts):
        passes = passes + total_bytes(buffers)
    live = total_bytes(persistent) + np.maximum(
        passes, total_bytes(optimizer_step_buffers(w, parameters))
    )
    peaks = live.max(axis=0) * (1 + constants.fragmentation) + _fixed_bytes(w, constants)
    return np.asarray(peaks), _fits_host(w, beyond["host"])


def _fits_host(w: Workload, offloaded: MemoryByCategory) -> Mask:
    s = w.fixed
    share = s.fabric.host_bytes_per_rank(min(s.gpus_per_node, s.world_size))
    if share is None or not np.any(w.searched.offload_optimizer):
        return np.True_
    return np.asarray(total_bytes(offloaded).max(axis=0) <= share)


def _largest(sums: list[Array]) -> Array:
    most = sums[0]
    for each in sums[1:]:
        most = np.maximum(most, each)
    return most


def _fixed_bytes(w: Workload, constants: Constants) -> Number:
    """Bytes of workspaces, the driver's context and the communicators' buffers."""
    return constants.workspace_mib * 2**20 + _outside_bytes(w, constants)


def _outside_bytes(w: Workload, constants: Constants) -> Number:
    """Bytes of the driver's context and the communicators' buffers, which no allocator sees."""
    return (constants.context_mib + constants.communicator_mib * num_communicators(w)) * 2**20


def num_communicators(w: Workload) -> Number:
    """Communicators of a rank: one per mesh axis longer than one, two more where the context axis
    has both a ring and all-to-alls (usp), and one of all ranks.
    """
    k = w.searched
    rest = w.fixed.world_size / (k.tensor * k.context * w.pipeline)
    axes = np.asarray(k.tensor > 1, float) + (k.context > 1) + (rest > 1) + (w.pipeline > 1)
    both = np.asarray((w.ulysses > 1) & (w.ring > 1))
    groups: Number = axes + 2 * both + (w.fixed.world_size > 1)
    return groups


def _persistent(
    w: Workload, s: ModelStates
) -> tuple[MemoryByCategory, dict[str, MemoryByCategory]]:
    """(on the device, tier -> what is offloaded there): model states, placeholders of weight
    gradients, the tokens, targets and document starts of a step, and workspaces of grouped GEMMs.
    """
    k = w.searched
    sequences = w.microbatches * w.sequences
    states_ = {"optimizer": s.optimizer, "master": s.master}
    device: MemoryByCategory = {"parameters": s.parameters * (1 - k.offload_parameters)}
    device["gradients"] = s.gradients - offload_memory.gradients_that_leave(w, s.gradients)
    device["gradients"] = device["gradients"] + dummy_weight_gradient_bytes(w)
    device |= {name: value * (1 - k.offload_optimizer) for name, value in states_.items()}
    of_token = (2 + w.fixed.separate_documents) * TOKEN_ID_BYTES
    device["overhead"] = w.zeros + of_token * w.fixed.sequence_length * sequences
    if w.fixed.traced is not None:
        device["overhead"] += w.fixed.traced.buffer_bytes
    if w.shape.moe is not None:
        device["overhead"] += w.fixed.framework.experts.workspace_mib * 2**20
    offloaded = {name: value * k.offload_optimizer for name, value in states_.items()}
    offloaded["parameters"] = s.parameters * k.offload_parameters
    return device, offload_memory.by_tier(w, offloaded)


def _at_largest(lives: list[MemoryByCategory]) -> MemoryByCategory:
    """Each rank's live set at the phase of its own peak."""
    names = sorted({category for live in lives for category in live})
    worst = np.argmax([total_bytes(live) for live in lives], axis=0)
    ranks = np.arange(len(worst))
    return {
        n: np.stack([live.get(n, np.zeros(len(worst))) for live in lives])[worst, ranks]
        for n in names
    }


def _own_maxima(lives: list[MemoryByCategory]) -> MemoryByCategory:
    names = sorted({category for live in lives for category in live})
    zero = np.zeros_like(total_bytes(lives[0]))
    return {n: np.max([live.get(n, zero) for live in lives], axis=0) for n in names}
