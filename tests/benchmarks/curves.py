"""One model, one seed, many strategies: do their loss curves lie on each other?

`python tests/benchmarks/curves.py [--steps 200] [--json FILE] [--html FILE]` really runs each
strategy with `accelerate launch`, one after the other, on the same text in fp32, and prints how far
each curve is from that of one device. The learning rate is one at which training is stable: at four
times this rate fp32's rounding grows to 2e-2 of loss within 60 steps, while one device and ZeRO-1
in fp64 stay within 1e-11.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import workbench as wb

FURTHEST = 1e-3
"""Largest difference of loss at any step."""
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "zero-1": (2, {"data": {"zero": 1}}),
    "zero-2": (2, {"data": {"zero": 2, "reduce": "microbatch"}}),
    "zero-3": (2, {"data": {"zero": 3, "reduce": "microbatch"}}),
    "hybrid-shard": (4, {"data": {"zero": 3, "shard": 2, "reduce": "microbatch"}}),
    "zero-offload": (2, {"data": {"zero": 2, "offload": "optimizer", "reduce": "microbatch"}}),
    "megatron-sp": (2, {"tensor": {"size": 2, "sequence": True}, "recompute": "selective"}),
    "colossal-2d": (4, {"tensor": {"size": [2, 2], "algorithm": "2d"}}),
    "dapple": (4, {"tensor": {"size": 2}, "pipeline": {"size": 2}}),
    "interleaved": (2, {"pipeline": {"size": 2, "schedule": "interleaved", "chunks": 2}}),
    "zb-v": (2, {"pipeline": {"size": 2, "schedule": "zb-v", "chunks": 2}, "recompute": "full"}),
    "dualpipe-v": (2, {"pipeline": {"size": 2, "schedule": "dualpipe-v", "chunks": 2}}),
    "ring-attention": (2, {"context": {"size": 2}}),
    "ulysses": (
        4,
        {
            "context": {"size": 2, "algorithm": "ulysses"},
            "data": {"zero": 3, "reduce": "microbatch"},
        },
    ),
}


def plan_of(gpus: int, strategy: dict[str, Any], steps: int) -> wb.Plan:
    """The tiny model on the standard library's sources; the same batches on any number of ranks."""
    return wb.Plan.model_validate(
        {
            "model": "tiny",
            "cluster": {"gpu": "local", "gpus": gpus},
            "strategy": {**strategy, "precision": "fp32"},
            "training": {
                "sequence_length": 64,
                "global_batch": 16,
                "micro_batch": 2,
                "steps": steps,
                "optimizer": {"learning_rate": 0.0005, "warmup_steps": 20},
            },
            "telemetry": {"memory_every": 0},
        }
    )


def main() -> int:
    """Train, compare, tell; 1 where a curve leaves the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path, help="All curves in one picture.")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, (gpus, strategy) in STRATEGIES.items():
            run = wb.run(plan_of(gpus, strategy, arguments.steps), wait=True, root=root)
            steps = run.profile().steps
            found[name] = steps[steps["rank"] == 0].sort_values("step").loss.tolist()
            furthest = max(abs(a - b) for a, b in zip(found[name], found["single"], strict=True))
            print(
                f"{name:16} {found[name][0]:.4f} -> {found[name][-1]:.4f}  furthest from one "
                f"device {furthest:.1e}",
                flush=True,
            )
    apart = {
        name: max(abs(a - b) for a, b in zip(curve, found["single"]))
        for name, curve in found.items()
    }
    if arguments.json:
        head = {
            "source": "measured",
            "torch": torch.__version__,
            "steps": arguments.steps,
            "furthest": apart,
        }
        arguments.json.write_text(json.dumps({**head, "losses": found}))
    if arguments.html:
        _chart(found).save(arguments.html)
    return int(max(apart.values()) > FURTHEST)


def _chart(curves: dict[str, list[float]]) -> Any:
    import altair as alt
    import pandas as pd

    table = (
        pd.DataFrame(curves)
        .rename_axis("step")
        .reset_index()
        .melt("step", var_name="strategy", value_name="loss")
    )
    return (
        alt.Chart(table, title="Measured loss, one seed")
        .mark_line()
        .encode(x="step", y="loss", color="strategy")
    )


if __name__ == "__main__":
    sys.exit(main())
