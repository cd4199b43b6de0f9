"""One microbatch through every stage of each rank, whatever the model is given as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from workbench.costmodel.inputs.operator_stages import rank_stages, stages_of
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.stage_pass import StagePass, shared_stage_pass
from workbench.costmodel.traced.traced_pass import traced_pass


@lru_cache(maxsize=16)
def rank_passes(w: Workload, is_split: bool = False) -> tuple[tuple[StagePass, ...], ...]:
    """A microbatch through every stage of each of `w.places`, in the order of
    `operator_stages.rank_stages`.
    """
    found = {}
    sequences = np.broadcast_to(w.sequences, w.zeros.shape).tolist()
    kinds = [(place.stage, own) for place, own in zip(w.places, sequences)]
    for stage, own in dict.fromkeys(kinds):
        share = replace(w, sequences=own, tokens=own * tokens_of_a_sequence(w))
        found[stage, own] = tuple(_of_rank(share, stage, is_split))
    return tuple(found[kind] for kind in kinds)


def _of_rank(w: Workload, pipeline_rank: int, is_split: bool) -> Iterator[StagePass]:
    if w.fixed.traced is not None:
        for stage in stages_of(w.fixed, pipeline_rank):
            yield traced_pass(w, w.fixed.traced, stage)
        return
    assert w.fixed.operators is not None
    for parts in rank_stages(w.fixed, pipeline_rank):
        yield shared_stage_pass(w, w.fixed.operators, parts, is_split)


def tokens_of_a_sequence(w: Workload) -> int:
    """That a context rank has."""
    return int(np.max(w.tokens / w.sequences))
