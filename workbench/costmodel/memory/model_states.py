"""Parameters of each pipeline rank, and the bytes of parameters, gradients and optimizer
(1910.02054 for ZeRO).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Array
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
    """Parameters, gradients and optimizer as ZeRO's stage shards them.

    Gradients stay whole where ZeRO-2 or 3 reduces them only once a step of several microbatches.
    """
    whole, shards = p.trained, sharded_params(w, p)
    if w.fixed.adapter_rank:
        shards = whole / w.searched.shard
    optimizer = shards if w.zero >= 1 else whole
    gradients = whole
    if w.zero >= 2:
        gradients = np.where(w.reduce_microbatch > 0, shards, whole)
    widened = w.fixed.framework.upcast_gradients * (w.fixed.precision == "fp16")
    return ModelStates(
        parameters=(sharded_params(w, p) if w.zero == 3 else p.total) * w.fixed.parameter_bytes,
        gradients=gradients * w.stored_gradient_bytes
        + whole * w.fixed.gradient_accumulator_bytes
        + optimizer * widened,
        optimizer=optimizer * w.fixed.moment_bytes,
        master=optimizer * w.fixed.master_bytes,
    )


def sharded_params(w: Workload, p: ParamCounts) -> Array:
    """Parameters of one rank after sharding over data x context; experts over what expert ranks
    leave of it.
    """
    shard, expert = w.searched.shard, w.searched.expert
    return np.asarray((p.dense + p.adapters) / shard + p.experts / np.maximum(1.0, shard / expert))
