"""How near a calibrated estimate comes on this machine: `python -m tests.benchmarks.calibrated
--seed N [--calibration FILE] [--results FILE]`.

One calibration; plans over all axes, kernels and recomputation, drawn by the seed; the median of 30
steps of each, which take turns, in three passes. The noise floor is what the passes differ by: the
median over plans of the largest distance of a pass from the median of the passes. Every pass of a
world size is written to the results file as it ends; the same command goes on from there. Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from tests.benchmarks.interleaved_steps import Times, step_times
from tests.benchmarks.judged_plans import draw
from workbench.engine.calibrate.measure import calibrate
from workbench.machine.calibration_file import write_calibration
from workbench.plan.schema import Plan
from workbench.planner import estimate

PASSES, STEPS, PLANS = 3, 30, 24
FIRST_CHOICES = 3
"""Plans that the planner names first, of which the fastest counts for regret."""
ON_OWN_CORES = 2
"""Ranks up to which a plan is judged by its seconds; more ranks share cores, and are judged by CPU
seconds and by rank order.
"""


def main() -> None:
    """Calibrate, measure what is not yet measured, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--calibration", type=Path, default=Path("judged-calibration.yaml"))
    parser.add_argument("--results", type=Path, default=Path("judged-steps.jsonl"))
    parser.add_argument("--passes", type=int, default=PASSES, help="passes to have in all")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if not asked.calibration.exists():
        write_calibration(calibrate(), asked.calibration)
    plans = draw(asked.plans, asked.seed, str(asked.calibration))
    measured = _passes(plans, asked)
    report({name: compared(plan, name, measured) for name, plan in plans.items()}, asked.json)


def _passes(plans: Mapping[str, Plan], asked: argparse.Namespace) -> list[Times]:
    """All passes over `plans`: those of the results file, and what is missing of them."""
    lines = asked.results.read_text().splitlines() if asked.results.exists() else []
    done: list[Times] = list(map(json.loads, lines))
    worlds = sorted({plan.world_size for plan in plans.values()})
    passes: list[Times] = [{} for _ in range(asked.passes)]
    for index, world in product(range(asked.passes), worlds):
        own = {name: plan for name, plan in plans.items() if plan.world_size == world}
        earlier = [times for times in done if times.keys() == own.keys()]
        if len(earlier) <= index:
            earlier.append(step_times(own, asked.steps))
            done.append(earlier[-1])
            with asked.results.open("a") as file:
                file.write(json.dumps(earlier[-1]) + "\n")
        passes[index] |= earlier[index]
    return passes


def compared(plan: Plan, name: str, passes: list[Times]) -> dict[str, Any]:
    """Measured and estimated seconds of one plan, and what its passes differ by."""
    judged = "wall" if plan.world_size <= ON_OWN_CORES else "cpu"
    medians = np.array([np.median(times[name][judged]) for times in passes])
    seconds = float(np.median(medians))
    found = estimate(plan)
    told = float(found.step_seconds or 0.0)
    if judged == "cpu":
        told *= min(plan.world_size, ON_OWN_CORES)
    return {
        "model": str(plan.model),
        "ranks": plan.world_size,
        "measured": seconds,
        "estimated": told,
        "error": told / seconds - 1,
        "spread": float(np.abs(medians / seconds - 1).max()),
        "time": found.notes["time"],
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors, rank correlation, regret and noise floor of `rows`."""
    errors = np.abs([row["error"] for row in rows])
    told, seconds = ([row[key] for row in rows] for key in ("estimated", "measured"))
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["ranks"]].append(row)
    return {
        "plans": len(rows),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "spearman": float(spearmanr(told, seconds).statistic),
        "regret": max(_regret(group) for group in groups.values()),
        "noise_floor": float(np.median([row["spread"] for row in rows])),
    }


def _regret(group: list[dict[str, Any]]) -> float:
    first = sorted(group, key=lambda row: row["estimated"])[:FIRST_CHOICES]
    return float(min(row["measured"] for row in first) / min(r["measured"] for r in group) - 1)


def report(rows: dict[str, dict[str, Any]], as_json: bool) -> None:
    """Print every plan and the figures, of plans with a core a rank and of those that share."""
    halves = {
        "seconds, at most two ranks": [r for r in rows.values() if r["ranks"] <= ON_OWN_CORES],
        "CPU seconds, more ranks": [r for r in rows.values() if r["ranks"] > ON_OWN_CORES],
    }
    result = {title: figures(half) for title, half in halves.items() if len(half) > 1}
    if as_json:
        print(json.dumps({"figures": result, "plans": rows}, indent=2))
        return
    for name, row in sorted(rows.items(), key=lambda each: (each[1]["ranks"], each[1]["measured"])):
        print(
            f"{row['ranks']} {name:60} measured {1e3 * row['measured']:7.1f} ms   estimated "
            f"{1e3 * row['estimated']:7.1f} ms   {row['error']:+.0%}   spread {row['spread']:.0%}"
        )
    for title, found in result.items():
        print(title, {key: round(value, 4) for key, value in found.items()})


if __name__ == "__main__":
    main()
