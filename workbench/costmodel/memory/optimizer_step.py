"""Temporaries of the optimizer step: gradients, weights and moments in the dtype it computes in."""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import has_weight_gradients
from workbench.costmodel.memory.live_sets.stage_phases import MemoryByCategory
from workbench.costmodel.memory.model_states import owned_params, params_outside_tables
from workbench.runtime_facts.cast_sizes import CPU_FUSED_CAST_BYTES, OPTIMIZER_CAST_BYTES


def optimizer_step_buffers(w: Workload, p: ParamCounts) -> MemoryByCategory:
    """What the step casts, or the gradient of a tied weight that the first and last stage exchange
    before it, whichever is more.
    """
    table = w.table_params * has_weight_gradients(w)
    tied = float(w.shape.tied and w.pipeline > 1) * np.maximum(w.has_embedding, w.has_head)
    shared = table / (w.searched.shard if w.zero >= 1 else 1)
    casts = _cast_bytes(w, p, table)
    return {"temporary": np.maximum(casts, tied * shared * w.gradient_element_bytes)}


def _cast_bytes(w: Workload, p: ParamCounts, table: Number) -> Number:
    """Bytes of casts that are live at once: as many as the framework documents, those of a whole
    share of the parameters, or those of a piece of it. The host casts in memory of its own.
    """
    states, owned = w.fixed.framework.model_states, sum(owned_params(w, p))
    on_device = 1 - w.searched.offload_optimizer
    if states.optimizer_temporary:
        return owned * states.optimizer_temporary * on_device
    if states.upcasts_whole_shard:
        stepped = np.minimum(owned, states.sub_group_parameters) if w.zero == 3 else owned
        flat = states.flattens_gradients * w.gradient_element_bytes * (w.zero > 0)
        each = _upcast_gradient(w) + flat
        casts = _rounded_master_bytes(w, p) + _moment_bytes(w, p)
        return (stepped * each + casts) * on_device
    per_param = cast_bytes_per_param(w) * on_device
    limit: Number = np.maximum(OPTIMIZER_CAST_BYTES, table * per_param)
    # A fused GPU kernel casts in registers; a CPU casts in pieces.
    if w.uses_fused_kernels and w.fixed.kernels == "fused":
        limit = CPU_FUSED_CAST_BYTES * float(w.fixed.gpu.device == "cpu")
    return np.minimum(owned * per_param, limit * (per_param > 0))


def cast_bytes_per_param(w: Workload) -> Number:
    """Bytes of casts that the step of one parameter needs."""
    if not w.fixed.framework.model_states.casts_all_states:
        return _upcast_gradient(w)
    element = w.fixed.step_element_bytes
    return element * (w.gradient_element_bytes != element) + w.fixed.step_cast_bytes


def _upcast_gradient(w: Workload) -> Number:
    """Bytes of a gradient that is upcast for the step; without master weights it runs in 16 bits,
    and a precision-aware optimizer takes gradients as they are.
    """
    states = w.fixed.framework.model_states
    if states.is_precision_aware(w.fixed.precision, w.fixed.narrow_moments > 0):
        return 0.0
    return 4.0 * (w.gradient_element_bytes < 4) * (w.fixed.master_bytes > 0)


def _moment_bytes(w: Workload, p: ParamCounts) -> Number:
    """Bytes of moments upcast to fp32, those of one group of parameters at once: the experts are
    one, and what is dense another.
    """
    upcast = w.fixed.narrow_moments * w.fixed.framework.model_states.upcasts_moments
    return 4 * upcast * np.maximum(*owned_params(w, p))


def _rounded_master_bytes(w: Workload, p: ParamCounts) -> Number:
    """Bytes of master weights rounded to 16 bits on their way to 8-bit parameters with one scale
    (Transformer Engine pytorch/tensor/utils.py, cast_master_weights_to_fp8); those of MXFP8 go
    through the gradients' buffer (Megatron-core: reuse_grad_buf_for_mxfp8_param_ag).
    """
    if w.fixed.precision != "fp8" or not w.fixed.framework.model_states.fp8_parameters:
        return 0.0
    tables = p.dense + p.experts - params_outside_tables(w, p)
    shard = w.searched.shard if w.zero >= 1 else 1
    return np.maximum(0.0, sum(owned_params(w, p)) - tables / shard) * w.element_bytes
