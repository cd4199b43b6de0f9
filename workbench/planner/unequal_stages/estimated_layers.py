"""The layer profile of a model's shape as the cost model estimates it, at one tensor-parallel size
and kind of recomputation.

Each block is priced as a pipeline stage of its own, so that what the ends of a pipeline hold beside
their blocks (embedding, head, loss) is on the first and the last: a stage without a block does not
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.inputs.config import Array, fixed_config, searched_config
from workbench.costmodel.inputs.rank_workload import Workload, assemble_workload
from workbench.costmodel.memory.live_sets.live_by_phase import live_by_phase
from workbench.costmodel.memory.live_sets.stage_phases import total_bytes
from workbench.costmodel.memory.model_states import ModelStates, model_states
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.microbatch_durations import stage_passes
from workbench.costmodel.rates.constants import Constants
from workbench.plan.model.layer_profile import Layer, LayerProfile
from workbench.plan.rank_placement import RankPlace, axis_strides
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import AXES
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.unequal_stages.stage_times import Batch

LEAST_BLOCKS = 4
"""From which on two blocks stand between those at the ends of the pipeline."""
DATA = 2
"""Data-parallel ranks beside the stages, so that a rank has their communicator."""


@dataclass(frozen=True)
class BlockSplit:
    """How the ranks of one replica share a block."""

    tensor: int = 1
    sequence: bool = False
    recompute: str = "none"
    zero: int = 1
    """ZeRO-1 shards optimizer states over the replicas of a stage; 0 does not."""


@dataclass(frozen=True)
class EstimatedLayers:
    """Layers of one rank of a replica, and what that rank needs beside them."""

    profile: LayerProfile
    batch: Batch
    """Of one microbatch; its factors say what of the profile a rank keeps."""
    temporary: float
    """Bytes that a stage needs at its peak beside its state and what it keeps for backward."""
    fixed: float
    """Bytes outside torch's allocator, and workspaces."""
    fragmentation: float
    """Share of what is allocated that is reserved beside it."""

    def memory(self, largest_peak: float) -> float:
        """Bytes for state and activations of a rank whose peak may be `largest_peak`."""
        return (largest_peak - self.fixed) / (1 + self.fragmentation) - self.temporary

    def of(self, microbatches: int, sequences: int) -> Batch:
        """A step of so many microbatches of so many sequences."""
        return replace(self.batch, microbatches=microbatches, sequences=sequences)


def seconds_at_once(base: ResolvedPlan, split: BlockSplit, sequences: int) -> float:
    """Forward and backward of all blocks, by one replica that runs `sequences` at once; the other
    arguments as of `estimated_layers`.
    """
    full, constants = with_calibration(base)
    return float(sum(one.sum() for one in _passes(full, split, sequences, constants)))


def estimated_layers(base: ResolvedPlan, split: BlockSplit, sequences: int) -> EstimatedLayers:
    """The layers of the model of `base` on one rank of a replica.

    Args:
        base: A complete plan without parallelism but data parallelism: the model, the GPU and its
            calibration, precision, kernels, optimizer and sequence length.
        split: Of a block over the ranks of a replica.
        sequences: That a replica runs at once; `Batch.passes` says how long others take.
    """
    full, constants = with_calibration(base)
    w = _workload(full, split, sequences, (1,) * full.shape.layers)
    passes = _passes(full, split, sequences, constants)
    states, held, peak = model_states(w, w.param_counts), _kept(w), peak_memory(w, constants)
    state = states.parameters + states.gradients + states.optimizer + states.master
    beside = peak.live - state - w.microbatches_in_flight * held
    # The last stage has one microbatch in flight: what its loss needs is as good as kept.
    common = float(max(0.0, beside[:-1].max(initial=0.0)))
    held[-1] += max(0.0, float(beside[-1]) - common)
    return EstimatedLayers(
        LayerProfile(full.shape.name, sequences, _layers(w, passes, states, held)),
        _one_microbatch(w, states, sequences),
        common,
        float((peak.peak - (1 + constants.fragmentation) * peak.live).max()),
        constants.fragmentation,
    )


def _passes(
    full: ResolvedPlan, split: BlockSplit, sequences: int, constants: Constants
) -> list[Array]:
    """Seconds of (forward, backward) by block, without what a stage takes however long it is."""
    blocks = full.shape.layers
    alone = stage_passes(_workload(full, split, sequences, (1,) * blocks), constants)
    if blocks < LEAST_BLOCKS:
        return list(alone)
    two = stage_passes(_workload(full, split, sequences, (*(1,) * (blocks - 3), 2, 1)), constants)
    return [one - (2 * one[-2] - both[-2]) for one, both in zip(alone, two)]


def _workload(
    full: ResolvedPlan, split: BlockSplit, sequences: int, partition: tuple[int, ...]
) -> Workload:
    """A rank of each stage of a pipeline."""
    setting, chosen = fixed_config(full), searched_config(full, [0])
    stages = len(partition)
    fixed = replace(
        setting,
        world_size=DATA * split.tensor * stages,
        global_batch=DATA * 2 * stages * sequences,
        pipeline=stages,
        partition=partition,
        zero=split.zero,
    )
    sizes: dict[str, float] = {"tensor": split.tensor, "context": 1, "data": DATA}
    knobs = replace(
        chosen,
        tensor=split.tensor,
        grid=(split.tensor, 1),
        micro_batch=sequences,
        sequence=float(split.sequence),
        shard=1,
        selective=float(split.recompute == "selective"),
        recomputed_layers=np.array(partition, dtype=float) * (split.recompute == "full"),
        layers_after_recomputed=np.zeros(stages),
        strides=axis_strides(AXES, sizes | {"pipeline": stages}),
    )
    return assemble_workload(fixed, knobs, [RankPlace(stage) for stage in range(stages)])


def _kept(w: Workload) -> Array:
    """Bytes that each stage keeps of one microbatch from forward to backward."""
    kept = live_by_phase(w)["first_forward"]
    return np.array(np.broadcast_to(total_bytes(kept), w.layers.shape))


def _layers(
    w: Workload, passes: Sequence[Array], states: ModelStates, kept: Array
) -> tuple[Layer, ...]:
    forward, backward = passes
    crosses = float(np.max(w.residual_bytes))
    return tuple(
        Layer(
            node=f"block {i}",
            name=f"block {i}",
            forward_s=float(forward[i]),
            backward_s=float(backward[i]),
            activation_bytes=crosses,
            parameter_bytes=float(states.parameters[i]),
            inputs=(f"block {i - 1}",) if i else (),
            kept_bytes=float(kept[i]),
        )
        for i in range(len(kept))
    )


def _one_microbatch(w: Workload, states: ModelStates, sequences: int) -> Batch:
    """One microbatch, with the bytes of a rank for each byte of parameters."""
    optimizer, gradients, reduced = (
        float(np.sum(each) / states.parameters.sum())
        for each in (
            states.optimizer + states.master,
            states.gradients,
            w.param_counts.trained * w.gradient_element_bytes,
        )
    )
    return Batch(
        1,
        sequences,
        optimizer_factor=1 + gradients + (0.0 if w.zero else optimizer),
        gradient_factor=reduced,
        sharded_factor=optimizer if w.zero else 0.0,
    )
