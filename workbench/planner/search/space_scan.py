"""The look through a space: every cell evaluated, held against the card and the conditions, the
best kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.costmodel.inputs.config import Array, Number
from workbench.planner.search.cell_evaluation import Evaluated, Evaluator
from workbench.planner.search.cells import Cell, cells
from workbench.planner.search.constraints import RESULTS, Constraint, narrowed
from workbench.planner.search.pareto_front import Best
from workbench.planner.search.search_space import Space, on_cards
from workbench.planner.training_cost import watts_per_card

GIB = 2**30


@dataclass
class Seen:
    """What a search kept and counted."""

    best: Best
    candidates: int = 0
    feasible: int = 0
    least: float = np.inf
    """Smallest peak of any legal plan, bytes."""


def look(whole: Space, constraints: Sequence[Constraint], objective: str, top: int) -> Seen:
    """Evaluate every candidate that meets the conditions on knobs; keep those that fit and meet the
    others.
    """
    space = narrowed(whole, constraints)
    capacity = whole.settings[0].gpu.memory_gib * GIB
    seen = Seen(Best(top, capacity))
    conditions = [c for c in constraints if c.field in RESULTS]
    evaluators = _evaluators(whole)
    for cell in cells(space):
        e = evaluators[cell.setting.world_size](cell, cell.grid())
        fits = e.legal & (e.peak <= capacity)
        for c in conditions:
            fits = fits & c.holds(_result(cell, e, c.field))
        seen.candidates += e.count(e.legal)
        seen.feasible += e.count(fits)
        seen.least = min(seen.least, float(np.where(e.legal, e.peak, np.inf).min()))
        seen.best.take(cell, e, fits, _score(cell, e, objective))
    return seen


def _evaluators(space: Space) -> dict[int, Evaluator]:
    """By number of cards; a measured machine is slower the more of its ranks work at once, other
    cards are not.
    """
    base = space.base
    if base.cluster.calibration is None:
        return dict.fromkeys((s.world_size for s in space.settings), Evaluator.of(space))
    alone = (replace(space, base=on_cards(base, s), settings=(s,)) for s in space.settings)
    return {one.settings[0].world_size: Evaluator.of(one) for one in alone}


def _result(cell: Cell, e: Evaluated, field: str) -> Number:
    if field == "peak_gib":
        return e.peak / GIB
    tokens = cell.setting.global_batch * cell.setting.sequence_length
    return e.seconds if field == "seconds" else tokens / e.seconds


def _score(cell: Cell, e: Evaluated, objective: str) -> Array:
    s = cell.setting
    if objective == "time":
        return e.seconds
    if objective == "gpus":
        return s.world_size + e.seconds / (1e9 + e.seconds)
    if objective == "cost":
        return e.seconds * s.world_size
    idle, busy = (float(watts_per_card(s.gpu, share) or 1.0) for share in (0.0, 1.0))
    return s.world_size * (idle * e.seconds + (busy - idle) * np.minimum(e.compute, e.seconds))
