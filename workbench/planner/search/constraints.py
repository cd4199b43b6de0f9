"""Conditions on candidates, as people write them: `strategy.tensor.size<=8`, `peak_gib<70`, `gpus
in 64,128`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from workbench.errors import refuse
from workbench.planner.plan_conditions import (
    BOUND_OPERATORS,
    Condition,
    is_finite_number,
    parse_condition,
)
from workbench.planner.search.search_space import SearchSpace

KNOB_FIELDS = {
    "strategy.tensor.size": "tensor",
    "strategy.tensor.algorithm": "algorithm",
    "strategy.tensor.sequence": "sequence",
    "strategy.kernels": "kernels",
    "strategy.context.size": "context",
    "strategy.expert.size": "expert",
    "strategy.data.zero": "zero",
    "strategy.data.shard": "shard",
    "strategy.data.offload": "offload",
    "strategy.data.reduce": "reduce",
    "strategy.data.overlap": "overlap",
    "strategy.data.keep_gathered": "keep_gathered",
    "strategy.data.bucket_mib": "bucket_mib",
    "strategy.data.tile_factor": "tile_factor",
    "strategy.gradient_dtype": "gradient",
    "strategy.recompute": "recompute",
    "strategy.placement": "placement",
    "training.micro_batch": "micro_batch",
}
"""Fields of a plan that a search varies -> the knob of the space."""
PIPELINE_FIELDS = {
    "strategy.pipeline.schedule": 0,
    "strategy.pipeline.chunks": 1,
    "strategy.pipeline.size": 2,
}
"""Fields of a schedule -> its place in the space's triples."""
RESULT_FIELDS = ("seconds", "expected_seconds", "tokens_per_second", "peak_gib")
"""What a condition on the result may name."""
GPU_FIELDS = ("gpus", "cluster.gpus")


def parse_constraint(text: str) -> Condition:
    """Read a condition on what is searched or estimated. Raises `PlanError` naming it and what
    would be legal.
    """
    c = parse_condition(text, (*KNOB_FIELDS, *PIPELINE_FIELDS, *GPU_FIELDS, *RESULT_FIELDS))
    if c.field in RESULT_FIELDS and c.operator == "in":
        raise refuse(
            "--where",
            f"'{text}' lists values of what is estimated; legal: a bound, e.g. {c.field}<=2",
        )
    if c.field in RESULT_FIELDS and not is_finite_number(c.value):
        raise refuse(
            "--where", f"'{text}' compares with {c.value!r}; {c.operator} takes a finite number"
        )
    return c


def searched_values(space: SearchSpace, c: Condition) -> tuple[Any, ...]:
    """The values that the space has of what a condition is on; none for what is estimated."""
    if knob := KNOB_FIELDS.get(c.field):
        return tuple(getattr(space, knob))
    if c.field in PIPELINE_FIELDS:
        return tuple(dict.fromkeys(one[PIPELINE_FIELDS[c.field]] for one in space.schedules))
    return tuple(one.world_size for one in space.fixed_configs) if c.field in GPU_FIELDS else ()


def check_bounds(space: SearchSpace, constraints: Iterable[Condition]) -> None:
    """Refuses a bound on a field that is a word wherever it is searched. Raises `PlanError`."""
    for c in constraints:
        values = searched_values(space, c)
        if values and c.operator in BOUND_OPERATORS and not any(map(is_finite_number, values)):
            legal_values = ", ".join(condition_words(values))
            raise refuse(
                "--where",
                f"'{c.text}' bounds what is no number here; legal: {c.field}=VALUE, of "
                f"{legal_values}",
            )


def condition_words(values: Iterable[Any]) -> Iterable[str]:
    """Values as people write them in a condition."""
    for value in values:
        yield (
            str(value).lower()
            if isinstance(value, bool)
            else str(list(value) if isinstance(value, tuple) else value)
        )


def narrow_space(space: SearchSpace, constraints: Iterable[Condition]) -> SearchSpace:
    """The space with only those values of its knobs that meet the conditions on them."""
    for c in constraints:
        if knob := KNOB_FIELDS.get(c.field):
            kept: Any = {knob: tuple(v for v in getattr(space, knob) if c.holds_for(v))}
            space = replace(space, **kept)
        elif c.field in PIPELINE_FIELDS:
            place = PIPELINE_FIELDS[c.field]
            space = replace(
                space, schedules=tuple(s for s in space.schedules if c.holds_for(s[place]))
            )
        elif c.field in GPU_FIELDS:
            space = replace(
                space, fixed_configs=tuple(s for s in space.fixed_configs if c.holds(s.world_size))
            )
    return space
