"""What is wrong with a plan, said so that a person can mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong: the dotted field, and a message with its value, the numbers and what is legal."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class PlanError(ValueError):
    """A plan that cannot be accepted; `problems` lists everything found, not only the first."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        assert self.problems, "a PlanError names at least one problem"
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the plan:\n{lines}"


def refuse(field: str, message: str) -> PlanError:
    """A `PlanError` of one problem, to be raised."""
    return PlanError(Problem(field, message))
