"""What is said of every published row before anything is fitted: its site, its group and its flags.

All three follow from the row itself, never from what the planner predicts for it or from how well a
prediction does. `python -m workbench.planner.validation.row_judgement FILES` writes
`data/validation/judgement.csv`.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from workbench import data_files
from workbench.planner.validation import gpu_names
from workbench.planner.validation.measured_rows import MeasuredRow, read_measured_rows
from workbench.planner.validation.row_consistency import inconsistent
from workbench.planner.validation.row_shapes import (
    Inexpressible,
    is_layout_inferred,
    is_shape_inferred,
)
from workbench.planner.validation.row_to_plan import PlannedRow, row_to_plan

JUDGEMENT_FILE = "data/validation/judgement.csv"
SITES_FILE = "data/validation/sites.yaml"
COLUMNS = ("id", "site", "group", "flags")
_INFERRED = re.compile(
    r"\b(?:layers|heads|hidden|shape|layout|grad_accum\S*|batch|seq)\b[^;)]{0,24}"
    r"\b(?:inferred|derived|assumed|not stated)\b|inferred from|\bunpacked\b"
    # A model that only another page names.
    r"|\bper the [^;()]{0,40}\bit cites \(not stated\b"
)
_POWER_LIMITED = re.compile(r"\b(?:power.?limited|throttl\w*|[1-6]\d\dw)\b")
_NOISY = re.compile(r"\bnois|not proportional|unreliable")
POWER_LIMITED_GPUS = frozenset({"h100-sxm-96gb"})
"""Catalog names of parts sold with less power than the GPU that they are named for."""
UNFIT_FLAGS = frozenset({"contradiction", "inferred", "noisy"})
"""Flags of rows whose readings of memory say nothing certain; a power limit slows clocks and leaves
memory as it is.
"""
_MISLABELLED = re.compile(r"mislabel|mixed up|inconsistent|duplicate config")


@dataclass(frozen=True)
class RowJudgement:
    """What one row is taken for."""

    site: str
    """organisation/cluster/GPU; empty where no site of `SITES_FILE` is the row's."""
    group: str
    """Rows whose plans are ranked against each other: the same page, model, GPUs and batch."""
    flags: tuple[str, ...]
    """contradiction, inferred, noisy, power_limited; a clean row has none."""


def judge_row(row: MeasuredRow, contradicts: bool) -> RowJudgement:
    """Site, group and flags of one row.

    Args:
        row: The row.
        contradicts: Whether its printed rate contradicts its printed time (`row_consistency`).
    """
    entry = _site_entry(row.source)
    found = gpu_names.find_gpu(row.gpu, row.gpu_memory)
    gpu = found.name if found else "unknown"
    site = f"{entry['site']}/{gpu}" if entry else ""
    page = entry["page"] if entry else row.file
    group = f"{page} {row.model} x{row.gpus or ''} b{row.batch or ''}"
    flags = row_flags(row, gpu, contradicts)
    return RowJudgement(site, " ".join(group.split()), flags)


def row_flags(row: MeasuredRow, gpu: str, contradicts: bool) -> tuple[str, ...]:
    """Why a row is not clean: empty for a clean one."""
    notes = f"{row.notes} ; {row.table} ; {row.kind}".lower()
    found = {
        "contradiction": contradicts or bool(_MISLABELLED.search(notes)),
        "inferred": bool(_INFERRED.search(f"{notes} ; {row.verification.lower()}"))
        or _is_recalled(row.model, row.verification)
        or is_shape_inferred(row)
        or is_layout_inferred(row),
        "noisy": bool(_NOISY.search(notes)),
        "power_limited": gpu in POWER_LIMITED_GPUS
        or bool(_POWER_LIMITED.search(f"{row.gpu} ; {notes}".lower())),
    }
    return tuple(name for name, holds in found.items() if holds)


def _is_recalled(model: str, verification: str) -> bool:
    """Whether the shape of `model` is one that the reader of its page recalled."""
    found = re.search(r"\(([^()]*)shapes? recalled\)|(\w+)[^();]*\(recalled\)", verification)
    if found is None:
        return False
    names = re.split(r"[/,\s]+", (found.group(1) or found.group(2)).lower())
    plain = re.sub(r"[^a-z0-9]", "", model.lower())
    return any(
        plain.startswith(name) or name in plain
        for name in (re.sub(r"[^a-z0-9]", "", one) for one in names)
        if len(name) > 1
    )


def judge_rows(rows: Sequence[MeasuredRow]) -> list[RowJudgement]:
    """Site, group and flags of every row; contradictions are found among rows counted alike."""
    planned: dict[int, PlannedRow] = {}
    for index, row in enumerate(rows):
        try:
            planned[index] = row_to_plan(row)
        except Inexpressible:
            continue
    contradicts = np.zeros(len(rows), dtype=bool)
    contradicts[list(planned)] = inconsistent(list(planned.values()))
    return [judge_row(row, bool(bad)) for row, bad in zip(rows, contradicts)]


@lru_cache(maxsize=1)
def published_judgements() -> Mapping[str, RowJudgement]:
    """Judgements of the committed file, by the row's id; empty where the file is missing."""
    path = data_files.assets() / JUDGEMENT_FILE
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {
            line["id"]: RowJudgement(
                line["site"], line["group"], tuple(filter(None, line["flags"].split(" ")))
            )
            for line in csv.DictReader(file)
        }


def contradicts_memory(source: str) -> bool:
    """Whether the readings of memory of a page contradict themselves, as `SITES_FILE` says."""
    entry = _site_entry(source)
    return bool(entry and entry.get("memory"))


@lru_cache(maxsize=4096)
def _site_entry(source: str) -> Mapping[str, str] | None:
    table: list[dict[str, str]] = data_files.read_data_file(SITES_FILE)
    return next((one for one in table if one["source"] in source), None)


def write_judgements(rows: Sequence[MeasuredRow], path: Path) -> None:
    """Write `JUDGEMENT_FILE`'s content for `rows` to `path`. Raises `OSError`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row, one in zip(rows, judge_rows(rows)):
            table.writerow((row.label, one.site, one.group, " ".join(one.flags)))


def main() -> None:
    """Write the judgement of every row of the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of measured steps")
    parser.add_argument("-o", "--output", type=Path, default=data_files.assets() / JUDGEMENT_FILE)
    arguments = parser.parse_args()
    rows = [row for file in arguments.files for row in read_measured_rows(file)]
    write_judgements(rows, arguments.output)
    print(f"{len(rows)} rows judged: {arguments.output}")


if __name__ == "__main__":
    main()
