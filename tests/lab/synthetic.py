"""Made-up profiles and telemetry of the right form, for tests that need neither a planner nor a
run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from workbench.plan.schema import Plan
from workbench.planner.search import Candidate, SearchResult
from workbench.profile import Profile, Source, frame

MIB = 2**20
PARTS = {
    "parameters": 1.0,
    "gradients": 1.0,
    "optimizer": 2.0,
    "activations": 1.5,
    "logits": 0.5,
    "temporary": 0.2,
}


def profile(
    source: Source = "estimated",
    world: int = 4,
    *,
    run: str = "plan",
    scale: int = 100 * MIB,
    steps: int = 0,
    pipeline: bool = True,
) -> Profile:
    """A profile of `world` ranks, one stage a rank where `pipeline`; a measured one also has totals
    and steps.
    """
    measured = source == "measured"
    off = {"estimated": 1.0, "rehearsed": 1.01, "measured": 1.02}[source]
    step = 2 if measured else None
    cells: dict[str, Any] = {"run": run, "source": source, "step": step}
    memory = []
    for rank in range(world):
        weight = 1 + 0.4 * (world - rank) / world
        where = cells | {"rank": rank, "stage": rank if pipeline else 0, "tier": "device"}
        parts = {
            name: int(scale * share * (weight if name == "activations" else 1) * off)
            for name, share in PARTS.items()
        }
        for moment in ("peak", "maximum"):
            memory += [
                where | {"moment": moment, "category": name, "bytes": size}
                for name, size in parts.items()
            ]
        if measured:
            memory.append(
                where
                | {
                    "moment": "peak",
                    "category": "allocated",
                    "bytes": int(sum(parts.values()) * 1.01),
                }
            )
    return Profile(
        run,
        source,
        world,
        frame("memory", memory),
        frame("timeline", timeline_rows(cells, world, 4, pipeline)),
        frame("collectives", collective_rows(cells, world)),
        frame("steps", step_rows(cells, world, steps)),
        capacity_bytes=1024 * MIB,
        notes={} if measured else {"time": {"compute": 0.8, "data_comm": 0.15, "bubble": 0.3}},
    )


def timeline_rows(
    cells: dict[str, Any], world: int, microbatches: int, pipeline: bool = True
) -> list[dict[str, Any]]:
    """All forward, then all backward, a stage a rank; forward takes 10 ms, backward 20 ms."""
    rows = []
    for rank in range(world):
        for m in range(microbatches):
            ahead, behind = (
                (rank + m) * 0.01,
                (world + microbatches) * 0.01 + (world - 1 - rank + m) * 0.02,
            )
            common = cells | {"rank": rank, "stage": rank if pipeline else 0, "microbatch": m}
            rows.append(common | {"action": "F", "start": ahead, "end": ahead + 0.01})
            rows.append(common | {"action": "B", "start": behind, "end": behind + 0.02})
    return rows


def collective_rows(cells: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """An all-reduce over data, and sends between stages."""
    common = cells | {"dtype": "fp32", "seconds": None, "action": "B"}
    return [
        row
        for rank in range(world)
        for row in (
            common
            | {
                "rank": rank,
                "axis": "data",
                "kind": "all_reduce",
                "group_size": 2,
                "bytes": 25 * MIB,
                "count": 4,
            },
            common
            | {
                "rank": rank,
                "axis": "pipeline",
                "kind": "send",
                "group_size": world,
                "bytes": 2 * MIB,
                "count": 8,
            },
            common
            | {
                "rank": rank,
                "axis": "tensor",
                "kind": "all_reduce",
                "group_size": 2,
                "bytes": 2 * MIB,
                "count": 16,
            },
        )
    ]


def step_rows(cells: dict[str, Any], world: int, steps: int) -> list[dict[str, Any]]:
    """A falling loss and a steady pace."""
    return [
        cells
        | {
            "rank": rank,
            "step": s,
            "loss": loss_at(s),
            "seconds": 0.1 + 0.01 * math.sin(s + rank),
            "tokens": 4096,
            "gradient_norm": 1.0,
            "learning_rate": 3e-4,
            "loss_scale": None,
            "skipped": False,
        }
        for s in range(steps)
        for rank in range(world)
    ]


def loss_at(step: int) -> float:
    """The made-up loss of a step."""
    return 2 + 3.5 * math.exp(-step / 20) + 0.05 * math.sin(step)


def found(objective: str = "time", **changes: Any) -> SearchResult:
    """A search's result: a front of four plans, two of them among the three best."""
    plans = (
        [
            Plan.of(
                "llama-3-8b",
                gpu="h100-sxm-80gb",
                gpus=8,
                strategy="megatron-tp",
                set={"strategy.tensor.size": size},
            )
            for size in (1, 2, 4, 8)
        ]
        if not changes.get("empty")
        else []
    )
    figures = ((0.1, 64.0), (0.12, 16.0), (0.3, 8.0), (0.4, 6.0))
    front = tuple(Candidate(plan, s, gib * 2**30, s) for plan, (s, gib) in zip(plans, figures))
    top = (*front[:2], *(replace(one, seconds=0.13, peak_bytes=32.0 * 2**30) for one in front[2:3]))
    return replace(SearchResult(objective, 1000, len(front), 0.5, top, front), **changes)
