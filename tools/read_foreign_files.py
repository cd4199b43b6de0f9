"""Counts of what becomes of public configurations of other software: read, asked for what is
missing, refused by the right name, refused for another reason, or taken for another format.

`python tools/read_foreign_files.py FOLDER` reads the files of `foreign_files.csv` that lie in
FOLDER as `repository/path`. Their text is third parties' and stays out of the repository.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import yaml

from workbench import interop
from workbench.errors import PlanError

HERE = Path(__file__).parent
FORMATS = yaml.safe_load((HERE.parent / "data/foreign/formats.yaml").read_text(encoding="utf-8"))
ANSWERS = {"model": "llama-3-8b", "gpu": "h200-sxm-141gb", "vocab_size": 32000}
"""What is given where a file asks for it."""
WORLDS = (8, 64, 1, 16, 128, 256, 512, 1024, 96, 384)
"""Numbers of GPUs that are given where a file asks for it: the first of which makes a plan."""
_VOCABULARY = dict.fromkeys(("padded_vocab_size", "--vocab-size"), "vocab_size")
OUTCOMES = ("read", "asked", "right name", "other reason", "other format")
NAMES = [re.split(r"[,(]| or ", entry["title"])[0].split()[-1] for entry in FORMATS.values()]
ASKS = re.compile(r"does not say|or decide it with|; give ")
"""A refusal that says what is to be given."""


def attempt(path: Path, lenient: bool) -> interop.Imported | PlanError:
    """The plan of a file, given what it asks for; else why there is none."""
    first: PlanError | None = None
    for world in WORLDS:
        answers, given = {**ANSWERS, "gpus": world}, dict[str, object]()
        for _ in range(len(answers) + 1):
            try:
                return interop.load(path, lenient=lenient, **given)
            except PlanError as error:
                refusal = error
            fields = {_VOCABULARY.get(p.field, p.field) for p in refusal.problems}
            asked = fields & answers.keys() - given.keys()
            if not asked:
                break
            given |= {field: answers[field] for field in asked}
        first = first or refusal
        if "gpus" not in given:
            break
    assert first is not None
    return first


def outcome(kind: str, path: Path) -> tuple[str, str]:
    """(what becomes of a file, why it is not read)."""
    source = kind.partition("/")[0]
    found = attempt(path, lenient=False)
    if not isinstance(found, PlanError):
        return ("read", "") if found.format == source else ("other format", found.format)
    problem = found.problems[0]
    named = re.match(r"is (.*?); not read", problem.message, re.DOTALL)
    if problem.field == "file" and named:
        title = FORMATS.get(source, {}).get("title", source)
        own = re.split(r"[,(]| or ", title)[0].split()[-1]
        what = "other format" if any(name in named[1] for name in NAMES) else "other reason"
        return ("right name" if own in named[1] else what), named[1][:150]
    reason = f"{problem.field}: {problem.message}"[:150]
    try:
        if (taken := interop.detect(path.read_text(encoding="utf-8"))) != source:
            return "other format", f"{taken}: {reason}"
    except PlanError:
        pass
    return ("asked" if ASKS.search(problem.message) else "other reason"), reason


def main(folder: Path) -> None:
    """Print the counts of each kind, and why its files are not read."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    with (HERE / "foreign_files.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            kind, path = line["kind"], folder / line["repository"] / line["path"]
            if not path.is_file():
                rows[kind]["absent"] += 1
                continue
            what, why = outcome(kind, path)
            rows[kind][what] += 1
            rows[kind]["plans leniently"] += not isinstance(attempt(path, True), PlanError)
            reasons[kind].update([f"{what}: {why}"] if why else [])
    columns = (*OUTCOMES, "plans leniently", "absent")
    print("kind".ljust(22), *(name.rjust(15) for name in columns))
    for kind, counts in rows.items():
        print(kind.ljust(22), *(str(counts[name]).rjust(15) for name in columns))
    for kind, found in reasons.items():
        for reason, times in found.most_common(15):
            print(f"{kind}: {times} x {reason}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
