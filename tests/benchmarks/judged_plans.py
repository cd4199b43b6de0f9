"""Plans over all axes, drawn by a seed: the plans on which a calibrated estimate is judged."""

from __future__ import annotations

import random
from typing import Any

from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan, build_plan

Changes = dict[str, Any]
SHAPES: dict[str, Changes] = {
    "tiny": {"model": "tiny", "training": {"sequence_length": 128, "global_batch": 16}},
    "small": {"model": "small", "training": {"sequence_length": 128, "global_batch": 4}},
}
MOE: Changes = {"model": "tiny-moe", "training": {"sequence_length": 128, "global_batch": 16}}
"""The shape of plans with an expert axis."""
MICRO_BATCHES = (1, 2, 4)
KERNELS = ("eager", "fused", "compiled")
RECOMPUTE = ("none", "selective", "full")

AXES: dict[str, tuple[int, Changes]] = {
    "single": (1, {}),
    "ddp": (2, {}),
    "zero-1": (2, {"data": {"zero": 1}}),
    "zero-2": (2, {"data": {"zero": 2}}),
    "zero-3": (2, {"data": {"zero": 3}}),
    "tensor": (2, {"tensor": {"size": 2}}),
    "tensor-sequence": (2, {"tensor": {"size": 2, "sequence": True}}),
    "ring": (2, {"context": {"size": 2, "algorithm": "ring"}}),
    "ulysses": (2, {"context": {"size": 2, "algorithm": "ulysses"}}),
    "gpipe": (2, {"pipeline": {"size": 2, "schedule": "gpipe"}}),
    "1f1b": (2, {"pipeline": {"size": 2, "schedule": "1f1b"}}),
    "interleaved": (2, {"pipeline": {"size": 2, "schedule": "interleaved", "chunks": 2}}),
    "zb-h1": (2, {"pipeline": {"size": 2, "schedule": "zb-h1"}}),
    "zb-v": (2, {"pipeline": {"size": 2, "schedule": "zb-v", "chunks": 2}}),
    "expert": (2, {"expert": {"size": 2}}),
    "tensor-2d": (4, {"tensor": {"size": [2, 2], "algorithm": "2d"}}),
    "usp": (4, {"context": {"size": 4, "algorithm": "usp", "ulysses_size": 2}}),
    "tensor x data": (4, {"tensor": {"size": 2}, "data": {"zero": 1}}),
    "tensor x pipeline": (4, {"tensor": {"size": 2}, "pipeline": {"size": 2}}),
    "pipeline x data": (4, {"pipeline": {"size": 2, "schedule": "zb-h1"}}),
}
"""Name of a strategy -> (ranks, its fields)."""


def draw(count: int, seed: int, calibration: str) -> dict[str, Plan]:
    """Distinct plans that run here, by name: all strategies in turn, the rest of a plan at random.

    Args:
        count: Number of plans.
        seed: Of the draw.
        calibration: Path of the calibration file that the plans name.
    """
    chance, found = random.Random(seed), dict[str, Plan]()
    for _ in range(count):  # every strategy once before any twice
        turn = [axis for axis in AXES if not any(n.startswith(f"{axis} |") for n in found)]
        axis = chance.choice(turn or list(AXES))
        while True:
            name, plan = _draw_of(axis, chance, calibration)
            if name not in found and _runs_here(plan):
                found[name] = plan
                break
    return found


def _draw_of(axis: str, chance: random.Random, calibration: str) -> tuple[str, Plan]:
    ranks, fields = AXES[axis]
    shape = chance.choice(list(SHAPES))
    micro, kernels, recompute = map(chance.choice, (MICRO_BATCHES, KERNELS, RECOMPUTE))
    base = MOE if axis == "expert" else SHAPES[shape]
    training = {**base["training"], "micro_batch": micro, "steps": 200}
    plan = build_plan(
        {
            "model": base["model"],
            "cluster": {"gpu": "local", "gpus": ranks, "calibration": calibration},
            "strategy": {**fields, "kernels": kernels, "recompute": recompute},
            "training": training,
            "telemetry": {"memory_every": 0},
        }
    )
    return f"{axis} | {base['model']} micro {micro} {kernels} recompute {recompute}", plan


def _runs_here(plan: Plan) -> bool:
    try:
        return not unsupported(plan.resolve(), "run")
    except PlanError:
        return False
