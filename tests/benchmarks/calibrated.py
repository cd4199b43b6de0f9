"""How near a calibrated estimate comes on this machine: `python tests/benchmarks/calibrated.py
[--calibration FILE]`.

Plans drawn by a fixed seed from all that this version runs here, the same model and batch in each,
really trained one after the other in rounds that take turns; the median step of each against the
estimate. Without a file it calibrates first, which takes a minute. Leave the machine alone
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

import workbench as wb
from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported

PLANS, SEED, STEPS, SKIPPED, ROUNDS = 24, 0, 14, 4, 2
RANKS, MICRO, TENSOR, PIPELINE, SCHEDULES = (
    (1, 2, 4),
    (1, 2, 4),
    (1, 2, 4),
    (1, 2, 4),
    ("gpipe", "1f1b"),
)


def drawn(model: str, calibration: Path) -> list[wb.Plan]:
    """Distinct legal plans that run here."""
    every = list(product(RANKS, MICRO, TENSOR, PIPELINE, SCHEDULES, (0.25, 25.0)))
    random.Random(SEED).shuffle(every)
    found: dict[str, wb.Plan] = {}
    for gpus, micro, tensor, pipeline, schedule, bucket in every:
        plan = wb.Plan.model_validate(
            {
                "model": model,
                "cluster": {"gpu": "local", "gpus": gpus, "calibration": str(calibration)},
                "strategy": {
                    "tensor": {"size": tensor},
                    "pipeline": {"size": pipeline, "schedule": schedule},
                    "data": {"bucket_mib": bucket},
                },
                "training": {
                    "sequence_length": 256,
                    "global_batch": 16,
                    "micro_batch": micro,
                    "steps": STEPS,
                },
                "telemetry": {"memory_every": 0},
            }
        )
        try:
            if unsupported(plan.resolve(), "run") or (pipeline == 1 and schedule == "gpipe"):
                continue
        except PlanError:
            continue
        found.setdefault(plan.to_yaml(), plan)
    return list(found.values())[:PLANS]


def measured(plan: wb.Plan, root: str) -> float:
    """Median seconds of a step, the first ones left out."""
    run = wb.run(plan, wait=True, root=root)
    steps = run.profile().steps
    return float(steps[steps["rank"] == 0].seconds.iloc[SKIPPED:].median())


def name(plan: wb.Plan) -> str:
    """The strategy in a line."""
    s, sizes = plan.strategy, plan.resolve().sizes
    return " ".join(f"{axis[0]}{size}" for axis, size in sizes.items()) + (
        f" {s.pipeline.schedule if sizes['pipeline'] > 1 else ''} micro "
        f"{plan.training.micro_batch} "
        f"bucket {s.data.bucket_mib}"
    )


def main() -> None:
    """Calibrate, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.calibration or Path(folder) / "machine.yaml"
        if asked.calibration is None:
            wb.calibrate(path)
        plans = drawn(asked.model, path)
        times = np.array([[measured(plan, folder) for plan in plans] for _ in range(ROUNDS)]).min(
            axis=0
        )
        told = np.array([float(wb.estimate(plan).step_seconds or 0) for plan in plans])
        report(plans, times, told, asked.json)  # while the calibration that the plans name is there


def report(plans: list[wb.Plan], times: Any, told: Any, as_json: bool) -> None:
    """Print every plan and the three figures."""
    errors = np.abs(told / times - 1)
    figures = {
        "plans": len(plans),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "spearman": float(spearmanr(told, times).statistic),
        "first_over_best": float(times[int(np.argmin(told))] / times.min() - 1),
    }
    rows = [(name(p), float(t), float(e), float(e / t)) for p, t, e in zip(plans, times, told)]
    if as_json:
        print(json.dumps(figures | {"rows": rows}, indent=2))
        return
    for row in sorted(rows, key=lambda each: each[1]):
        print(
            f"{row[0]:42} measured {row[1]:.3f} s   estimated {row[2]:.3f} s   ratio {row[3]:.2f}"
        )
    print(figures)


if __name__ == "__main__":
    main()
