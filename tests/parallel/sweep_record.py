"""What a sweep found: details of every plan in a file outside git, a summary for the repository."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import workbench
from tests.source_digest import source_sha256

GROUP = ("algorithm", "schedule", "zero")
"""Dimensions whose joint values make a group of the summary."""
RESULTS = ("passed", "worst", "relative", "error", "seconds")
"""Keys of a row that are found; all others are the choice."""


def versions() -> dict[str, str]:
    """What the differences depend on: torch, and a digest of the package's source."""
    return {
        "torch": torch.__version__,
        "workbench": workbench.__version__,
        "source_sha256": source_sha256(Path(workbench.__file__).parent),
    }


class Details:
    """A JSON-lines file of what was verified: a line with the settings, then a line per plan.

    Lines are appended as results come, so that a sweep that was stopped goes on where it was. A
    line torn by the stop is dropped. A file of other settings (seed, versions) is set aside as
    `FILE.old`: its results say nothing about this sweep.

    Args:
        path: The file; None keeps the results in memory only.
        settings: What must be equal for results to be taken over.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if lines and lines[0] == json.dumps(settings):
            self.rows = [json.loads(line) for line in lines[1:]]
        elif path.exists():
            path.replace(path.with_name(f"{path.name}.old"))
        draft = path.with_name(f".{path.name}")
        draft.write_text("".join(f"{json.dumps(one)}\n" for one in (settings, *self.rows)))
        draft.replace(path)

    def add(self, row: dict[str, Any]) -> None:
        """Append one result."""
        line = json.dumps(row)
        self.rows.append(json.loads(line))
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{line}\n")


def verify_all(
    choices: Iterable[dict[str, Any]],
    verify_choice: Callable[[dict[str, Any]], dict[str, Any]],
    details: Details,
    jobs: int = 1,
) -> list[dict[str, Any]]:
    """The results of `choices`, in their order; those in `details` are not verified again.

    Args:
        choices: What to verify.
        verify_choice: Gives a row.
        details: Results so far, to which new ones are added.
        jobs: Processes that share the choices; with one, `verify_choice` may fork ranks.
    """
    done = {_choice_key(row): row for row in details.rows}
    choices = list(choices)
    left = [choice for choice in choices if _choice_key(choice) not in done]
    if jobs == 1:
        for choice in track(left):
            details.add(verify_choice(choice))
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            under_way = [pool.submit(verify_choice, choice) for choice in left]
            for one in track(as_completed(under_way), total=len(left)):
                details.add(one.result())
    done = {_choice_key(row): row for row in details.rows}
    return [done[_choice_key(choice)] for choice in choices]


def _choice_key(row: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if k not in RESULTS}, sort_keys=True)


def summary(head: dict[str, Any], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per group, and per value of each other dimension: number of plans, failures, worst error.

    Args:
        head: Source, versions, date and whatever else is said of the sweep.
        found: One row per plan: its choice and its results.

    Returns:
        `head` with `seconds`, `plans`, `failed`, `worst` (precision -> largest relative difference,
        null where a plan has none), `groups` and `values`.
    """
    joint = sorted({tuple(row[name] for name in GROUP) for row in found})
    groups = [
        dict(zip(GROUP, one))
        | _counts([row for row in found if tuple(row[name] for name in GROUP) == one])
        for one in joint
    ]
    others = [k for k in found[0] if k not in (*GROUP, *RESULTS, "precision")] if found else []
    seconds = {"seconds": round(sum(row.get("seconds", 0) for row in found))}
    values = {name: _values(found, name) for name in others}
    return {**head, **seconds, **_counts(found), "groups": groups, "values": values}


def _values(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    texts = sorted({_value_text(row[name]) for row in found})
    return {
        text: _counts([row for row in found if _value_text(row[name]) == text]) for text in texts
    }


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    precisions = sorted({row["precision"] for row in rows})
    return {
        "plans": len(rows),
        "failed": sum(not row["passed"] for row in rows),
        "worst": {p: _worst([row for row in rows if row["precision"] == p]) for p in precisions},
    }


def _worst(rows: Sequence[dict[str, Any]]) -> float | None:
    """Largest relative difference; None where a plan raised, or differs without bound."""
    largest = max(float(row.get("relative", math.inf)) for row in rows)
    return float(f"{largest:.3g}") if math.isfinite(largest) else None


def write_summary(path: Path, data: dict[str, Any]) -> None:
    """Write a summary, a line per group and per value; the file is the former one or the new one,
    never half.
    """
    head = {k: v for k, v in data.items() if k not in ("groups", "values")}
    groups = ",\n".join(f"  {json.dumps(one)}" for one in data["groups"])
    values = ",\n".join(
        f'  "{name}": {{\n'
        + ",\n".join(f"   {json.dumps(value)}: {json.dumps(one)}" for value, one in found.items())
        + "\n  }"
        for name, found in data["values"].items()
    )
    text = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(f'{{\n{text} "groups": [\n{groups}\n ],\n "values": {{\n{values}\n }}\n}}\n')
    draft.replace(path)
