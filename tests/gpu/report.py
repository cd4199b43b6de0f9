"""The one JSON document of a run of the checks, and its summary in words."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.checks import Result
from tests.gpu.supervise import Setting
from tests.source_digest import source_sha256

FORMAT = 1
PACKAGES = ("torch", "triton", "accelerate", "numpy", "pydantic", "safetensors", "nvidia-ml-py")
SETTLED = ("passed", "failed")
ROOT = Path(__file__).parents[2]
SOURCE = source_sha256(ROOT / "workbench", ROOT / "tests" / "gpu")
SAME = ("format", "dry", "device", "gpus", "versions", "source_sha256")
"""What a former run's outcomes depend on."""


@dataclass
class Report:
    """Outcomes so far, written to `path` after each, so that an interrupted run is a valid one."""

    path: Path
    setting: Setting
    device: str
    budget: float
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, result: Result) -> None:
        """Take an outcome, and write the document."""
        self.results[result["part"], result["check"]] = result
        self.write()

    def write(self) -> None:
        """Write the document, replacing the former at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(self.document(), indent=1, default=str) + "\n")
        os.replace(draft, self.path)

    def document(self) -> dict[str, Any]:
        """The document: where and when, counts, every outcome with its figures."""
        return {
            "format": FORMAT,
            "date": self.date,
            "device": self.device,
            "dry": self.setting.dry,
            "gpus": self.setting.gpus,
            "versions": _versions(),
            "source_sha256": SOURCE,
            "budget_seconds": self.budget,
            "seconds": round(sum(result["seconds"] for result in self.results.values()), 1),
            "counts": self.counts(),
            "checks": list(self.results.values()),
        }

    def counts(self) -> dict[str, Any]:
        """Checks by status, assertions evaluated and not, and the share evaluated."""
        results = self.results.values()
        by_status = Counter(result["status"] for result in results)
        evaluated = sum(len(result["assertions"]) for result in results)
        missing = sum(len(result["not_evaluated"]) for result in results)
        return {
            "passed": by_status["passed"],
            "failed": by_status["failed"],
            "not_reached": by_status["not reached"],
            "assertions_evaluated": evaluated,
            "assertions_failed": sum(
                not made["passed"] for result in results for made in result["assertions"]
            ),
            "assertions_not_evaluated": missing,
            "evaluated_share": round(evaluated / max(1, evaluated + missing), 3),
        }

    def resume(self, path: Path) -> None:
        """Take the outcomes of a former run that passed; everything else runs again.

        Raises:
            ValueError: The former run was elsewhere, so that its outcomes say nothing here.
        """
        former, here = json.loads(path.read_text()), self.document()
        if not isinstance(former, dict) or not isinstance(former.get("checks"), list):
            raise ValueError(f"{path} is no document of these checks")
        for name in SAME:
            if (own := here[name]) != former.get(name):
                raise ValueError(
                    f"{path}: its {name} is {former.get(name)!r}, here it is {own!r}; legal: the "
                    "document of a run of this source on the same device"
                )
        for result in former["checks"]:
            if result["status"] == "passed":
                self.results[result["part"], result["check"]] = result


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def line(result: Result) -> str:
    """An outcome in a line, and below it what failed."""
    part = result["part"].rpartition(".")[2]
    made, missing = len(result["assertions"]), len(result["not_evaluated"])
    counts = f"{made} assertions" + (f", {missing} not evaluated" if missing else "")
    text = (
        f"{result['status']:<12} {result['seconds']:6.1f} s  {part}: {result['check']} ({counts})"
    )
    failed = [str(known) for known in result["assertions"] if not known["passed"]]
    error = [result["error"].strip()] if result["error"] else []
    return "\n    ".join([text, *failed, *error])


def summary(report: Report) -> str:
    """Counts, and what was not evaluated or not reached, by name."""
    counts = report.counts()
    lines = [
        f"{counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not_reached']} not reached",
        f"{counts['assertions_evaluated']} assertions evaluated, "
        f"{counts['assertions_not_evaluated']} not ({counts['evaluated_share']:.0%} evaluated)",
    ]
    reasons: dict[str, list[str]] = {}
    for result in report.results.values():
        part = result["part"].rpartition(".")[2]
        for missing in result["not_evaluated"]:
            place = f"{part}: {result['check']}: {missing['name']}"
            reasons.setdefault(missing["reason"], []).append(place)
    for reason, names in reasons.items():
        lines += [f"not evaluated, {reason}:", *(f"    {name}" for name in names)]
    return "\n".join([*lines, f"written to {report.path}"])
