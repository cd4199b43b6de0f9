"""Conditions on candidates, as people write them: `strategy.tensor.size<=8`, `peak_gib<70`, `gpus
in 64,128`.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import refuse
from workbench.planner.search.search_space import SearchSpace
from workbench.safe_io import yaml_files

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

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
BOUND_OPERATORS = ("<=", ">=", "<", ">")
"""Operators that only numbers have."""
MAX_LENGTH = 1000
"""Characters of a condition: a list of a hundred values fits."""
CONDITION_PATTERN = re.compile(r"\s*([a-z_.0-9]+)\s*(<=|>=|==|!=|<|>|=|\bin\b)\s*(.+?)\s*")


@dataclass(frozen=True)
class Constraint:
    """One condition."""

    text: str
    field: str
    operator: str
    value: Any

    def holds(self, value: Any) -> Any:
        """Whether `value` (or each of an array) meets the condition."""
        if self.operator == "in":
            return value in self.value
        return OPERATORS[self.operator](value, self.value)


def parse_constraint(text: str) -> Constraint:
    """Read a condition. Raises `PlanError` naming it and what would be legal."""
    if len(text) > MAX_LENGTH:
        raise refuse(
            "--where", f"'{text[:40]}...' has {len(text)} characters; legal: at most {MAX_LENGTH}"
        )
    match = CONDITION_PATTERN.fullmatch(text)
    if match is None:
        raise refuse(
            "--where",
            f"'{text}' is no condition; legal: FIELD OP VALUE with OP one of <= >= == != < > in, "
            "e.g. strategy.tensor.size<=8",
        )
    field, sign, written = match.groups()
    known = (*KNOB_FIELDS, *PIPELINE_FIELDS, *GPU_FIELDS, *RESULT_FIELDS)
    if field not in known:
        raise refuse(
            "--where",
            f"'{field}' is not searched; legal: {', '.join(known)}; set other fields with --set",
        )
    value = yaml_files.parse(f"[{written}]" if sign == "in" else written, where=field)
    if (
        sign == "in" and len(value) == 1 and isinstance(value[0], list)
    ):  # the list was written with its brackets
        value = value[0]
    if field in RESULT_FIELDS and sign == "in":
        raise refuse(
            "--where",
            f"'{text}' lists values of what is estimated; legal: a bound, e.g. {field}<=2",
        )
    if (sign in BOUND_OPERATORS or field in RESULT_FIELDS) and not _is_finite_number(value):
        raise refuse("--where", f"'{text}' compares with {value!r}; {sign} takes a finite number")
    return Constraint(text, field, sign, value)


def _is_finite_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return (
        -sys.float_info.max <= value <= sys.float_info.max
    )  # an int of any size compares, but is no float


def searched_values(space: SearchSpace, c: Constraint) -> tuple[Any, ...]:
    """The values that the space has of what a condition is on; none for what is estimated."""
    if knob := KNOB_FIELDS.get(c.field):
        return tuple(getattr(space, knob))
    if c.field in PIPELINE_FIELDS:
        return tuple(dict.fromkeys(one[PIPELINE_FIELDS[c.field]] for one in space.schedules))
    return tuple(one.world_size for one in space.fixed_configs) if c.field in GPU_FIELDS else ()


def check_bounds(space: SearchSpace, constraints: Iterable[Constraint]) -> None:
    """Refuses a bound on a field that is a word wherever it is searched. Raises `PlanError`."""
    for c in constraints:
        values = searched_values(space, c)
        if values and c.operator in BOUND_OPERATORS and not any(map(_is_finite_number, values)):
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


def narrow_space(space: SearchSpace, constraints: Iterable[Constraint]) -> SearchSpace:
    """The space with only those values of its knobs that meet the conditions on them."""
    for c in constraints:
        if knob := KNOB_FIELDS.get(c.field):
            kept: Any = {knob: tuple(v for v in getattr(space, knob) if _value_meets(c, v))}
            space = replace(space, **kept)
        elif c.field in PIPELINE_FIELDS:
            place = PIPELINE_FIELDS[c.field]
            space = replace(
                space, schedules=tuple(s for s in space.schedules if _value_meets(c, s[place]))
            )
        elif c.field in GPU_FIELDS:
            space = replace(
                space, fixed_configs=tuple(s for s in space.fixed_configs if c.holds(s.world_size))
            )
    return space


def _value_meets(c: Constraint, value: Any) -> bool:
    plain = list(value) if isinstance(value, tuple) else value
    try:
        return bool(c.holds(plain))
    except TypeError:  # a word beside a number: `shard <= 8` says nothing about `all`
        return False
