"""How near a calibrated estimate comes on this machine: `python -m tests.benchmarks.calibrated
--seed N [--calibration FILE] [--results FILE]`.

One calibration, made before the steps; plans over all axes, kernels and recomputation, drawn by the
seed; the median of 30 steps of each, which take turns, in three passes. Plans of more ranks than
cores are judged by their CPU seconds.

A second calibration is made after the steps. No judged figure takes anything from it but the noise
floor, which is the larger of two distances: the median over plans of the largest distance of a pass
from the median of the passes, and by how much the machine's speed moved between the calibrations,
the median over all points of their ratio. The noise of single points is not in the latter: it is
the calibration's error. Errors by the second calibration, and by the geometric mean of both
estimates, are printed beside.

Every pass of a world size is written to the results file as it ends; the same command goes on from
there. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from tests.benchmarks.interleaved_steps import Times, step_times
from tests.benchmarks.judged_plans import draw
from workbench.engine.calibrate.measure import calibrate
from workbench.machine.calibration_file import Calibration, read_calibration, write_calibration
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
    before, after = asked.calibration, asked.calibration.with_suffix(".after.yaml")
    _calibrated(before)
    measured = _passes(draw(asked.plans, asked.seed, str(before)), asked)
    _calibrated(after)
    first, later = (
        {name: estimated(plan) for name, plan in draw(asked.plans, asked.seed, str(file)).items()}
        for file in (before, after)
    )
    rows = {name: compared(first[name], later[name], name, measured) for name in first}
    report(rows, drift(read_calibration(before), read_calibration(after)), asked.json)


def _calibrated(file: Path) -> None:
    if not file.exists():
        write_calibration(calibrate(), file)


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


@dataclass(frozen=True)
class Estimated:
    """What an estimate says of one plan."""

    model: str
    ranks: int
    wall: float
    """Seconds of a step."""
    cpu: float
    """CPU seconds of all ranks together; nan where a rank has several threads."""
    time: dict[str, float]
    """Seconds by part of the step."""


def estimated(plan: Plan) -> Estimated:
    """Seconds, CPU seconds and parts of a step."""
    found = estimate(plan)
    return Estimated(
        str(plan.model),
        plan.world_size,
        float(found.step_seconds or 0.0),
        found.notes.get("cpu_seconds", math.nan),
        found.notes["time"],
    )


def compared(first: Estimated, later: Estimated, name: str, passes: list[Times]) -> dict[str, Any]:
    """Measured and estimated seconds of one plan, and what its passes differ by.

    Args:
        first: By the calibration before the steps.
        later: By the one after them.
        name: Of the plan.
        passes: Measured seconds.
    """
    judged = "wall" if first.ranks <= ON_OWN_CORES else "cpu"
    medians = np.array([np.median(times[name][judged]) for times in passes])
    seconds = float(np.median(medians))
    own, second = getattr(first, judged), getattr(later, judged)
    return {
        "model": first.model,
        "ranks": first.ranks,
        "measured": seconds,
        "estimated": own,
        "error": own / seconds - 1,
        "error_after": second / seconds - 1,
        "error_mean": (own * second) ** 0.5 / seconds - 1,
        "spread": float(np.abs(medians / seconds - 1).max()),
        "wall": float(np.median([np.median(times[name]["wall"]) for times in passes])),
        "estimated_wall": first.wall,
        "time": first.time,
    }


def drift(before: Calibration, after: Calibration) -> float:
    """By how much the machine's speed moved: the median ratio of all points that both measured."""
    first, second = _points(before), _points(after)
    ratios = [second[key] / first[key] for key in first.keys() & second.keys()]
    return float(abs(np.median(ratios) - 1))


def _points(calibration: Calibration) -> dict[str, float]:
    """Seconds of every point, by its section and labels."""
    found = {}
    for section in ("gemm", "memory", "probes", "collectives", "operators"):
        for point in getattr(calibration, section):
            times = {"seconds", "cpu_seconds", "forward", "backward", "weight"}
            seconds = point.model_dump(include={"seconds", "forward"})
            found[f"{section} {point.model_dump(exclude=times)}"] = sum(seconds.values())
    return found


def figures(rows: list[dict[str, Any]], moved: float) -> dict[str, float]:
    """Errors, rank correlation, regret and noise floor of `rows`, between whose calibrations the
    machine's speed `moved`.
    """
    errors = np.abs([row["error"] for row in rows])
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["model"], row["ranks"]].append(row)
    spread = float(np.median([row["spread"] for row in rows]))
    return {
        "plans": len(rows),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "spearman": _order(rows, "estimated", "measured"),
        "spearman_wall": _order(rows, "estimated_wall", "wall"),
        "regret": max(_regret(group) for group in groups.values()),
        "noise_floor": max(spread, moved),
        "passes_differ": spread,
        "calibrations_differ": moved,
        "median_error_after": float(np.median(np.abs([row["error_after"] for row in rows]))),
        "median_error_mean": float(np.median(np.abs([row["error_mean"] for row in rows]))),
    }


def _order(rows: list[dict[str, Any]], estimate: str, measured: str) -> float:
    return float(spearmanr(*([row[key] for row in rows] for key in (estimate, measured))).statistic)


def _regret(group: list[dict[str, Any]]) -> float:
    first = sorted(group, key=lambda row: row["estimated"])[:FIRST_CHOICES]
    return float(min(row["measured"] for row in first) / min(r["measured"] for r in group) - 1)


def report(rows: dict[str, dict[str, Any]], moved: float, as_json: bool) -> None:
    """Print every plan and the figures, of plans with a core a rank and of those that share."""
    groups = {
        "seconds, at most two ranks": [r for r in rows.values() if r["ranks"] <= ON_OWN_CORES],
        "CPU seconds, more ranks": [r for r in rows.values() if r["ranks"] > ON_OWN_CORES],
    }
    result = {title: figures(group, moved) for title, group in groups.items() if len(group) > 1}
    if as_json:
        print(json.dumps({"figures": result, "plans": rows}, indent=2))
        return
    for name, row in sorted(rows.items(), key=lambda each: (each[1]["ranks"], each[1]["measured"])):
        print(
            f"{row['ranks']} {name:60} measured {1e3 * row['measured']:7.1f} ms   estimated "
            f"{1e3 * row['estimated']:7.1f} ms   {row['error']:+.0%}   "
            f"after {row['error_after']:+.0%}   spread {row['spread']:.0%}"
        )
    for title, found in result.items():
        print(title, {key: round(value, 4) for key, value in found.items()})


if __name__ == "__main__":
    main()
