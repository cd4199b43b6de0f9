"""Plans on the layer profiles that DAPPLE's authors published, beside theirs:
`python -m tests.benchmarks.dapple [--validation FOLDER]`.

Speed-ups over one device, by the simulator. The topology and what a device keeps are those of the
authors' planner (LER0ever/HPGO, src/environment and examples/vs_pipedream.rs): 2 nodes of 8 V100 of
16 GB; NVLink 25 GB/s, a ring for each two devices; Ethernet 1 GB/s point to point and 3 GB/s in
collectives.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.planner.unequal_stages import drawn
from workbench.plan.model.layer_profile import LayerProfile, read_layer_profile
from workbench.planner.unequal_stages import (
    Batch,
    Stage,
    Topology,
    UnequalPlan,
    data_parallel_seconds,
    evaluate,
    gpipe_stages,
    pipedream_stages,
    search_stages,
)
from workbench.planner.unequal_stages.latency import latency
from workbench.planner.unequal_stages.memory import (
    WARM_UPS,
    peak_bytes,
    stages_in_flight,
    with_transfers,
)
from workbench.planner.unequal_stages.simulated import simulated, simulated_gpipe
from workbench.planner.unequal_stages.stage_times import one_device_seconds, stage_times
from workbench.planner.unequal_stages.transitions import placed

VALIDATION = Path(__file__).parents[3] / "shared/validation"
TOPOLOGY = Topology(2, 8, 25e9, 1e9, 3e9, most_rings=4, memory=16e9)


@dataclass(frozen=True)
class Published:
    """What the authors' comparison (examples/vs_pipedream.rs) says of a model."""

    global_batch: int
    microbatch: int
    optimizer_factor: float
    peak_per_sequence: float
    """Bytes of activations of one sequence, all layers."""
    offset: int
    """Layers of the profile before the one that their plans count as 0."""


MODELS = {
    "VGG-19": Published(1024, 32, 2, 70e6, 1),
    "BERT-Large": Published(128, 1, 3, 1736689664, 3),
    "XLNet-36": Published(128, 1, 3, 1.5 * 3942774528, 2),
    "AmoebaNet-36": Published(128, 1, 2, 1.5 * 250845152, 0),
}
"""Offsets by layers' names: their graphs leave out inputs, BERT's has the embeddings as layer 0,
XLNet's has 4 before the first layer.
"""
APPEND = 1


def profile_of(model: str, folder: Path) -> LayerProfile:
    """The published profile. Its inputs take no time and no memory, as PipeDream's planner has it
    (optimizer_graph_hierarchical.py): they are on the first stage anyway.
    """
    profile = read_layer_profile(folder / "dapple_profiles.csv", model)
    layers = tuple(
        replace(layer, forward_s=0.0, backward_s=0.0, activation_bytes=0.0)
        if layer.name.startswith("Input")
        else layer
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def batch_of(model: str, profile: LayerProfile, microbatches: int, whole: bool) -> Batch:
    """The published global batch in `microbatches`."""
    known = MODELS[model]
    factor = known.peak_per_sequence * profile.profile_batch / profile.activations[-1]
    sequences = known.global_batch // microbatches
    return Batch(microbatches, sequences, whole, known.optimizer_factor, factor)


def their_stages(
    model: str, planner: str, profile: LayerProfile, folder: Path
) -> tuple[Stage, ...]:
    """A published plan, by the names of the layers at its cuts."""
    with open(folder / "dapple_plans.csv", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["model"], row["planner"], row["verify"]) == (model, planner, "read")
        ]
    ends, replicas = _cuts(rows)
    ends = [end + MODELS[model].offset for end in ends[:-1]] + [len(profile.layers)]
    return placed(ends, replicas, [APPEND] * len(ends), TOPOLOGY)


def _cuts(rows: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    if rows[0]["stage"]:
        return [int(row["end_index"]) for row in rows], [int(row["replicas"]) for row in rows]
    ends = [int(word) for word in rows[0]["notes"].split() if word.isdigit()]
    written = rows[0]["replicas"]
    many = written.endswith("stages of 1")
    return ends, [1] * len(ends) if many else [int(word) for word in written.split()]


def shown_stages(profile: LayerProfile, plan: UnequalPlan) -> str:
    """Each stage's replicas and last layer."""
    if len(plan.stages) > 4:
        return " : ".join(str(stage.replicas) for stage in plan.stages)
    return " | ".join(
        f"{stage.replicas} to {profile.layers[stage.end - 1].name}" for stage in plan.stages
    )


def row(name: str, profile: LayerProfile, plan: UnequalPlan | None) -> None:
    """One line of the authors' table."""
    if plan is None:
        print(f"  {name:22} does not fit, or has more replicas than sequences in a microbatch")
        return
    print(
        f"  {name:22} {plan.speed_up:6.2f} {plan.warm_up} "
        f"ACR {plan.times.activation_communication_ratio:5.2f} {plan.memory / 1e9:5.1f} GB  "
        f"M {plan.batch.microbatches:3}  {shown_stages(profile, plan)}"
    )


def their_place(plans: Sequence[UnequalPlan], theirs: UnequalPlan | None) -> str:
    """Where their plan stands among ours."""
    for place, plan in enumerate(plans, start=1):
        if theirs is not None and plan.stages == theirs.stages:
            more = "" if place <= 3 else f"; {_difference(plans[0], theirs)}"
            return f"their plan is number {place} of ours{more}"
    if theirs is None:
        return "their plan does not fit"
    return f"their plan is not among ours; {_difference(plans[0], theirs)}"


def _difference(ours: UnequalPlan, theirs: UnequalPlan) -> str:
    """Terms in which two plans differ, in seconds of a step."""
    words = []
    for name, plan in (("ours", ours), ("theirs", theirs)):
        both = [f + b for f, b in zip(plan.times.forward, plan.times.backward)]
        count = plan.batch.microbatches
        words.append(
            f"{name}: M {count} x slowest stage {count * max(both[::2]):.3f} s, x slowest "
            f"transfer there and back {count * max(both[1::2], default=0.0):.3f} s, way down and "
            f"up {sum(both):.3f} s, longest all-reduce {max(plan.times.all_reduce):.3f} s, step "
            f"{plan.simulated:.3f} s"
        )
    return "; ".join(words)


def comparison(model: str, folder: Path, whole: bool) -> None:
    """The table of one model: at the authors' number of microbatches, shared evenly; or at any,
    of whole sequences, each planner's best.
    """
    profile = profile_of(model, folder)
    known = MODELS[model]
    most = known.global_batch // known.microbatch
    counts = [n for n in range(1, most + 1) if most % n == 0] if whole else [most]
    batches = [batch_of(model, profile, count, whole) for count in counts]
    ours = [plan for batch in batches for plan in _searched(profile, batch)]
    ours.sort(key=lambda plan: plan.simulated)
    theirs = _best(profile, their_stages(model, "DAPPLE", profile, folder), batches)
    shared = "whole sequences, any M" if whole else "the authors' microbatches, shared evenly"
    print(f"{model}, global batch {known.global_batch}: {shared}")
    row("ours", profile, ours[0])
    row("DAPPLE's planner", profile, theirs)
    named = {
        "PipeDream's, published": their_stages(model, "PipeDream", profile, folder),
        "PipeDream's, ours": pipedream_stages(profile, TOPOLOGY),
    }
    for name, stages in named.items():
        row(name, profile, _best(profile, stages, batches))
    _gpipe(profile, batches, ours[0])
    for overlap in (False, True):
        seconds = data_parallel_seconds(profile, TOPOLOGY, batches[0], overlap)
        name = f"data parallel{', overlap' if overlap else ''}"
        one = one_device_seconds(profile, batches[0])
        print(f"  {name:22} {one / seconds:6.2f}" if seconds else f"  {name:22} does not fit")
    print(f"  {their_place(ours[:10], theirs)}")
    _one_way(model, folder, batches)


def _one_way(model: str, folder: Path, batches: Sequence[Batch]) -> None:
    """Both plans if activations crossed the network one way alone: so the authors' search for two
    stages (orchestrate_async.rs, compute_bipartition) counts a cut, without gradients.
    """
    topology = replace(TOPOLOGY, network_rate=2 * TOPOLOGY.network_rate)
    profile = profile_of(model, folder)
    ours = [plan for batch in batches for plan in _searched(profile, batch, topology)]
    best = max(plan.speed_up for plan in ours)
    stages = their_stages(model, "DAPPLE", profile, folder)
    theirs = _best(profile, stages, batches, topology)
    shown = f"{theirs.speed_up:.2f}" if theirs else "does not fit"
    print(f"  cuts counted one way: ours {best:.2f}, theirs {shown}")


def _searched(
    profile: LayerProfile, batch: Batch, topology: Topology = TOPOLOGY
) -> list[UnequalPlan]:
    try:
        return search_stages(profile, topology, batch)
    except ValueError:
        return []


def _best(
    profile: LayerProfile,
    stages: Sequence[Stage],
    batches: Sequence[Batch],
    topology: Topology = TOPOLOGY,
) -> UnequalPlan | None:
    plans = [evaluate(profile, stages, topology, batch) for batch in batches]
    return min((p for p in plans if p is not None), key=lambda p: p.simulated, default=None)


def _gpipe(profile: LayerProfile, batches: Sequence[Batch], ours: UnequalPlan) -> None:
    stages = gpipe_stages(profile, TOPOLOGY)
    found = []
    for batch in batches:
        times = stage_times(profile, stages, TOPOLOGY, batch)
        held = [batch.microbatches] * len(stages)
        memory = peak_bytes(profile, stages, held, batch)
        seconds = simulated_gpipe(times, batch.microbatches).makespan
        found.append((memory > TOPOLOGY.memory, seconds, memory, batch.microbatches))
    over, seconds, memory, count = min(found)
    speed_up = one_device_seconds(profile, batches[0]) / seconds
    note = "  over memory" if over else ""
    print(
        f"  {'GPipe, straight':22} {speed_up:6.2f}    {'':9} {memory / 1e9:5.1f} GB  M {count:3}"
        f"{note}  (ours {ours.speed_up / speed_up:.2f} x)"
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
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--validation", type=Path, default=VALIDATION)
    folder = asked.parse_args().validation
    for whole in (False, True):
        for model in MODELS:
            comparison(model, folder, whole)
    print("Published: up to 3.23 x PipeDream's planner; 1.6 x GPipe's throughput, 12 % less memory")
    errors()
    search_seconds()


if __name__ == "__main__":
    main()
