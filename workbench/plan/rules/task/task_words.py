"""What rules find, in the words of the plan's task section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from workbench.errors import PlanError, Problem
from workbench.plan.schema import Plan

_FIELD = re.compile(r"\btraining\.(?=[a-z])")


def in_words_of_task(problems: Iterable[Problem], plan: Plan) -> list[Problem]:
    """`problems`, which name the fields that every task has as those of `training`, by the section
    that the plan has.
    """
    return [
        Problem(words_of_task(found.field, plan), words_of_task(found.message, plan))
        for found in problems
    ]


def words_of_task(text: str, plan: Plan) -> str:
    """`text`, which names fields of `training`, by the section that the plan has."""
    return _FIELD.sub(f"{plan.task_section}.", text)


@contextmanager
def naming_task(plan: Plan) -> Iterator[None]:
    """A context whose errors name fields of the task by the section that the plan has."""
    try:
        yield
    except PlanError as error:
        raise PlanError(in_words_of_task(error.problems, plan)) from None
    except ValueError as error:
        raise ValueError(words_of_task(str(error), plan)) from None
