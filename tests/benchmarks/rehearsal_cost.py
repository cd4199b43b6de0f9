"""What rehearsals cost: CPU seconds and memory of whole models on thousands of ranks, then against
the number of layers and of ranks.

`python -m tests.benchmarks.rehearsal_cost [--plans] [--curves] [--json FILE] [--svg FILE]` starts
`python -m workbench.rehearsal` for each plan, as the command does, and prints its own CPU seconds
(user and system, torch's import included) and its largest resident set. A number of layers or ranks
is of one plan in which nothing else changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pandas as pd

from workbench.lab.pictures.pictures import render_svg
from workbench.plan.schema import Plan, build_plan

Strategy = dict[str, Any]
PANGU: Strategy = {"preset": "pangu-5d"}
LLAMA: Strategy = {
    "preset": "llama-3-4d",
    "tensor": {"size": 8, "sequence": True},
    "pipeline": {"size": 16},
    "context": {"size": 1},
}
LLAMA_70B: Strategy = {"preset": "megatron-3d", "tensor": {"size": 8}, "pipeline": {"size": 4}}
PLANS: tuple[tuple[str, str, int, Strategy, int, int], ...] = (
    ("pangu-200b", "ascend-910", 2048, PANGU, 1024, 2048),
    ("llama-3.1-405b", "h100-sxm-80gb", 16384, LLAMA, 8192, 2048),
    ("llama-3-70b", "h100-sxm-80gb", 64, LLAMA_70B, 8192, 256),
)
"""(model, GPU, GPUs, strategy, sequence length, global batch)."""
LAYERS = (4, 8, 16, 32)
RANKS = (16, 256, 4096)
FEWEST = LAYERS[0]
"""Layers of the plan on more and more ranks."""
VERBS = {"rehearse": [], "check": ["--check"]}


@dataclass(frozen=True)
class Cost:
    """What one rehearsal took; measured."""

    verb: str
    plan: str
    layers: int
    ranks: int
    cpu_seconds: float
    resident_mib: float


def cost(verb: str, plan: Plan) -> Cost:
    """Rehearse or check `plan` in a child of its own."""
    full = plan.resolve()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.yaml")
        path.write_text(plan.to_yaml())
        module = ["-m", "workbench.rehearsal", str(path), "--to", f"{folder}/out"]
        command = [sys.executable, *module, *VERBS[verb]]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{verb} of {full.name} ended with {child.returncode}")
    spent = used.ru_utime + used.ru_stime
    return Cost(verb, full.name, full.shape.layers, full.world_size, spent, used.ru_maxrss / 1024)


def whole_models() -> list[tuple[str, Plan]]:
    """The published plans, rehearsed, and that of PanGu-alpha also checked."""
    plans = []
    for model, gpu, gpus, strategy, length, batch in PLANS:
        training = {"sequence_length": length, "global_batch": batch, "micro_batch": 1}
        plans.append(
            build_plan(
                {
                    "name": f"{model} on {gpus:,}",
                    "model": model,
                    "cluster": {"gpu": gpu, "gpus": gpus},
                    "strategy": strategy,
                    "training": training,
                }
            )
        )
    return [*(("rehearse", plan) for plan in plans), ("check", plans[0])]


def small(layers: int, gpus: int) -> Plan:
    """A GPT of so many layers: tensor 8, pipeline 2, ZeRO-1 over the rest."""
    shape = {"layers": layers, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 51200}
    return build_plan(
        {
            "name": f"gpt of {layers} on {gpus:,}",
            "model": shape | {"name": "gpt", "max_positions": 2048},
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus},
            "strategy": {"tensor": {"size": 8}, "pipeline": {"size": 2}, "data": {"zero": 1}},
            "training": {"sequence_length": 2048, "global_batch": 8 * gpus // 16, "micro_batch": 1},
        }
    )


def against_size() -> list[tuple[str, Plan]]:
    """More layers on few ranks, then few layers on more ranks."""
    layers = [small(layers, RANKS[0]) for layers in LAYERS]
    ranks = [small(FEWEST, gpus) for gpus in RANKS[1:]]
    return [("rehearse", plan) for plan in (*layers, *ranks)]


def chart(costs: Sequence[Cost]) -> dict[str, Any]:
    """CPU seconds against layers, on few ranks, and against ranks, at few layers."""
    rows = pd.DataFrame([asdict(each) for each in costs if each.plan.startswith("gpt of")])
    parts = [
        _curve(rows[rows.ranks == RANKS[0]], "layers", f"layers, on {RANKS[0]} ranks", "linear"),
        _curve(rows[rows.layers == FEWEST], "ranks", f"ranks, {FEWEST} layers", "log"),
    ]
    return dict(alt.hconcat(*parts, title="CPU seconds of a rehearsal (measured)").to_dict())


def _curve(
    rows: pd.DataFrame, field: str, title: str, scale: Literal["linear", "log"]
) -> alt.Chart:
    curve: alt.Chart = (
        alt.Chart(rows, width=280, height=200)
        .mark_line(point=True)
        .encode(
            x=alt.X(
                field,
                title=title,
                scale=alt.Scale(type=scale),
                axis=alt.Axis(values=sorted(rows[field].tolist()), labelOverlap=False),
            ),
            y=alt.Y("cpu_seconds", title="CPU seconds", scale=alt.Scale(zero=True)),
        )
    )
    return curve


def main() -> None:
    """Measure, print a line for each, and write what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rehearsal_cost")
    parser.add_argument("--plans", action="store_true", help="whole models alone")
    parser.add_argument("--curves", action="store_true", help="layers and ranks alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    both = asked.plans == asked.curves
    cases = [
        *(whole_models() if asked.plans or both else []),
        *(against_size() if asked.curves or both else []),
    ]
    found = []
    for verb, plan in cases:
        found.append(one := cost(verb, plan))
        print(
            f"{one.verb:8} {one.plan:28} {one.cpu_seconds:6.1f} CPU s {one.resident_mib:6.0f} MiB",
            flush=True,
        )
    if asked.json:
        rows = [asdict(one) for one in found]
        asked.json.write_text(json.dumps({"source": "measured", "costs": rows}, indent=1) + "\n")
    if asked.svg and (asked.curves or both):
        asked.svg.write_text(render_svg(chart(found)))


if __name__ == "__main__":
    main()
