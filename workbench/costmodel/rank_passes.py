"""One microbatch through every stage of each rank, whatever the model is given as."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from workbench.costmodel.inputs.operator_stages import rank_stages, stages_of
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.stage_pass import StagePass, stage_pass
from workbench.costmodel.traced.traced_pass import traced_pass


@lru_cache(maxsize=16)
def rank_passes(w: Workload, is_split: bool = False) -> tuple[tuple[StagePass, ...], ...]:
    """A microbatch through every stage of each of `w.places`, in their order.

    Args:
        w: Per-rank problem sizes.
        is_split: Whether weight gradients (W) are computed apart from backward (I).
    """
    sequences = np.broadcast_to(w.sequences, w.zeros.shape).tolist()
    kinds = [(place.stage, own) for place, own in zip(w.places, sequences)]
    found = {kind: tuple(_of_rank(w, *kind, is_split)) for kind in dict.fromkeys(kinds)}
    return tuple(found[kind] for kind in kinds)


def tokens_of_a_sequence(w: Workload) -> int:
    """That a context rank has."""
    return int(np.max(w.tokens / w.sequences))


def _of_rank(w: Workload, pipeline_rank: int, sequences: float, is_split: bool) -> list[StagePass]:
    share = replace(w, sequences=sequences, tokens=sequences * tokens_of_a_sequence(w))
    if w.fixed.traced is not None:
        own = stages_of(w.fixed, pipeline_rank)
        return [traced_pass(share, w.fixed.traced, stage) for stage in own]
    named = w.fixed.operators
    assert named is not None
    return [
        stage_pass(share, named, parts, is_split) for parts in rank_stages(w.fixed, pipeline_rank)
    ]
