"""How much the planner does, and how fast: `python -m tests.benchmarks.planner [--json]`.

Counts of one default and one wide search of 175 billion parameters on 512 GPUs, which are the same
on every machine; CPU seconds of each on one thread, the least of a few processes; and what plans
that are evaluated together cost beside estimating them one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from workbench.plan.schema import Plan

LARGE = {
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "gpus": 512},
    "training": {"global_batch": 1536, "sequence_length": 2048},
}
ROUNDS, BY_PLAN = 3, 20
MOST = {
    "default": {"calls": 650_000, "largest_peaks": 130, "step_time": 130, "_of_ranks": 0},
    "wide": {"calls": 1_550_000, "largest_peaks": 280, "step_time": 260, "_of_ranks": 0},
}
"""Ceilings of a search whose schedules were counted before: Python calls, and those of functions
that do the work of a cell, and of one that counts what the ranks of a schedule hold.
"""
MOST_MODULES = 850
"""Ceiling of the modules that a process has imported which has searched."""
SEARCHES = """
import json, sys, time
import workbench as wb
plan = wb.Plan.model_validate(json.loads(sys.argv[1]))
found = []
for batch in (1536, 1536, 3072):
    began = time.process_time()
    one = wb.search(plan.replace(**{"training.global_batch": batch}), space=sys.argv[2])
    found.append((one.candidates, time.process_time() - began))
print(json.dumps(found))
"""
COUNTS = """
import collections, json, sys
import workbench as wb
plan, space = wb.Plan.model_validate(json.loads(sys.argv[1])), sys.argv[2]
wb.search(plan, space=space)
calls = collections.Counter()
def count(frame, event, arg):
    if event == "call":
        calls[frame.f_code.co_name] += 1
sys.setprofile(count)
again = wb.search(plan, space=space)
sys.setprofile(None)
named = {name: calls[name] for name in sys.argv[3].split(",")} | {"calls": calls.total()}
print(json.dumps({"candidates": again.candidates, "feasible": again.feasible, **named,
                  "modules": len(sys.modules)}))
"""


def counts(space: str) -> dict[str, int]:
    """Counts of a second search in a process of its own: plans evaluated, those that fit, calls,
    modules imported.
    """
    found: dict[str, int] = _python(COUNTS, space, ",".join(MOST[space]))
    return found


def cpu_seconds(space: str) -> dict[str, float]:
    """CPU seconds of the first search of a process with caches on disk, of the same again, and of
    one with another batch.
    """
    runs = [_python(SEARCHES, space) for _ in range(1 + ROUNDS)][1:]  # the first fills the cache
    least = [min(seconds) for seconds in zip(*([one[1] for one in run] for run in runs))]
    return dict(zip(("first", "again", "another batch"), least))


def cpu_seconds_by_plan() -> float:
    """CPU seconds of a plan by itself, drawn from the best of a wide search."""
    from workbench.planner import estimate
    from workbench.planner.search import search

    found = search(Plan.model_validate(LARGE), space="wide", top=100).top
    some = random.Random(0).choices([one.plan for one in found], k=BY_PLAN)
    began = time.process_time()
    for plan in some:
        estimate(plan)
    return (time.process_time() - began) / BY_PLAN


def _python(code: str, *words: str) -> Any:
    command = [sys.executable, "-c", code, json.dumps(LARGE), *words]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure() -> dict[str, Any]:
    """Every figure."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        alone, found = cpu_seconds_by_plan(), {}
        for space in ("default", "wide"):
            own = counts(space)
            seconds = cpu_seconds(space)
            together = own["candidates"] / seconds["again"]
            found[space] = {**own, "cpu_seconds": seconds, "times_plan_by_plan": together * alone}
        return {"cpu_seconds_of_a_plan": alone, "searches": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    as_json = parser.parse_args().json
    found = measure()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"one plan by itself  {1e3 * found['cpu_seconds_of_a_plan']:.0f} CPU ms")
    for space, one in found["searches"].items():
        named = ", ".join(f"{one[name]:,} {name}" for name in MOST[space])
        print(
            f"{space:8} {one['candidates']:,} plans, {one['feasible']:,} fit; calls: {named}; "
            f"{one['modules']} modules"
        )
        seconds = ", ".join(f"{name} {each:.2f}" for name, each in one["cpu_seconds"].items())
        ratio = one["times_plan_by_plan"]
        print(f"         CPU s: {seconds}; {ratio:,.0f} plans in the time of one by itself")


if __name__ == "__main__":
    main()
