"""Errors that a person can act on: each names the field, its value and what is legal."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.untrusted_text import brief

SHOWN = 20
"""Problems that one message lists; `problems` holds all."""
MOST_FIELD = 200
"""Characters of a field's name that one message shows: a key of a file may have any length."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong: the dotted field, and a message with its value, the numbers and what is
    legal.
    """

    field: str
    message: str

    def __str__(self) -> str:
        message = brief(self.message)
        return f"{brief(self.field, MOST_FIELD)}: {message}" if self.field else message


class _Sentence(Exception):
    """An error that a notebook's cell shows as its sentence: the lines of this project that raised
    it say nothing to who can act on it.
    """

    _is_shown = False

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows: the sentence, and when it is asked again (`%tb`) all of it."""
        if self._is_shown:
            return "".join(traceback.format_exception(self)).splitlines()
        self._is_shown = True
        return [f"{type(self).__name__}: {self}", "(%tb shows where it was raised)"]


class PlanError(_Sentence, ValueError):
    """A plan that cannot be accepted; `problems` lists everything found, not only the first."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        assert self.problems, "a PlanError names at least one problem"
        super().__init__(str(self))

    @property
    def first(self) -> str:
        """The first problem, and how many more there are: for a message that says them of something
        else.
        """
        more = len(self.problems) - 1
        return f"{self.problems[0]}{f' (and {more} more)' if more else ''}"

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"  {problem}" for problem in self.problems[:SHOWN]]
        lines += [f"  and {len(self.problems) - SHOWN} more"] if len(self.problems) > SHOWN else []
        return "\n".join([f"{len(self.problems)} problems in the plan:", *lines])


class ChildError(_Sentence, RuntimeError):
    """A child process failed; the message holds its last lines."""


class RunError(_Sentence, RuntimeError):
    """A run failed; the message holds its cause."""


def refuse(field: str, message: str) -> PlanError:
    """A `PlanError` of one problem, to be raised."""
    return PlanError(Problem(field, message))


def unknown_name(field_name: str, name: str, known: Iterable[str]) -> PlanError:
    """The error for a name that the catalog does not have: names that begin with it or are close
    to it first, else all of them.
    """
    known, folded = list(known), name.casefold()
    close = [one for one in known if folded and one.startswith(folded)][:6]
    close = close or difflib.get_close_matches(folded, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else ""
    return refuse(field_name, f"'{name}' is not known; {hint or 'legal: ' + ', '.join(known)}")
