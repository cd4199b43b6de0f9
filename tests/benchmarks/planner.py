"""How fast the planner is: `python tests/benchmarks/planner.py [--json]`, on one thread.

Kinds of evaluation take turns, round by round, so that what else the machine does falls on all
alike; the least time of each is printed, and every rate over that of estimating plan by plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.explain.plan_figures import plan_figures
from workbench.planner.search import search
from workbench.planner.search.cell_evaluation import CellEvaluator
from workbench.planner.search.cells import Cell, search_cells
from workbench.planner.search.search_space import candidate_plan, search_space

ROUNDS = 5
RANDOM, BY_PLAN, EQUAL = 4_000_000, 20, 1_000
IMPORT = (
    "import time; t = time.perf_counter(); import workbench.planner.search; "
    "print(time.perf_counter() - t)"
)
WHOLE = """
import time; t = time.perf_counter()
import json, re, sys
import workbench as wb
found = wb.search(wb.Plan.model_validate(json.loads(sys.argv[1])), space="wide")
used = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(json.dumps([found.candidates, time.perf_counter() - t, used]))
"""
LARGE = {
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "gpus": 512},
    "training": {"global_batch": 1536, "sequence_length": 2048},
}


Drawn = list[tuple[Cell, "np.ndarray[Any, Any]"]]


def drawn(found: list[Cell], evaluator: CellEvaluator, count: int, draw: random.Random) -> Drawn:
    """The numbers of `count` legal candidates at random, those of a cell together."""
    share = count // len(found)
    result = []
    for cell in found:
        e = evaluator(cell, cell.grid())
        legal = np.flatnonzero(np.broadcast_to(e.legal, e.shape))
        result.append((cell, legal[np.array(draw.choices(range(len(legal)), k=share))]))
    return result


def evaluated(evaluator: CellEvaluator, some: Drawn) -> int:
    """Step time and peak of each: what they share is computed once on its grid, and read at each
    one's place.
    """
    count = 0
    for cell, numbers in some:
        e = evaluator(cell, cell.grid())
        seconds, peak = e.at(e.seconds, numbers), e.at(e.peak, numbers)
        assert len(seconds) == len(peak)
        count += len(seconds)
    return count


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the wall."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure() -> dict[str, Any]:
    """Every figure; rates are distinct legal plans a second."""
    plan, draw = Plan.model_validate(LARGE), random.Random(0)
    space = search_space(plan, "wide")
    evaluator, found = CellEvaluator.of(space), list(search_cells(space))
    flat = drawn(found, evaluator, RANDOM, draw)
    some = [
        candidate_plan(space, c.choice(_legal(evaluator, c, draw))).resolve()
        for c in draw.choices(found, k=BY_PLAN)
    ]
    kinds: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
        "enumerated, whole search": (
            lambda: search(plan, space="vast"),
            lambda result: result.candidates,
        ),
        "random candidates": (lambda: evaluated(evaluator, flat), lambda count: count),
        "plan by plan": (lambda: [plan_figures(one) for one in some], lambda _: len(some)),
    }
    least: dict[str, float] = {}
    counts = {name: count(work()) for name, (work, count) in kinds.items()}
    for _ in range(ROUNDS):
        for name, (work, _count) in kinds.items():
            least[name] = min(least.get(name, np.inf), timed(work))
    rates = {name: counts[name] / least[name] for name in kinds}
    return {
        "rate_per_second": rates,
        "ratio": {name: rate / rates["plan by plan"] for name, rate in rates.items()},
        "candidates": counts,
        "replan_ms": 1e3
        * min(timed(partial(plan_figures, one)) for one in some for _ in range(ROUNDS)),
        "import_s": min(float(_python(IMPORT)) for _ in range(ROUNDS)),
        "whole_process": _whole(),
        "largest_difference_from_estimate": _difference(evaluator, found, draw),
    }


def _legal(evaluator: CellEvaluator, cell: Cell, draw: random.Random) -> int:
    e = evaluator(cell, cell.grid())
    return int(draw.choice(np.flatnonzero(np.broadcast_to(e.legal, e.shape)).tolist()))


def _whole() -> dict[str, float]:
    """The 175-billion space of seven million plans in a process of its own, start-up included."""
    runs = [json.loads(_python(WHOLE, json.dumps(LARGE))) for _ in range(ROUNDS)]
    return {
        "candidates": runs[0][0],
        "seconds": min(run[1] for run in runs),
        "peak_mb": max(run[2] for run in runs),
    }


def _python(code: str, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    ).stdout


def _difference(evaluator: CellEvaluator, found: list[Cell], draw: random.Random) -> float:
    """Of step time between the search and `estimate`, relative, over random candidates."""
    space, worst = search_space(Plan.model_validate(LARGE), "wide"), 0.0
    for cell in draw.choices(found, k=EQUAL):
        number = _legal(evaluator, cell, draw)
        e = evaluator(cell, cell.grid())
        at = float(e.at(e.seconds, np.array([number]))[0])
        whole = float(estimate(candidate_plan(space, cell.choice(number))).step_seconds or 0.0)
        worst = max(worst, abs(whole / at - 1))
    return worst


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
        return
    for name, rate in found["rate_per_second"].items():
        print(f"{name:26} {rate:14,.0f} plans/s   {found['ratio'][name]:10,.0f} x plan by plan")
    whole = found["whole_process"]
    print(
        f"one re-plan                {found['replan_ms']:.1f} ms;  import {found['import_s']:.2f} s"
    )
    size = f"{whole['candidates']:,} plans"
    print(
        f"175B on 512 cards          {size} in {whole['seconds']:.2f} s, {whole['peak_mb']:.0f} MB"
    )
    print(
        f"search against estimate    {found['largest_difference_from_estimate']:.1e} of the step "
        f"time at most"
    )


if __name__ == "__main__":
    main()
