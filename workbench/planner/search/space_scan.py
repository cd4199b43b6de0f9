"""The look through a space: every cell evaluated, held against the GPU and the conditions, the
best kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from workbench.costmodel.inputs.config import Array, FixedConfig, Number
from workbench.costmodel.memory.near_full import slowdown_table
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.plan_conditions import Condition
from workbench.planner.search.cell_evaluation import CellEvaluator, CellMemory, EvaluatedCell
from workbench.planner.search.cells import Cell, search_cells
from workbench.planner.search.constraints import RESULT_FIELDS, narrow_space
from workbench.planner.search.results.pareto_front import BestCandidates, Retries, expected_seconds
from workbench.planner.search.search_space import SearchSpace, plan_on_gpus
from workbench.planner.training_cost import watts_per_gpu
from workbench.units import GIB


@dataclass
class SearchStats:
    """What a search kept and counted."""

    best: BestCandidates
    candidates: int = 0
    feasible: int = 0
    least_peak_bytes: float = np.inf
    """Smallest peak of any legal plan, bytes, where none is feasible."""
    beyond_host: int = 0
    """Plans that GPUs would hold, and whose offloaded part no host does, where none is feasible."""


def scan_space(
    whole: SearchSpace, constraints: Sequence[Condition], objective: str, top: int
) -> SearchStats:
    """Evaluate every candidate that meets the conditions on knobs; keep those that fit and meet the
    others.
    """
    space = narrow_space(whole, constraints)
    most = whole.largest_peak_bytes
    retries = _retries(whole)
    seen = SearchStats(BestCandidates(top, most, retries))
    on_peak = [c for c in constraints if c.field == "peak_gib"]
    on_time = [c for c in constraints if c.field in RESULT_FIELDS and c not in on_peak]

    def fitting(held: CellMemory) -> NDArray[np.bool_]:
        fits = held.fitting(most)
        for c in on_peak:
            fits = fits & c.holds(held.peak / GIB)
        return fits

    evaluators = _evaluators_by_gpus(whole)
    for cell in search_cells(space):
        evaluator = evaluators[cell.fixed.world_size]
        held = _tiled_if_needed(space, evaluator, cell, fitting)
        fits = fitting(held)
        seen.candidates += held.count(held.legal)
        if not seen.feasible:  # else nobody asks
            least = float(np.where(held.legal, held.peak, np.inf).min())
            seen.least_peak_bytes = min(seen.least_peak_bytes, least)
            seen.beyond_host += held.count(held.legal & (held.peak <= most) & ~held.hosted)
        if not fits.any():
            seen.best.skip()
            continue
        held = held.with_fitting_splits(fits)
        fits = fitting(held)
        e = evaluator.times(held)
        for c in on_time:
            fits = fits & c.holds(_constrained_result(held.cell, e, c.field, retries))
        seen.feasible += held.count(fits)
        seen.best.take(held.cell, e, fits, partial(objective_score, cell.fixed, objective))
    return seen


def _tiled_if_needed(
    space: SearchSpace,
    evaluator: CellEvaluator,
    cell: Cell,
    fitting: Callable[[CellMemory], NDArray[np.bool_]],
) -> CellMemory:
    """What a cell's combinations hold; with tiles only those that do not fit with fewer of them."""
    held = evaluator.memory(cell, cell.grid())
    for fewer in space.tile_factor:
        if fewer < cell.fixed.tile_factor:
            less = evaluator.memory(cell.with_tiles(fewer), held.index)
            held = replace(held, legal=held.legal & ~fitting(less))
    return held


def _retries(space: SearchSpace) -> Retries:
    base = space.base
    k = with_calibration(base)[1]
    return slowdown_table(base.gpu.memory_gib * GIB, base.strategy.stack, k)


def _evaluators_by_gpus(space: SearchSpace) -> dict[int, CellEvaluator]:
    """By number of GPUs; a measured machine is slower the more of its ranks work at once, other
    GPUs are not.
    """
    base = space.base
    if base.cluster.calibration is None:
        return dict.fromkeys((s.world_size for s in space.fixed_configs), CellEvaluator.of(space))
    alone = (
        replace(space, base=plan_on_gpus(base, s), fixed_configs=(s,)) for s in space.fixed_configs
    )
    return {one.fixed_configs[0].world_size: CellEvaluator.of(one) for one in alone}


def _constrained_result(cell: Cell, e: EvaluatedCell, field: str, retries: Retries) -> Number:
    if field == "expected_seconds":
        return expected_seconds(e.seconds, e.peak, retries)
    tokens = cell.fixed.global_batch * cell.fixed.sequence_length
    return e.seconds if field == "seconds" else tokens / e.seconds


def objective_score(s: FixedConfig, objective: str, seconds: Array, compute: Array) -> Array:
    """What the objective ranks by, of steps of `seconds` in which the busiest rank computes for
    `compute`; less is better.
    """
    if objective == "time":
        return seconds
    if objective == "gpus":
        return s.world_size + seconds / (1e9 + seconds)
    if objective == "cost":
        return seconds * s.world_size
    idle, busy = (float(watts_per_gpu(s.gpu, share) or 1.0) for share in (0.0, 1.0))
    return s.world_size * (idle * seconds + (busy - idle) * np.minimum(compute, seconds))
