"""Plans on the layer profiles that DAPPLE's authors published, beside theirs; the closed form's
error against the simulator; and how long a search takes: `python -m tests.benchmarks.dapple`.
"""

from __future__ import annotations

import random
import time

import numpy as np

from tests.planner.unequal_stages import drawn
from workbench.planner.unequal_stages import Batch, Topology, search_stages
from workbench.planner.unequal_stages.latency import latency
from workbench.planner.unequal_stages.memory import WARM_UPS, stages_in_flight, with_transfers
from workbench.planner.unequal_stages.other_planners import PUBLISHED_CLAIMS, PlannerFigures
from workbench.planner.unequal_stages.published.comparison import (
    compare_published,
    one_way_speed_ups,
    stages_text,
)
from workbench.planner.unequal_stages.published.plans import MODELS
from workbench.planner.unequal_stages.simulated import simulated
from workbench.planner.unequal_stages.stage_times import stage_times


def table(model: str, whole_sequences: bool) -> None:
    """All planners' plans for one model."""
    shared = (
        "whole sequences, any number of microbatches"
        if whole_sequences
        else "the published microbatches, shared evenly"
    )
    print(f"{model}, global batch {MODELS[model].global_batch}: {shared}")
    found = compare_published(model, whole_sequences)
    for one in found.planners:
        _row(one)
    for name, plan in (("search", found.best), ("published", found.published)):
        if plan is not None:
            ratio = plan.times.activation_communication_ratio
            stages = stages_text(model, plan.stages)
            print(f"  {name}: {stages}, {plan.warm_up}, ACR {ratio:.2f}")
    where = f"number {found.place} of the search's" if found.place else "not among the ten best"
    print(f"  published plan: {where}{'; ' * bool(found.explained)}{found.explained}")
    best, published = one_way_speed_ups(model, whole_sequences)
    shown = f"{published:.2f}" if published else "does not fit"
    print(f"  cuts counted one way: search {best:.2f}, published {shown}")


def _row(one: PlannerFigures) -> None:
    if one.speed_up is None:
        print(f"  {one.name:45} does not fit memory or the microbatch")
        return
    print(
        f"  {one.name:45} {one.speed_up:6.2f} "
        f"{'' if one.memory_bytes is None else f'{one.memory_bytes / 1e9:.1f} GB':8} "
        f"{'' if one.microbatches is None else f'M {one.microbatches}':6} "
        f"{' : '.join(map(str, one.replicas))}"
    )


def errors() -> None:
    """How far the closed form is under the simulator on drawn plans, in percent."""
    print("Closed form under the simulator, % (median, 95th percentile; single pivots alone)")
    for warm_up in WARM_UPS:
        for each in (1, 2, 4, 8, 16):
            found = _errors(warm_up, each)
            middle, high = np.median(found, axis=0), np.percentile(found, 95, axis=0)
            print(
                f"  {warm_up} {each:3} microbatches a stage: {middle[0]:6.2f} {high[0]:6.2f}"
                f"   ({middle[1]:6.2f} {high[1]:6.2f})"
            )


def _errors(warm_up: str, each: int) -> list[tuple[float, float]]:
    draw = random.Random(each)
    found = []
    for _ in range(100):
        layers = draw.randint(6, 32)
        profile, topology = drawn.profile(draw, layers, 4), drawn.topology(draw, 16)
        stages = drawn.stages(draw, layers, topology, 8)
        batch = Batch(each * len(stages), draw.randint(16, 64))
        times = stage_times(profile, stages, topology, batch)
        held = with_transfers(stages_in_flight(profile, stages, topology, batch, warm_up) or ())
        known = latency(times, held, batch.microbatches)
        truth = simulated(times, held, batch.microbatches).makespan
        found.append((100 * (1 - known.seconds / truth), 100 * (1 - known.pivots_only / truth)))
    return found


def search_seconds() -> None:
    """How long the search takes for 96 layers on 8 nodes of 8 devices."""
    for seed in range(4):
        draw = random.Random(seed)
        profile = drawn.profile(draw, 96)
        network = 10 ** draw.uniform(8.7, 10)
        topology = Topology(8, 8, 100e9, network, 2 * network, most_rings=4)
        batch = Batch(64, 64, whole_sequences=bool(seed % 2))
        start, used = time.perf_counter(), time.process_time()
        plan = search_stages(profile, topology, batch)[0]
        print(
            f"  96 layers, 64 devices: {time.perf_counter() - start:.2f} s, "
            f"{time.process_time() - used:.2f} CPU s; {plan.speed_up:.1f} x, {plan.replicas}"
        )


def main() -> None:
    """Print all tables."""
    for whole_sequences in (False, True):
        for model in MODELS:
            table(model, whole_sequences)
    print(PUBLISHED_CLAIMS)
    errors()
    search_seconds()


if __name__ == "__main__":
    main()
