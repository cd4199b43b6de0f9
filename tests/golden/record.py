"""Record answers: `python -m tests.golden.record [NAME...]`, names as `estimate/tiny-ddp`, or
`estimate`; none: all.

What is recorded is a promise to scripts. Record again only what a repair or a feature means to
change, and say so.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden.cases import HERE, REFUSED, REPOSITORY, RUN, Case, cases

RECORDED = HERE / "recorded"
REFUSALS = RECORDED / "refused.json"
SCHEMA = RECORDED / "schema.json"
ROOT = "ROOT"
TIMED = ("seconds", "rate_per_second")
"""Keys that say how long the answer took."""


def answered(words: Sequence[str], root: Path) -> tuple[int, Any]:
    """(exit code, JSON answer or null) of a command line run in this process, paths below `root`
    made neutral.
    """
    from workbench.cli import answer

    out = io.StringIO()
    with (
        contextlib.chdir(REPOSITORY),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code = answer([word.replace(ROOT, str(root)) for word in (*words, "--json")])
    text = out.getvalue().replace(str(root), ROOT).replace(str(REPOSITORY), "REPOSITORY")
    return code, json.loads(text) if text.strip() else None


def prepared(root: Path) -> None:
    """Put the recorded run where the cases look for it: reading and resuming may write into a run
    directory.
    """
    shutil.copytree(HERE / "run_directory" / RUN, root / "runs" / RUN)


def outcome(words: Sequence[str], root: Path) -> dict[str, Any]:
    """What is recorded of a command line: its exit code, and its answer or, where it is refused,
    the fields named.
    """
    code, found = answered(words, root)
    if code != 0:
        return {
            "exit_code": code,
            "answer": [problem["field"] for problem in (found or {}).get("problems", [])],
        }
    if isinstance(found, dict):
        found = {key: value for key, value in found.items() if key not in TIMED}
    return {"exit_code": code, "answer": found}


def schema() -> dict[str, Any]:
    """The JSON schema of a plan without its prose, which may be reworded."""
    from workbench.plan.schema import Plan

    found: dict[str, Any] = _bare(Plan.model_json_schema())
    return found


def _bare(node: Any, named: bool = False) -> Any:
    if isinstance(node, dict):
        return {
            key: _bare(value, key in ("properties", "$defs"))
            for key, value in node.items()
            if named or key not in ("description", "title")
        }
    return [_bare(one) for one in node] if isinstance(node, list) else node


def path_of(case: Case) -> Path:
    """The file that holds the recorded answer of a case."""
    return RECORDED / f"{case.name}.json"


def write(path: Path, data: Any) -> None:
    """Write what is recorded, readable in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(names: Sequence[str]) -> None:
    """Record the cases named, or all."""
    wanted = [
        case for case in cases() if not names or {case.name, case.name.split("/")[0]} & set(names)
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        prepared(root)
        for case in wanted:
            write(path_of(case), outcome(case.words, root))
            print(case.name)
        if not names or "refused" in names:
            write(REFUSALS, [{"words": list(words), **outcome(words, root)} for words in REFUSED])
        if not names or "schema" in names:
            write(SCHEMA, schema())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
