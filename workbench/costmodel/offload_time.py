"""Seconds of copies between device and host memory that compute does not hide."""

from __future__ import annotations

import numpy as np

from workbench.costmodel.communication.collective_volume import num_zero3_units
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.offload_memory import host_activations
from workbench.costmodel.rates.constants import Constants


def exposed_offload(
    w: Workload, constants: Constants, owned: Array, makespan: Number, optimizer: Number
) -> Number:
    """Gradients to the host and parameters back (ZeRO-Offload, 2101.06840), parameters that are
    streamed and inputs of recomputed layers (ZeRO-Infinity, 2104.07857), over PCIe.

    Args:
        w: Per-rank problem sizes.
        constants: Of the GPU and the framework.
        owned: Parameters whose optimizer states a rank holds.
        makespan: Seconds of forward and backward.
        optimizer: Seconds of the optimizer's step.
    """
    k, pcie = w.searched, w.fixed.gpu.pcie_gbs * 1e9
    stepped = owned * k.offload_optimizer * (w.zero > 0)
    gradients, updated = stepped * w.gradient_element_bytes, stepped * w.element_bytes
    through_disk = 1.0
    if w.fixed.offloads_to_disk:
        through_disk = max(1.0, w.fixed.gpu.pcie_gbs / constants.disk_gbs)
    streamed = (
        through_disk
        * k.offload_parameters
        * (2 * w.step_microbatches * w.param_counts.total * w.element_bytes)
    )
    hidden = k.offload_optimizer * constants.offload_overlap * makespan
    if not w.fixed.framework.data_parallel.stages_offload:
        moved = np.asarray(gradients + updated + streamed)
        return np.asarray(np.maximum(0.0, moved.max(axis=0) / pcie - hidden))
    # The engine copies gradients down, and streams parameters and inputs, while it computes. It
    # waits for what former microbatches have left on the host.
    later = (w.step_microbatches - 1) * (w.zero >= 2) * w.reduce_microbatch
    inputs = 2 * host_activations(w) / w.microbatches_in_flight
    beside = gradients * (1 + later) + streamed + inputs * w.step_microbatches
    hidden = constants.offload_overlap * makespan
    exposed = np.maximum(0.0, beside / pcie - hidden) + gradients * later / pcie
    returned = updated * (1 - k.offload_parameters) / pcie
    return np.asarray((exposed + _exposed_upload(w, owned, returned, optimizer)).max(axis=0))


def _exposed_upload(w: Workload, owned: Array, upload: Array, optimizer: Number) -> Array:
    """Seconds of `upload` that the host's step does not hide: a bucket goes up while the next is
    stepped (ZeRO-Offload, section 4), and the last one, or all but what the first lets go by.
    """
    if w.fixed.delays_update:
        return upload
    elements = owned * w.searched.shard
    buckets = np.maximum(
        1.0, np.ceil(elements * w.gradient_element_bytes / w.searched.bucket_bytes)
    )
    if w.zero == 3:
        buckets = num_zero3_units(w)
    return np.asarray(np.maximum(upload / buckets, upload - optimizer * (1 - 1 / buckets)))
