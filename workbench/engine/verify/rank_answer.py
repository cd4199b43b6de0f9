"""What a launched rank leaves in the verification's folder: its answer, or how it failed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import PlanError, Problem

ANSWERS, PRECISION = "answers", "precision"
"""The folder of answers, and the file that names the precision."""
FAILED = ".failed"


class Failure(NamedTuple):
    """How a rank failed; `refused` are the problems of a plan that it cannot run here."""

    time: float
    rank: int
    message: str
    refused: list[Problem]


def write_answer(folder: Path, rank: int, answer: dict[str, Any]) -> None:
    """Leave a rank's answer, whole or not at all."""
    _replace(folder / ANSWERS / f"{rank:05d}.json", answer)


def write_failure(folder: Path, rank: int, error: BaseException, message: str) -> None:
    """Leave how a rank failed, and when: those that fail later may do so because it is gone."""
    problems = error.problems if isinstance(error, PlanError) else []
    refused = [(problem.field, problem.message) for problem in problems]
    body = {"time": time.time(), "rank": rank, "message": message, "refused": refused}
    _replace(folder / ANSWERS / f"{rank:05d}{FAILED}", body)


def read_answers(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Every rank's answer, in order of rank."""
    files = [folder / ANSWERS / f"{rank:05d}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) for file in files]


def read_failure(folder: Path) -> Failure | None:
    """The first failure; None where no rank has failed."""
    found = [json.loads(file.read_text()) for file in (folder / ANSWERS).glob(f"*{FAILED}")]
    if not found:
        return None
    first = min(found, key=lambda body: float(body["time"]))
    refused = [Problem(*problem) for problem in first["refused"]]
    return Failure(first["time"], first["rank"], first["message"], refused)


def _replace(path: Path, body: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(body))
    os.replace(draft, path)
