"""What binds a plan, in a sentence each: the stage and category that fill the card, the part that
takes the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.calibrated_plan import on_machine
from workbench.planner.explain.number_words import gib, of, percent, seconds
from workbench.planner.explain.plan_figures import stage_sums
from workbench.profile import Profile

NEAR = 0.9
"""Share of the card above which an allocator begins to retry."""
TOLD = 0.05
"""Share of a step from which a part beside the largest is told."""
NAMES = {
    "compute": "compute",
    "bubble": "the pipeline bubble",
    "tensor_comm": "exposed tensor-parallel communication",
    "context_comm": "exposed context-parallel communication",
    "expert_comm": "exposed expert-parallel communication",
    "data_comm": "exposed data-parallel communication",
    "pipeline_comm": "transfers between pipeline stages",
    "optimizer": "the optimizer",
    "offload": "transfers to and from host memory",
    "overhead": "the fixed cost of a step",
    "stall": "messages that wait for a host that stalls",
}


@dataclass(frozen=True)
class Binding:
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


def binding(full: ResolvedPlan, profile: Profile) -> Binding:
    """What binds the complete plan `full`, read off its estimate: memory where it does not fit,
    else a part of time.
    """
    full, _ = on_machine(full)
    over = max(stage_sums(profile, "peak")) > (profile.capacity_bytes or np.inf)
    parts: dict[str, float] = profile.notes["time"]
    largest = max(parts, key=lambda part: parts[part])
    return Binding(
        "memory" if over else largest, memory_sentence(full, profile), time_sentence(full, profile)
    )


def memory_sentence(full: ResolvedPlan, profile: Profile) -> str:
    """Stage, moment and category of the largest peak, and how far it is from the card."""
    sums = stage_sums(profile, "peak")
    stage = int(np.argmax(sums))
    peak, card = sums[stage], float(profile.capacity_bytes or 0)
    category, size = _largest(profile, stage)
    where = f"pipeline stage {stage} of {len(sums)}" if len(sums) > 1 else "every rank"
    room = f"{gib(card - peak)} to spare" if peak <= card else f"{gib(peak - card)} too much"
    near = ", so near the limit that the allocator may retry" if NEAR * card < peak <= card else ""
    return (
        f"Memory: {where} peaks at {gib(peak)} {_moment(profile, stage, peak)}, {of(peak / card)} "
        f"the "
        f"{gib(card)} of {full.gpu.name} ({room}{near}); its largest category is {category}, "
        f"{gib(size)} (estimated)."
    )


def _largest(profile: Profile, stage: int) -> tuple[str, float]:
    sizes = _peak(profile, stage)
    category = max(sizes, key=lambda name: sizes[name])
    return category, sizes[category]


def _peak(profile: Profile, stage: int) -> dict[str, float]:
    """Bytes by category at a stage's largest instant."""
    rows = profile.memory
    here = (
        (rows.moment.to_numpy() == "peak")
        & (rows.tier.to_numpy() == "device")
        & (rows.stage.to_numpy() == stage)
    )
    return dict(
        zip(
            map(str, rows.category.to_numpy()[here]),
            rows.bytes.to_numpy()[here].astype(float).tolist(),
        )
    )


def _moment(profile: Profile, stage: int, peak: float) -> str:
    """When the peak is: without activations the optimizer's; the frames tell whether it is where
    forward ends.
    """
    sums = stage_sums(profile, "forward_end")
    if stage < len(sums) and abs(sums[stage] - peak) < 1e-6 * peak:
        return "at the end of forward"
    return "in backward" if _peak(profile, stage).get("activations") else "in the optimizer step"


def time_sentence(full: ResolvedPlan, profile: Profile) -> str:
    """The part that takes most of the step, and the next, each with the numbers behind it."""
    parts: dict[str, float] = profile.notes["time"]
    total = sum(parts.values())
    first, *others = sorted(parts, key=lambda part: -parts[part])
    told = [
        f"{NAMES.get(first, first)} takes the largest part of a step, {seconds(parts[first])} of "
        f"{seconds(total)} "
        f"({percent(parts[first] / total)}){_because(first, full, profile)}"
    ]
    told += [
        f"{NAMES.get(part, part)} {percent(parts[part] / total)}{_because(part, full, profile)}"
        for part in others[:2]
        if parts[part] >= TOLD * total
    ]
    return f"Time: {'; '.join(told)} (estimated)."


def _because(part: str, full: ResolvedPlan, profile: Profile) -> str:
    parts: dict[str, float] = profile.notes["time"]
    if part == "compute":
        over_step = float(profile.notes["model_flops_utilisation"])
        busy = over_step * sum(parts.values()) / parts["compute"]
        return (
            f", at {percent(busy)} of the cards' peak in model FLOPs while it lasts, "
            f"{percent(over_step)} over the step"
        )
    if part == "bubble":
        return f", {_bubble(full)}"
    if part.endswith("_comm"):
        return _wire(part.removesuffix("_comm"), full, profile)
    if part == "offload":
        return f", over {full.gpu.pcie_gbs:g} GB/s a card"
    return (
        f", reading and writing its states at {full.gpu.bandwidth_gbs:g} GB/s"
        if part == "optimizer"
        else ""
    )


def _bubble(full: ResolvedPlan) -> str:
    """The schedule's bubble in words (FORMULAS of the papers: GPipe 2019, 2104.04473,
    2401.10241).
    """
    p, m = full.strategy.pipeline, full.num_microbatches
    if p.schedule in ("gpipe", "1f1b"):
        return f"(stages - 1) / microbatches = {p.size - 1} / {m} of the ideal for equal stages"
    if p.schedule == "interleaved":
        return (
            f"(stages - 1) / (chunks x microbatches) = {p.size - 1} / {p.chunks * m} of the "
            f"ideal for equal stages"
        )
    if p.schedule == "zb-h1":
        return f"(stages - 1) x (forward + input gradient - weight gradient), {p.size - 1} times"
    return f"as schedule {p.schedule} leaves it"


def _wire(axis: str, full: ResolvedPlan, profile: Profile) -> str:
    """What an axis moves, and over which link."""
    rows = profile.collectives
    here = rows.axis.to_numpy() == axis
    moved = rows.bytes.to_numpy()[here].astype(float) * rows["count"].to_numpy()[here].astype(float)
    ranks = rows["rank"].to_numpy()[here]
    most = max((moved[ranks == rank].sum() for rank in np.unique(ranks)), default=0.0)
    link = f"the network between nodes, {full.fabric.nic_gbs:g} GB/s a node"
    if not crosses(full, axis):
        link = f"the links inside a node, {full.gpu.link_gbs:g} GB/s a card"
    return f", {gib(most)} a rank and step over {link}"


def crosses(full: ResolvedPlan, axis: str) -> bool:
    """Whether groups of `axis` leave a node; experts are spread over data x context."""
    wanted = ("data", "context") if axis == "expert" else (axis,)
    stride = 1
    for name in full.strategy.placement:
        size = full.sizes[name]
        if name in wanted and size > 1 and stride * size > int(full.cluster.gpus_per_node or 1):
            return True
        stride *= size
    return False
