"""Rows that contradict themselves: the rate a row prints against the rate that its own shape, batch
and time imply.

r = FLOPs(shape, global batch) / (step time x GPUs x printed FLOP/s of a GPU). Pages count FLOPs
by different rules (attention causal or not, recomputation or not), so r is compared with the median
of the rows that were counted alike: same source, same kind of figure, dense models apart from
mixtures of experts, under whichever rule makes them agree best. A row alone contradicts itself
where it is faster than its GPU can be, or prints a time and tokens a second that do not belong
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import block_matrices, prediction_matrices
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.validation.row_to_plan import PlannedRow

MAX_DEVIATION = 0.12
"""A row further than this from its group's median is suspect."""
MAX_UTILISATION_DEVIATION = 0.3
"""The same for rows that print a utilisation alone, which pages count by peaks of their own (a head
in 16 bits beside layers in fp8).
"""
MIN_GROUP_ROWS = 3
"""Rows of a group below which nothing can be said."""
UTILISATION_ROUNDING = 0.0005
"""Half of the last digit of a printed utilisation: small ones are coarse, which is no
contradiction.
"""

VocabCounted = Literal["once", "twice", "held"]
"""How often tables of the vocabulary count: the head alone; head and embedding; what all stages
hold (tied weights twice in a pipeline).
"""
COUNTING_RULES: tuple[tuple[bool, VocabCounted], ...] = tuple(
    (causal, counted) for counted in ("once", "twice", "held") for causal in (False, True)
)
"""Ways of counting FLOPs: (attention causal, tables counted)."""


def model_flops_per_step(
    plan: ResolvedPlan, causal: bool = True, counted: VocabCounted = "once"
) -> float:
    """Model FLOPs of one step of a complete plan: 6 a weight and token, and attention's products
    (2104.04473).

    Low-rank adapters need no weight gradients of the base: 4 a weight and token.
    """
    shape, t = plan.shape, plan.training
    tokens = float(t.global_batch * t.sequence_length)
    widths = shape.q_width + (shape.heads * shape.mla.value_dim if shape.mla else shape.q_width)
    seen = shape.attended_keys(t.sequence_length)
    attended = (0.5 if causal else 1.0) * 2 * seen * widths * shape.layers
    passes = 2 if plan.lora else 3
    apart = not shape.tied or plan.strategy.pipeline.size > 1
    tables = 2 if counted == "twice" or (counted == "held" and apart) else 1
    return passes * tokens * (2 * weights_per_token(shape, tables) + attended)


def weights_per_token(shape: Shape, tables: int) -> float:
    """Weights that a token is multiplied with: blocks, and so many tables of the vocabulary."""
    dense = min(shape.moe.first_dense, shape.layers) if shape.moe else shape.layers
    blocks = dense * block_matrices(shape, 0)
    blocks += (shape.layers - dense) * block_matrices(shape, shape.layers - 1)
    return blocks + tables * shape.hidden * shape.vocab + prediction_matrices(shape)


def consistency_ratios(rows: Sequence[PlannedRow]) -> NDArray[np.float64]:
    """r over the median of the rows counted alike; NaN where nothing can be said."""
    found = np.full(len(rows), np.nan)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        experts = "mixture" if row.plan.shape.moe else "dense"
        if row.seconds and row.row.tflops:
            groups[row.row.source, row.row.tflops_kind, experts].append(index)
        elif row.seconds and row.row.utilisation:
            key = row.row.source, row.row.gpu, row.plan.strategy.precision, experts
            groups[key].append(index)
    for indices in groups.values():
        if len(indices) >= MIN_GROUP_ROWS:
            counted = [
                np.array([_implied_over_printed(rows[i], *rule) for i in indices])
                for rule in COUNTING_RULES
            ]
            scaled = [values / np.median(values) for values in counted]
            found[indices] = min(scaled, key=lambda values: float(np.median(np.abs(values - 1))))
    return found


def exceeds_its_gpu(row: PlannedRow) -> bool:
    """Whether the time that a row prints, or its rate, asks more of its GPU than any of its dtypes
    gives.
    """
    peak = 1e12 * max(row.plan.gpu.tflops.values())
    over = (row.row.tflops or 0) * 1e12 > peak or (row.row.utilisation or 0) > 1
    if over or not row.seconds:
        return over
    return model_flops_per_step(row.plan) > row.seconds * row.plan.world_size * peak


def contradicts_its_tokens(row: PlannedRow) -> bool:
    """Whether a row prints a step time and tokens a second that do not belong together."""
    if not (row.seconds and row.row.step_seconds and row.row.tokens_per_second):
        return False
    t = row.plan.training
    tokens = t.global_batch * t.sequence_length / row.seconds
    return abs(row.row.tokens_per_second / tokens - 1) > MAX_DEVIATION


def inconsistent(rows: Sequence[PlannedRow]) -> NDArray[np.bool_]:
    """Rows that fail a check; those of which nothing can be said pass."""
    alone = np.array([exceeds_its_gpu(row) or contradicts_its_tokens(row) for row in rows], bool)
    coarse = np.array(
        [UTILISATION_ROUNDING / row.row.utilisation if row.row.utilisation else 0.0 for row in rows]
    )
    allowed = np.array(
        [MAX_DEVIATION if row.row.tflops else MAX_UTILISATION_DEVIATION for row in rows]
    )
    beside = np.nan_to_num(np.abs(consistency_ratios(rows) - 1) - coarse) > allowed
    return np.asarray(alone | beside)


def _implied_over_printed(row: PlannedRow, causal: bool, counted: VocabCounted) -> float:
    hardware = "hardware" in row.row.tflops_kind.lower() and row.plan.strategy.recompute == "full"
    done = model_flops_per_step(row.plan, causal, counted) * (4 / 3 if hardware else 1)
    printed = 1e12 * row.row.tflops if row.row.tflops else row.row.utilisation or 1
    return done / ((row.seconds or 1) * row.plan.world_size * printed)
