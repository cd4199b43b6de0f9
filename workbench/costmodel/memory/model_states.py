"""Model states: bytes of parameters, gradients and optimizer states under ZeRO (1910.02054).

With mixed precision and Adam, 2 + 2 + 12 bytes per parameter; ZeRO-1 shards the optimizer states,
ZeRO-2 the gradients too, ZeRO-3 the parameters too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array, FixedConfig, Number
from workbench.costmodel.inputs.rank_parameters import ParamCounts
from workbench.costmodel.inputs.rank_workload import Workload


@dataclass(frozen=True)
class ModelStates:
    """Bytes that persist from step to step, by pipeline rank."""

    parameters: Array
    gradients: Array
    optimizer: Array
    master: Array


def model_states(w: Workload, p: ParamCounts) -> ModelStates:
    """Bytes of parameters, gradients, optimizer states and master weights on each pipeline rank.

    Args:
        w: Per-rank problem sizes.
        p: Parameters of each rank before sharding.

    Returns:
        Bytes by pipeline rank. Gradients stay unsharded under ZeRO-2 and 3 where they are reduced
        once per step of several microbatches.
    """
    # Buckets hold parameters and gradients, and between them padding, which has no moments.
    packed, optimizer = w.packed_counts, stepped_params(w)
    whole = packed.trained
    gradients = whole
    if w.zero >= 2:
        sharded = np.asarray(sum(owned_params(w, packed)))
        gradients = np.where(w.reduce_microbatch > 0, sharded, whole)
    widened = w.fixed.framework.model_states.upcast_gradient_bytes(w.fixed.precision)
    return ModelStates(
        parameters=_stored_bytes(w, packed) + _fp8_weight_bytes(w, p),
        gradients=gradients * w.stored_gradient_bytes
        + whole * w.fixed.gradient_accumulator_bytes
        + optimizer * widened,
        optimizer=optimizer * w.fixed.moment_bytes,
        master=optimizer * w.fixed.master_bytes,
    )


def _stored_bytes(w: Workload, packed: ParamCounts) -> Array:
    """Bytes of parameters: what is trained as the framework stores it, a frozen base as it was
    loaded, in the plan's precision or packed in 4 bits (QLoRA, 2305.14314), whatever trains it.
    """
    every, trained = packed.total, packed.trained
    if w.zero == 3:
        every, trained = sharded_params(w, packed), np.asarray(sum(owned_params(w, packed)))
    stored = trained * (w.fixed.parameter_bytes - w.element_bytes)
    return np.asarray(every * w.element_bytes + stored)


def _fp8_weight_bytes(w: Workload, p: ParamCounts) -> Number:
    """Bytes that weights of fp8 GEMMs, those of layers, take beside the stored parameters, or in
    place of them: in every order that the GEMMs need.
    """
    if w.quantized_format is None:
        return 0.0
    held = w.quantized_format.orders(w.fixed.gpu) * w.quantized_format.element_bytes
    stored = w.element_bytes if p.frozen else w.fixed.parameter_bytes
    each = w.fixed.framework.model_states.fp8_weight_bytes(stored, held, w.fixed.precision)
    return params_outside_tables(w, p) * each


def params_outside_tables(w: Workload, p: ParamCounts) -> Number:
    """Parameters of a rank's layers, whose GEMMs run in fp8: all but embedding, head and
    adapters.
    """
    shared = w.has_embedding * w.has_head * float(w.shape.tied)
    return p.dense + p.experts - w.table_params * (w.has_embedding + w.has_head - shared)


def unsharded_state_bytes(s: FixedConfig, gradient_bytes: float) -> float:
    """Bytes of a parameter, its gradient and its optimizer state on a rank that shards nothing.

    Args:
        s: What the plan and its framework profile keep.
        gradient_bytes: Bytes of a gradient as it is reduced.
    """
    stored = gradient_bytes if s.gradient_bytes is None else s.gradient_bytes
    gradients = stored + s.gradient_accumulator_bytes
    gradients += s.framework.model_states.upcast_gradient_bytes(s.precision)
    return s.parameter_bytes + gradients + s.moment_bytes + s.master_bytes


def sharded_params(w: Workload, p: ParamCounts) -> Array:
    """Parameters of one rank after ZeRO shards them over data x context ranks."""
    experts = (p.experts + p.expert_adapters) / _expert_shard(w)
    return np.asarray((p.dense + p.adapters) / w.searched.shard + experts)


def owned_params(w: Workload, p: ParamCounts) -> tuple[Array, Array]:
    """(dense parameters or adapters, those of experts) whose optimizer states a rank holds."""
    dense, experts = p.trained_dense, p.trained_experts
    if w.zero == 0:
        return dense, experts
    return np.asarray(dense / w.searched.shard), np.asarray(experts / _expert_shard(w))


def stepped_params(w: Workload) -> Array:
    """Parameters whose optimizer states a rank holds: of one plan, what lies in its shards."""
    if w.in_buckets is not None:
        return w.in_buckets.stepped
    return np.asarray(sum(owned_params(w, w.param_counts)))


def _expert_shard(w: Workload) -> Number:
    """Ranks over which ZeRO shards an expert: those that hold the same experts."""
    return np.maximum(1.0, w.searched.shard * w.experts_over_tensor / w.searched.expert)
