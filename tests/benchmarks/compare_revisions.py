"""Whether two checkouts estimate the same: `python -m tests.benchmarks.compare_revisions BEFORE
AFTER [--rows FILE ...]`.

Both estimate the same plans, drawn by a seed over the models, GPUs and strategies that both know,
and validate the same published measurements. Bytes and counts must be equal, seconds within 1e-12
relative. Each checkout runs in processes of its own with that checkout first on the path; only
public names and the shell are used, so that the two may differ in everything else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RELATIVE = 1e-12
FRAMES = ("memory", "timeline", "collectives", "steps")


def draw(seed: int, plans: int, names: dict[str, list[str]]) -> None:
    """Print one JSON object a line until `plans` are legal: the plan's fields, and its frames or
    why it is refused. `names` are the models, gpus and strategies to draw from.
    """
    import workbench as wb

    rng, legal = random.Random(seed), 0
    while legal < plans:
        words = {
            "model": rng.choice(names["models"]),
            "gpu": rng.choice(names["gpus"]),
            "gpus": 2 ** rng.randrange(11),
            "strategy": rng.choice(names["strategies"]),
        }
        changes = {
            "training.micro_batch": rng.choice((1, 2, 4)),
            "training.global_batch": rng.choice((64, 512, 2048)),
            "strategy.recompute": rng.choice(("none", "selective", "full")),
            "strategy.kernels": rng.choice(("eager", "compiled", "fused")),
        }
        answer: dict[str, Any] = {"plan": words | changes}
        try:
            profile = wb.estimate(wb.Plan.of(**words, set=changes))
            answer["frames"] = {name: getattr(profile, name).to_dict("list") for name in FRAMES}
            answer["summary"] = profile.summary()
            legal += 1
        except wb.PlanError as error:
            answer["refused"] = sorted(problem.field for problem in error.problems)
        print(json.dumps(answer))


def catalog(checkout: Path) -> dict[str, list[str]]:
    """Names of the catalog by the shell's own list, which every revision has; `local` apart."""
    found = {}
    for kind in ("models", "gpus", "strategies"):
        command = [sys.executable, "-m", "workbench", kind, "--json"]
        text = subprocess.check_output(command, text=True, env=environment(checkout), cwd=checkout)
        found[kind] = [row["name"] for row in json.loads(text) if row["name"] != "local"]
    return found


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Every place where two values of JSON differ: floats by more than `RELATIVE`, all else at
    all.
    """
    if isinstance(before, float) and isinstance(after, int | float):
        both_nan = math.isnan(before) and math.isnan(after)
        if not both_nan and not math.isclose(before, after, rel_tol=RELATIVE, abs_tol=0.0):
            yield f"{where}: {before!r} -> {after!r}"
    elif type(before) is not type(after):
        yield f"{where}: {before!r} -> {after!r}"
    elif isinstance(before, dict):
        for key in sorted(set(before) | set(after)):
            yield from differences(before.get(key), after.get(key), f"{where}.{key}")
    elif isinstance(before, list):
        if len(before) != len(after):
            yield f"{where}: {len(before)} -> {len(after)} entries"
        for place, (a, b) in enumerate(zip(before, after, strict=False)):
            yield from differences(a, b, f"{where}[{place}]")
    elif before != after:
        yield f"{where}: {before!r} -> {after!r}"


def answers(checkout: Path, seed: int, plans: int, names: dict[str, list[str]]) -> list[Any]:
    """What `draw` prints when `checkout` is the package imported."""
    output = subprocess.check_output(
        [sys.executable, __file__, "--draw", str(seed), str(plans), json.dumps(names)],
        text=True,
        env=environment(checkout),
        cwd=checkout,
    )
    return [json.loads(line) for line in output.splitlines()]


def validation(checkout: Path, rows: list[str]) -> Any:
    """What `workbench validate --json` of `checkout` says of `rows`."""
    command = [sys.executable, "-m", "workbench", "validate", *rows, "--json"]
    return json.loads(
        subprocess.check_output(command, text=True, env=environment(checkout), cwd=checkout)
    )


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", default=[], help="CSV files of published measurements")
    asked = parser.parse_args()
    pair = [asked.before.resolve(), asked.after.resolve()]
    first, second = map(catalog, pair)
    names = {kind: [one for one in first[kind] if one in second[kind]] for kind in first}
    before, after = (answers(checkout, asked.seed, asked.plans, names) for checkout in pair)
    found = list(differences(before, after, "plans"))
    legal = sum("frames" in answer for answer in before)
    print(f"{legal} plans estimated, {len(before) - legal} refused: {len(found)} differences")
    if asked.rows:
        rows = [str(Path(row).resolve()) for row in asked.rows]
        moved = list(differences(*(validation(checkout, rows) for checkout in pair), "validate"))
        print(f"validate on {len(rows)} files: {len(moved)} differences")
        found += moved
    print("\n".join(found[:50]))
    return bool(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        draw(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        sys.exit(main())
