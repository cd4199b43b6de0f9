"""What rules find, in the words of the plan's task section."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.errors import Problem
from workbench.plan.schema import Plan

_FIELD = re.compile(r"\btraining\.(?=[a-z])")


def in_words_of_task(problems: Iterable[Problem], plan: Plan) -> list[Problem]:
    """`problems`, which name the fields that every task has as those of `training`, by the section
    that the plan has.
    """
    name = f"{plan.task_section}."
    return [
        Problem(_FIELD.sub(name, found.field), _FIELD.sub(name, found.message))
        for found in problems
    ]
