"""What a step loses: `python -m tests.benchmarks.overhead [--hidden 64 256] [--json]`.

Pipelines: the shortest time in which the schedule's table could run, each action as long as it took
(median) and transfers free, beside the time that a step took. Telemetry and supervision: steps as a
run takes them (a record a step in the rank's file, the action under way known, the wish to stop
read), beside bare ones, in turn, in the same processes. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.runtime import TORCH_SCHEDULES, plan_of
from workbench.engine.measure.step_sampler import ActionTracker
from workbench.engine.measure.telemetry_writer import TelemetryWriter
from workbench.engine.session import Session
from workbench.engine.step_observer import NullObserver
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import executed
from workbench.runs.store.stop_request import read_stop
from workbench.schedules import Action, simulate
from workbench.schedules.action import COMPUTE

WARM, ROUNDS = 3, 20


class Stopwatch(NullObserver):
    """Seconds of each kind of action by stage."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    @contextmanager
    def action(self, label: str, action: Action | None) -> Iterator[None]:
        """Time one action."""
        began = time.perf_counter()
        yield
        if action is not None and action.kind in COMPUTE:
            self.seconds[action.kind, action.stage].append(time.perf_counter() - began)


def _session(plan: ResolvedPlan, rank: int) -> tuple[Session, Tensor]:
    session = Session.build(plan, build_mesh(plan, rank), torch.device("cpu"))
    shape = (plan.num_microbatches, plan.training.micro_batch, plan.training.sequence_length)
    return session, torch.randint(
        plan.shape.vocab, shape, generator=torch.Generator().manual_seed(0)
    )


def stepped(plan: ResolvedPlan, rank: int) -> tuple[list[float], dict[tuple[str, int], float]]:
    """Seconds of each step, and the median ones of its actions."""
    session, text = _session(plan, rank)
    watch, seconds = Stopwatch(), []
    for index in range(WARM + ROUNDS):
        if index == WARM:
            watch.seconds.clear()
        dist.barrier()
        began = time.perf_counter()
        session.step(index, text, text, watch)
        seconds.append(time.perf_counter() - began)
    return seconds[WARM:], {key: statistics.median(values) for key, values in watch.seconds.items()}


def bubble(plan: ResolvedPlan) -> dict[str, Any]:
    """How close a pipeline's steps come to what its table allows."""
    by_rank = run_ranks(plan.world_size, lambda rank: stepped(plan, rank), 600)
    table, _ = executed(plan)
    measured = {key: value for _, found in by_rank for key, value in found.items()}
    kinds = {kind for kind, _ in measured}
    durations = {
        kind: [measured.get((kind, stage), 0.0) for stage in range(table.stages)] for kind in kinds
    }
    bound = simulate(table, durations).makespan
    step = statistics.median(max(one) for one in zip(*(seconds for seconds, _ in by_rank)))
    return {"bound_seconds": bound, "step_seconds": step, "share_of_bound": bound / step}


def watched(plan: ResolvedPlan, rank: int, folder: Path) -> list[list[float]]:
    """CPU seconds of bare steps, and of steps as a run takes them."""
    session, text = _session(plan, rank)
    tracker = ActionTracker()
    found: list[list[float]] = [[], []]
    with TelemetryWriter(folder, rank) as telemetry:
        for index in range(2 * (WARM + ROUNDS)):
            dist.barrier()
            began = time.process_time()
            if index % 2:
                read_stop(folder)
                result = session.step(index, text, text, tracker)
                told = torch.stack([x for x in result if x is not None]).tolist()
                telemetry.record(
                    "step", step=index, loss=told[0], gradient_norm=told[1], action=tracker.current
                )
            else:
                session.step(index, text, text)[0].item()
            if index >= 2 * WARM:
                found[index % 2].append(time.process_time() - began)
    return found


def telemetry(plan: ResolvedPlan) -> dict[str, float]:
    """What being watched adds to a step."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(plan.world_size, lambda rank: watched(plan, rank, Path(folder)), 600)
    bare, told = ([sum(r[which][i] for r in by_rank) for i in range(ROUNDS)] for which in (0, 1))
    cost = statistics.median(b / a for a, b in zip(bare, told)) - 1
    return {"telemetry": cost, "cpu_seconds": statistics.median(bare)}


def main() -> None:
    """Run all and print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for hidden in arguments.hidden:
        for schedule in ("zb-h1", *TORCH_SCHEDULES):
            chunks = 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else 1
            strategy = {"pipeline": {"size": 2, "schedule": schedule, "chunks": chunks}}
            found.append(
                {"schedule": schedule, "hidden": hidden, **bubble(plan_of(hidden, 2, strategy, 8))}
            )
            if not arguments.json:
                print(
                    f"{schedule:12} hidden {hidden:4}  {found[-1]['share_of_bound']:.1%} of the "
                    f"bound",
                    flush=True,
                )
        found.append({"hidden": hidden, **telemetry(plan_of(hidden, 2, {}))})
        if not arguments.json:
            print(
                f"telemetry    hidden {hidden:4}  {found[-1]['telemetry']:+.2%} of a step",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"source": "measured", "torch": torch.__version__, "found": found}))


if __name__ == "__main__":
    main()
