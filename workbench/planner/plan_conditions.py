"""Conditions on fields, as people write them: `strategy.tensor.size<=8`, `gpus in 64,128`."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from workbench.errors import refuse
from workbench.safe_io import yaml_files

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
USUAL_RISK = 0.05
"""Largest probability of running out of memory of what is said to fit, where none is asked."""
BOUND_OPERATORS = ("<=", ">=", "<", ">")
"""Operators that only numbers have."""
MAX_LENGTH = 1000
"""Characters of a condition: a list of a hundred values fits."""
CONDITION_PATTERN = re.compile(r"\s*([a-z_.0-9]+)\s*(<=|>=|==|!=|<|>|=|\bin\b)\s*(.+?)\s*")


def check_risk(risk: float) -> None:
    """Refuse what is no probability. Raises `PlanError`."""
    if not 0 < risk < 1:
        raise refuse("--risk", f"is {risk:g}; legal: a probability above 0 and below 1, e.g. 0.05")


@dataclass(frozen=True)
class Condition:
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

    def holds_for(self, value: Any) -> bool:
        """Whether one value meets it, a word beside a number never: `shard<=8` says nothing about
        `all`.
        """
        try:
            return bool(self.holds(list(value) if isinstance(value, tuple) else value))
        except TypeError:
            return False


def parse_condition(text: str, known: Collection[str]) -> Condition:
    """Read a condition on one of the fields `known`. Raises `PlanError` naming it and what would be
    legal.
    """
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
    if sign in BOUND_OPERATORS and not is_finite_number(value):
        raise refuse("--where", f"'{text}' compares with {value!r}; {sign} takes a finite number")
    return Condition(text, field, sign, value)


def is_finite_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return (
        -sys.float_info.max <= value <= sys.float_info.max
    )  # an int of any size compares, but is no float
