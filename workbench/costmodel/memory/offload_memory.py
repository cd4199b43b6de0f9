"""Host memory that offload takes beside optimizer states; gradients that leave the device."""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import has_weight_gradients
from workbench.costmodel.memory.live_sets.stage_phases import add_categories
from workbench.costmodel.memory.model_states import stepped_params
from workbench.costmodel.memory.optimizer_step import cast_bytes_per_param
from workbench.runtime_facts.cast_sizes import HOST_CAST_BYTES
from workbench.runtime_facts.offload_sizes import STAGING_BYTES


def gradients_that_leave(w: Workload, gradients: Number) -> Number:
    """Bytes of `gradients` that no device holds from microbatch to microbatch: shards that are
    copied to the host once reduced, all but a tied weight's, to which another stage adds.
    """
    d, offload = w.fixed.framework.data_parallel, w.searched.offload_optimizer
    if d.offload_gradients:
        return gradients * offload
    leave = offload * d.stages_offload * (w.zero >= 2) * w.reduce_microbatch
    tied = float(w.shape.tied and w.pipeline > 1) * np.maximum(w.has_embedding, w.has_head)
    table = w.table_params * has_weight_gradients(w) / w.searched.shard
    return leave * (gradients - tied * table * w.gradient_element_bytes)


def host_activations(w: Workload) -> Number:
    """Bytes of the inputs of recomputed layers that the host holds at most."""
    held: Number = w.microbatches_in_flight * w.recomputed_layers * w.residual_bytes
    return held * w.fixed.offloads_checkpoints


def by_tier(w: Workload, states: dict[str, Array]) -> dict[str, dict[str, Array]]:
    """Tier -> category -> bytes of what is offloaded: `states`, and what they need beside them."""
    copies, buffers = _copied_parameters(w), host_buffers(w)
    states = states | {"parameters": states["parameters"] + copies}
    if not w.fixed.offloads_to_disk:
        return {"host": add_categories(states, buffers)}
    return {"disk": states, "host": add_categories(buffers, disk_buffers(w))}


def _copied_parameters(w: Workload) -> Array:
    """Bytes of what the host steps where there are no master weights: a copy of the parameters."""
    k, owned = w.searched, stepped_params(w)
    steps_copy = np.maximum(1 - k.offload_parameters, w.fixed.delays_update)
    own = w.fixed.framework.data_parallel.stages_offload and w.fixed.master_bytes == 0
    return np.asarray(owned * k.offload_optimizer * w.fixed.parameter_bytes * own * steps_copy)


def disk_buffers(w: Workload) -> dict[str, Array]:
    """Two buffers for states on their way from and to disks."""
    return {"communication": w.zeros + 2 * STAGING_BYTES * (w.searched.offload_optimizer > 0)}


def host_buffers(w: Workload) -> dict[str, Array]:
    """What the host holds beside states: gradients, inputs of recomputed layers, two buffers for
    parameters on their way up, and casts.
    """
    k = w.searched
    activations = {"activations": w.zeros + host_activations(w)}
    if not w.fixed.framework.data_parallel.stages_offload:
        return activations
    not_there = 1 - k.offload_parameters
    owned = stepped_params(w) * k.offload_optimizer
    casts = np.minimum(owned * cast_bytes_per_param(w), HOST_CAST_BYTES)
    return activations | {
        "gradients": w.zeros + owned * w.gradient_element_bytes * (1 + w.fixed.delays_update),
        "communication": w.zeros + 2 * STAGING_BYTES * (k.offload_optimizer * not_there > 0),
        "temporary": w.zeros + casts,
    }
