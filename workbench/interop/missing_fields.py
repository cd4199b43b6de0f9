"""What a foreign file lacks and nobody gave, asked for all at once.

A reader stops at the first thing that it lacks. To find the others it is run again with something
in its place, whose only use is to get further: what is read with a stand-in is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.errors import PlanError, Problem, refuse
from workbench.interop.translation import Imported, ImportOptions, MissingField

MOST_READS = 16
"""Of one file: where nothing that could stand in lets the reader end, the ways to fill what is
lacking are many.
"""


def ask_for_missing(read: Callable[[ImportOptions], Imported], given: ImportOptions) -> Imported:
    """What `read` makes of `given`. Raises `PlanError` naming everything that is lacking, not only
    the first.
    """
    left = MOST_READS

    def again(given: ImportOptions) -> Imported:
        nonlocal left
        left -= 1
        if left < 0:
            raise refuse("", "read often enough")
        return read(given)

    try:
        return read(given)
    except MissingField as error:
        problems, _ = _lacks(again, given, error)
    fields = {problem.field for problem in problems}
    if given.gpu is None and "gpu" not in fields:
        problems = [*problems, ImportOptions.no_gpu()]
    raise PlanError(list({problem.field: problem for problem in problems}.values()))


def _lacks(
    read: Callable[[ImportOptions], Imported], given: ImportOptions, error: MissingField
) -> tuple[list[Problem], bool]:
    """(what is lacking from `error` on, whether the reader came to its end with some stand-in)."""
    best: tuple[list[Problem], bool] = ([], not error.stand_ins)
    for stand_in in error.stand_ins:
        found = _rest(read, _with(given, stand_in))
        if len(found[0]) > len(best[0]) or found[1]:
            best = found
        if best[1]:
            break
    return [*error.problems, *best[0]], best[1]


def _rest(
    read: Callable[[ImportOptions], Imported], given: ImportOptions
) -> tuple[list[Problem], bool]:
    try:
        read(given)
    except MissingField as error:
        return _lacks(read, given, error)
    except PlanError:
        return [], False  # the stand-in may be what is wrong: not for the user to know
    return [], True


def _with(given: ImportOptions, stand_in: Mapping[str, Any]) -> ImportOptions:
    """`given` with a stand-in: its own fields by name, fields of the plan by dotted path."""
    sets = {field: value for field, value in stand_in.items() if "." in field}
    own = {field: value for field, value in stand_in.items() if "." not in field}
    return replace(given, **own, sets={**given.sets, **sets})


def with_problems(error: PlanError, problems: Sequence[Problem]) -> PlanError:
    """`error` with other `problems`, still lacking what it lacked."""
    return (
        MissingField(problems, error.stand_ins)
        if isinstance(error, MissingField)
        else PlanError(problems)
    )
