"""The dimensions of a plan's parallelism, and the change that takes each away.

PanGu-alpha's five (2104.12369, section 4): data, operator-level (tensor) and pipeline parallelism,
optimizer sharding, recomputation. GPUs and batch stay, so that data parallelism takes the ranks
that another axis leaves; without data parallelism, one replica and its share of both stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.plan_changes import Change

WITHOUT_AXIS: dict[str, Change] = {
    "tensor": {
        "strategy.tensor.size": 1,
        "strategy.tensor.algorithm": "1d",
        "strategy.tensor.sequence": False,
    },
    "context": {
        "strategy.context.size": 1,
        "strategy.context.algorithm": "ring",
        "strategy.context.ulysses_size": 1,
    },
    "pipeline": {
        "strategy.pipeline.size": 1,
        "strategy.pipeline.schedule": "1f1b",
        "strategy.pipeline.chunks": 1,
        "strategy.pipeline.partition": "balanced",
        "strategy.pipeline.in_flight": None,
        "strategy.pipeline.replicas": None,
    },
}
"""What takes an axis away whose ranks data parallelism takes."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of a plan's parallelism.

    Attributes:
        name: With its size.
        change: What takes it away.
        ranks: What data parallelism grows by then.
    """

    name: str
    change: Change
    ranks: int = 1


def dimensions(full: ResolvedPlan) -> Iterator[Dimension]:
    """The dimensions that a plan has."""
    s, sizes = full.strategy, full.sizes
    for axis, change in WITHOUT_AXIS.items():
        if sizes[axis] > 1:
            yield Dimension(f"{axis} ({sizes[axis]})", change, sizes[axis])
    if s.tensor.sequence:
        yield Dimension("sequence parallel", {"strategy.tensor.sequence": False})
    if s.expert.size > 1:
        yield Dimension(f"expert ({s.expert.size})", {"strategy.expert.size": 1})
    if sizes["data"] > 1:
        yield _data(full)
    holders = max(s.pipeline.replicas or [sizes["data"]]) * sizes["context"]
    offload = {"strategy.data.offload": "none"} if s.data.offload != "none" else {}
    if s.data.zero and holders > 1:
        name = f"sharding (ZeRO-{s.data.zero})" + " and offload" * bool(offload)
        yield Dimension(name, {"strategy.data.zero": 0} | offload | _unsharded(full))
    if offload:
        yield Dimension(f"offload of {s.data.offload}", offload)
    if s.recompute not in ("none", []):
        yield Dimension("recomputation", {"strategy.recompute": "none"})


def _unsharded(full: ResolvedPlan) -> Change:
    """No groups that shard, where the plan has some."""
    return {} if full.strategy.data.shard == "all" else {"strategy.data.shard": "all"}


def _data(full: ResolvedPlan) -> Dimension:
    """One replica, on its own GPUs; experts are not spread then."""
    data, spread = full.sizes["data"], full.strategy.expert.size > 1
    change: Change = {
        "cluster.gpus": full.world_size // data,
        "cluster.nodes": None,
        "cluster.gpus_per_node": None,
        "training.global_batch": full.training.global_batch // data,
    }
    alone = {"strategy.expert.size": 1} if spread else {}
    alone |= _unsharded(full)
    return Dimension(f"data ({data})" + " and expert" * spread, change | alone)
