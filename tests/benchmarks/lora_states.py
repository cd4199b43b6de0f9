"""Model states of LoRA beside full AdamW's, and LoRA under every ZeRO stage: `python -m
tests.benchmarks.lora_states [--tables states zero] [--models small smollm2-135m]
[--methods full lora qlora] [--ranks 1 2 3]`.

Model states are parameters, gradients and optimizer states, on the rank that has most; full AdamW
takes 16 bytes a parameter in bf16. Every row is estimated, and measured by two steps of forked
ranks in bf16, at the same batch for every method; of ZeRO stages by six steps in fp32, of which all
but the first two are timed. Peaks are the allocator's, seconds those of this machine, estimated
without calibration. Prints a JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import workbench as wb
from workbench.checkpoint.huggingface.huggingface_names import parameter_shapes
from workbench.engine.measure.allocator_memory import memory_meter
from workbench.engine.measure.step_sampler import StepSampler, allocated_rows, persistent_tensors
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

SMALL = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192}
STATES = ("parameters", "gradients", "optimizer", "master")
ADAMW_BYTES = 16
SAMPLED, TIMED = 2, 4
"""Steps whose memory is measured, and further ones that are timed."""
DEADLINE = 3600.0
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora", "lora": {"rank": 8}},
    "qlora": {"method": "lora", "lora": {"rank": 8}, "quantize": {"format": "nf4", "group": 64}},
}
Row = dict[str, Any]


def plan_of(model: str, method: str, ranks: int, zero: int, precision: str, steps: int) -> wb.Plan:
    """A fine-tuning of random weights on `ranks` data-parallel ranks."""
    return wb.Plan.model_validate(
        {
            "model": SMALL if model == "small" else model,
            "cluster": {"gpu": "local", "gpus": ranks},
            "strategy": {"data": {"zero": zero}, "precision": precision},
            "finetune": {
                **METHODS[method],
                "sequence_length": 32,
                "micro_batch": 1,
                "global_batch": ranks,
                "steps": steps,
            },
        }
    )


def parameters_of(plan: wb.Plan) -> int:
    """Number of the model's parameters, without adapters."""
    return sum(map(math.prod, parameter_shapes(plan.resolve().shape).values()))


def estimated(plan: wb.Plan) -> Row:
    """Model states, peak, traffic and time of a rank, without running it."""
    profile = wb.estimate(plan)
    by_category = profile.by_category
    rows = profile.rows("collectives", "rank", "bytes", "count", axis="data")
    return {
        "states_bytes": sum(by_category.get(name, 0) for name in STATES),
        "peak_bytes": max(profile.peak_bytes_by_rank.values()),
        "collective_bytes": sum(size * count for rank, size, count in rows if rank == 0),
        "step_seconds": profile.step_seconds,
    }


def measured(plan: wb.Plan) -> Row:
    """The same of real steps: the largest of the ranks; seconds also of CPUs, summed over ranks."""
    full = plan.resolve()
    ranks = run_ranks(full.world_size, partial(_on_rank, plan=full), DEADLINE)
    found: Row = {name: max(rank[name] for rank in ranks) for name in ranks[0] if name != "times"}
    timed = [rank["times"][SAMPLED:] for rank in ranks]
    if timed[0]:
        wall, cpu = ([[step[at] for step in rank] for rank in timed] for at in (0, 1))
        found["step_seconds"] = statistics.median(map(max, zip(*wall, strict=True)))
        found["cpu_seconds"] = statistics.median(map(sum, zip(*cpu, strict=True)))
    return found


def _on_rank(rank: int, plan: ResolvedPlan) -> Row:
    device, t = torch.device("cpu"), plan.training
    meter = memory_meter(device)
    meter.start()  # before anything is allocated: bytes are absolute
    session = Session.build(plan, build_mesh(plan, rank), device)
    shape = plan.num_microbatches, t.micro_batch, t.sequence_length
    tokens = torch.randint(plan.shape.vocab, shape, generator=torch.Generator().manual_seed(rank))
    states = persistent_tensors(session)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _all(states)}
    peaks, traffic, times = [], [], []
    for index in range(t.steps):
        wall, cpu = time.perf_counter(), _cpu_seconds()
        if index < SAMPLED:
            sampler = StepSampler(session, meter)
            with sampler.step((tokens,)):
                session.step(index, tokens, tokens, sampler)
            rows = [row for row in sampler.collective_rows() if row["axis"] == "data"]
            traffic.append(sum(row["bytes"] * row["count"] for row in rows))
        else:
            session.step(index, tokens, tokens)
        times.append((time.perf_counter() - wall, _cpu_seconds() - cpu))
        if index == SAMPLED - 1:
            steps = allocated_rows(meter.stop(), session.first_stage)
            peaks = [row["bytes"] for rows in steps for row in rows if row["moment"] == "peak"]
    return {
        "states_bytes": sum(storages.values()),
        "peak_bytes": max(peaks),
        "collective_bytes": traffic[-1],
        "times": times,
    }


def _all(states: dict[str, list[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (x for name in STATES for x in states.get(name, ()))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compared(plan: wb.Plan, **named: Any) -> Row:
    """Estimate and measurement of a plan."""
    full = ADAMW_BYTES * parameters_of(plan)
    row: Row = {**named, "parameters": full // ADAMW_BYTES}
    row |= {"estimated": estimated(plan), "measured": measured(plan)}
    row["share_of_full"] = row["measured"]["states_bytes"] / full
    return row


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    """All rows of the tables that are asked for."""
    for model in asked.models if "states" in asked.tables else ():
        for ranks in asked.ranks:
            for method in asked.methods:
                plan = plan_of(model, method, ranks, 0, "bf16", SAMPLED)
                yield compared(plan, table="states", model=model, method=method, ranks=ranks)
    for model in asked.models if "zero" in asked.tables else ():
        for zero in range(4):
            plan = plan_of(model, "lora", 2, zero, "fp32", SAMPLED + TIMED)
            yield compared(plan, table="zero", model=model, zero=zero, ranks=2)


def main() -> None:
    """Print a JSON line a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tables", nargs="+", choices=("states", "zero"), default=["states", "zero"]
    )
    parser.add_argument("--models", nargs="+", default=["small", "smollm2-135m"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for row in rows(asked):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
