"""What binds a plan, in a sentence each: the stage and category that fill the GPU, the part that
takes the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.plan.rank_placement import leaves_node, rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.explain.plan_figures import device_bytes_by_rank
from workbench.profile import Profile
from workbench.units import duration_text, gib_text, percent_text, risk_text, share_of_text
from workbench.vocabulary import SHOWN_NAMES

HIGH_MEMORY_SHARE = 0.9
"""Share of the GPU above which an allocator begins to retry."""
MIN_SHARE_SHOWN = 0.05
"""Share of a step from which a part beside the largest is named."""
PART_NAMES = {
    "compute": "compute",
    "bubble": "the pipeline bubble",
    "tensor_comm": "exposed tensor-parallel communication",
    "context_comm": "exposed context-parallel communication",
    "expert_comm": "exposed expert-parallel communication",
    "data_comm": "exposed data-parallel communication",
    "pipeline_comm": "transfers between pipeline stages",
    "optimizer": "the optimizer",
    "offload": "transfers to and from host memory",
    "reference": "the forward passes of the preference's reference",
    "overhead": "the fixed cost of a step",
    "stall": "messages that wait for a host that stalls",
}


@dataclass(frozen=True)
class Bottleneck:
    """The binding constraint (`memory`, or a part of the step), and the two sentences; figures are
    estimated.
    """

    constraint: str
    memory: str
    time: str

    @property
    def sentence(self) -> str:
        """The sentence about what binds."""
        return self.memory if self.constraint == "memory" else self.time


def find_bottleneck(full: ResolvedPlan, profile: Profile) -> Bottleneck:
    """What binds the complete plan `full`, read off its estimate: memory where it does not fit,
    else a part of time.
    """
    full, _ = with_calibration(full)
    over = max(device_bytes_by_rank(profile, "peak").values()) > (profile.capacity_bytes or np.inf)
    parts: dict[str, float] = profile.notes["time"]
    largest = max(parts, key=lambda part: parts[part])
    return Bottleneck(
        "memory" if over else largest, memory_sentence(full, profile), time_sentence(full, profile)
    )


def memory_sentence(full: ResolvedPlan, profile: Profile) -> str:
    """Stage, moment and category of the largest peak, and how far it is from the GPU."""
    sums = device_bytes_by_rank(profile, "peak")
    rank = max(sums, key=lambda one: sums[one])
    peak, capacity = sums[rank], float(profile.capacity_bytes or 0)
    category, size = _largest_category(profile, rank)
    stages = full.strategy.pipeline.size
    stage = rank_place(full, rank).stage
    where = f"pipeline stage {stage} of {stages}" if stages > 1 else "every rank"
    headroom = (
        f"{gib_text(capacity - peak)} to spare"
        if peak <= capacity
        else f"{gib_text(peak - capacity)} too much"
    )
    near = ""
    if HIGH_MEMORY_SHARE * capacity < peak <= capacity:
        near = ", so near the limit that the allocator may retry"
        if required := profile.notes.get("memory"):  # not of a layer profile
            risk = risk_text(required["probability_of_running_out"])
            near += f", out-of-memory risk {risk}"
    return (
        f"Memory: {where} peaks at {gib_text(peak)} {_moment_of_peak(profile, rank, peak)}, "
        f"{share_of_text(peak / capacity)} "
        f"the "
        f"{gib_text(capacity)} of {full.gpu.name} ({headroom}{near}); its largest category is "
        f"{SHOWN_NAMES.get(category, category)}, "
        f"{gib_text(size)} (estimated)."
    )


def _largest_category(profile: Profile, rank: int) -> tuple[str, float]:
    sizes = _peak_by_category(profile, rank)
    category = max(sizes, key=lambda name: sizes[name])
    return category, sizes[category]


def _peak_by_category(profile: Profile, rank: int) -> dict[str, float]:
    """Bytes by category at a rank's largest instant."""
    rows = profile.rows("memory", "rank", "category", "bytes", moment="peak", tier="device")
    return {str(category): float(size) for one, category, size in rows if one == rank}


def _moment_of_peak(profile: Profile, rank: int, peak: float) -> str:
    """When the peak is: without activations the optimizer's; the frames tell whether it is where
    forward ends.
    """
    if abs(device_bytes_by_rank(profile, "forward_end").get(rank, 0.0) - peak) < 1e-6 * peak:
        return "at the end of forward"
    return (
        "in backward"
        if _peak_by_category(profile, rank).get("activations")
        else "in the optimizer step"
    )


def time_sentence(full: ResolvedPlan, profile: Profile) -> str:
    """The part that takes most of the step, and the next, each with the numbers behind it."""
    parts: dict[str, float] = profile.notes["time"]
    total = sum(parts.values())
    first, *others = sorted(parts, key=lambda part: -parts[part])
    phrases = [
        f"{PART_NAMES.get(first, first)} takes the largest part of a step, "
        f"{duration_text(parts[first])} of "
        f"{duration_text(total)} "
        f"({percent_text(parts[first] / total)}){_part_reason(first, full, profile)}"
    ]
    phrases += [
        f"{PART_NAMES.get(part, part)} "
        f"{percent_text(parts[part] / total)}{_part_reason(part, full, profile)}"
        for part in others[:2]
        if parts[part] >= MIN_SHARE_SHOWN * total
    ]
    return f"Time: {'; '.join(phrases)} (estimated)."


def _part_reason(part: str, full: ResolvedPlan, profile: Profile) -> str:
    parts: dict[str, float] = profile.notes["time"]
    if part == "compute":
        over_step = float(profile.notes["model_flops_utilisation"])
        busy = over_step * sum(parts.values()) / parts["compute"]
        return f", MFU {percent_text(busy)} in compute, {percent_text(over_step)} overall"
    if part == "bubble":
        return f", {_bubble_formula(full)}"
    if part.endswith("_comm"):
        return _traffic_text(part.removesuffix("_comm"), full, profile)
    if part == "offload":
        return f", over {full.gpu.pcie_gbs:g} GB/s a GPU"
    return (
        f", reading and writing its states at {full.gpu.bandwidth_gbs:g} GB/s"
        if part == "optimizer"
        else ""
    )


def _bubble_formula(full: ResolvedPlan) -> str:
    """The schedule's bubble in words (papers: GPipe 1811.06965, 2104.04473,
    2401.10241).
    """
    p, m = full.strategy.pipeline, full.num_microbatches
    if p.in_flight is not None:
        return f"as schedule {p.schedule} with in_flight {p.in_flight} leaves it"
    if p.schedule in ("gpipe", "1f1b", "eager-1f1b"):
        return f"(stages - 1) / microbatches = {p.size - 1} / {m}"
    if p.schedule == "interleaved":
        return f"(stages - 1) / (chunks x microbatches) = {p.size - 1} / {p.chunks * m}"
    if p.schedule == "zb-h1":
        return f"(stages - 1) x (forward + input gradient - weight gradient), {p.size - 1} times"
    return f"as schedule {p.schedule} leaves it"


def _traffic_text(axis: str, full: ResolvedPlan, profile: Profile) -> str:
    """What an axis moves, and over which link."""
    rows = profile.collectives
    here = rows.axis.to_numpy() == axis
    moved = rows.bytes.to_numpy()[here].astype(float) * rows["count"].to_numpy()[here].astype(float)
    ranks = rows["rank"].to_numpy()[here]
    most = max((moved[ranks == rank].sum() for rank in np.unique(ranks)), default=0.0)
    link = f"the network between nodes, {full.fabric.nic_gbs:g} GB/s a node"
    if not leaves_node(full, axis):
        link = f"the links inside a node, {full.gpu.link_gbs:g} GB/s a GPU"
    return f", {gib_text(most)} a rank and step over {link}"
