"""A check: a named function that makes assertions, each of which is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]
"""A check's outcome as JSON: part, check, status, seconds, assertions, not_evaluated, figures."""


@dataclass
class Evidence:
    """What a check is given, and where it leaves its assertions and figures.

    In a dry run everything is on CPU tensors, with sizes scaled down; assertions that need a GPU
    are listed with the reason instead of being evaluated.
    """

    dry: bool
    gpus: int
    folder: Path
    """For files of the check; removed with everything that runs in it."""
    assertions: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    unmade: dict[str, str] = field(default_factory=dict)
    """Names of assertions that may not be evaluated here -> the reason."""

    @property
    def device(self) -> torch.device:
        """Of the check's tensors."""
        return torch.device("cpu" if self.dry else "cuda")

    def expect(self, name: str, holds: object, **figures: Any) -> None:
        """Assert, and go on: a failed assertion fails the check and keeps the figures of all.

        Args:
            name: Unique in the check.
            holds: What must be true.
            **figures: Plain values that tell why.
        """
        assert name not in {known["name"] for known in self.assertions}, f"{name} is asserted twice"
        self.assertions.append({"name": name, "passed": bool(holds), **figures})

    def on_gpu(self, reason: str, *names: str) -> bool:
        """Whether assertions that need a GPU can be evaluated now; their names are listed if not.

        Args:
            reason: What a CPU lacks.
            *names: The assertions that the caller evaluates where the answer is True.
        """
        self.left_out(reason, *names)
        return not self.dry

    def left_out(self, reason: str, *names: str) -> None:
        """List assertions that are not evaluated here, unless they are made after all."""
        self.unmade |= dict.fromkeys(names, reason)

    def measured(self, name: str, value: Any) -> None:
        """Keep a figure of no assertion."""
        self.figures[name] = value

    def result(self, part: str, check: str, seconds: float, error: str = "") -> Result:
        """The check's outcome; an assertion that was announced but never made counts as not
        evaluated.
        """
        made = {known["name"] for known in self.assertions}
        failed = bool(error) or not all(known["passed"] for known in self.assertions)
        return {
            "part": part,
            "check": check,
            "status": "failed" if failed else "passed",
            "seconds": round(seconds, 2),
            "assertions": self.assertions,
            "not_evaluated": [
                {"name": name, "reason": reason}
                for name, reason in self.unmade.items()
                if name not in made
            ],
            "figures": self.figures,
            "error": error,
        }


@dataclass(frozen=True)
class Check:
    """One check of a part.

    Attributes:
        name: Unique in its part.
        run: Makes the assertions.
        seconds: Deadline on a GPU machine; a dry run has the same.
    """

    name: str
    run: Callable[[Evidence], None]
    seconds: float


def unmet(part: str, check: str, status: str, error: str, seconds: float = 0.0) -> Result:
    """The outcome of a check that gave none: it crashed, hung, or was not reached."""
    return {
        "part": part,
        "check": check,
        "status": status,
        "seconds": round(seconds, 2),
        "assertions": [],
        "not_evaluated": [],
        "figures": {},
        "error": error,
    }


def relative_gap(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry of the truth; infinite for NaN."""
    gap = float((found.double().cpu() - truth.double().cpu()).abs().max())
    scale = float(truth.double().abs().max().clamp(min=1e-30))
    return gap / scale if gap == gap else float("inf")
