"""CPU seconds of a step of CPU ranks: what their cores work, where waiting costs nothing.

Ranks that share cores take as long as the operating system lets them, and those that wait inside a
collective leave their core to others. What they use is steadier, and adds up: compute, and what
gloo's threads do to move bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.costmodel.communication.collective_cost import measured_kind
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.compute.kernel_rates import device_rates
from workbench.costmodel.compute.measured_layer import (
    measured_layer_times,
    measured_microbatch_compute,
    measured_optimizer_seconds,
)
from workbench.costmodel.inputs.adapted_layers import with_adapters_off
from workbench.costmodel.inputs.config import Array, Number
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.model_states import owned_params
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.measured_operators import MeasuredOperators


def cpu_seconds(w: Workload, constants: Constants) -> float | None:
    """CPU seconds of one plan's step, of all ranks together.

    None where operators or the CPU seconds of collectives were not measured, or a rank has several
    threads: how many of them an operator keeps busy is not known.
    """
    measured = constants.measured
    if measured is None or not measured.has_collectives or measured.threads > 1:
        return None
    moved = _collectives(w, measured)
    if moved is None:
        return None
    alone = measured.on_own_cores()
    each = np.asarray(_compute(w, replace(constants, measured=alone)) + _host(w, alone) + moved)
    ranks = w.tensor * w.searched.context * w.busy_replicas * (w.step_microbatches / w.microbatches)
    return float((each * np.broadcast_to(ranks, each.shape)).sum())


def _compute(w: Workload, constants: Constants) -> Array:
    """Operators of a step, by pipeline rank."""
    m = device_rates(w.fixed.gpu, w.fixed.precision, constants)
    work = measured_microbatch_compute(w, m, measured_layer_times(w, m))
    owned = np.asarray(sum(owned_params(w, w.param_counts)))
    passes = work.forward + work.backward
    if w.fixed.reference_pass:
        off = with_adapters_off(w)
        passes = passes + measured_microbatch_compute(off, m, measured_layer_times(off, m)).forward
    return np.asarray(w.microbatches * passes + measured_optimizer_seconds(w, m, owned))


def _host(w: Workload, measured: MeasuredOperators) -> Number:
    """What the host does once a step, by pipeline rank."""
    host = measured.host
    return 1e-6 * (host.step_us + w.layers * host.layer_step_us)


def _collectives(w: Workload, measured: MeasuredOperators) -> Number | None:
    """Collectives of a step, by pipeline rank; a send is counted with its recv."""
    total: Number = w.zeros
    for call in step_collectives(w):
        if call.kind == "recv":
            continue
        used = measured.collective_cpu_seconds(measured_kind(call), call.bytes, call.group_size)
        if used is None:
            return None
        total = total + call.count * used
    return total
