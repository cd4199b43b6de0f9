"""Ranks of a plan that do the same: their classes, and a rank's calls from another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from workbench.plan.model.block_linears import adapted_by_layer
from workbench.plan.rank_placement import rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.recompute_rules import recomputed_modules
from workbench.plan.schedule_table import executed
from workbench.rehearsal.call_trace import P2P, STORE, Call, changed

Axes = Mapping[str, tuple[int, ...]]
"""Axis of a rank's mesh -> global ranks along it."""
RING = "context"
"""Axes of this name send around a ring, so that a peer is so many places further; along others a
peer has an index of its own.
"""


def rank_classes(plan: ResolvedPlan, meshes: Sequence[Axes]) -> list[tuple[int, ...]]:
    """What decides each rank's calls: its place in the pipeline, and on a tensor grid, whose ranks
    send to different peers. Where stages have replicas of their own, each rank is a class.
    """
    if plan.strategy.pipeline.replicas:
        return [(rank,) for rank in range(plan.world_size)]
    names = ["pipeline"]
    if plan.strategy.tensor.algorithm != "1d" or plan.strategy.operators:
        names.append("tensor")
    return [tuple(axes[name].index(rank) for name in names) for rank, axes in enumerate(meshes)]


def followed_ranks(plan: ResolvedPlan, ranks: Sequence[int]) -> dict[int, int]:
    """Rank -> an earlier one of `ranks` whose actions do the same in another order; others are left
    out.
    """
    if plan.code or plan.profiled or plan.strategy.operators or plan.strategy.pipeline.replicas:
        return {}
    table, partition = executed(plan)
    kinds = list(_kinds_of_stages(plan, partition))
    first: dict[object, int] = {}
    found = {}
    for rank in ranks:
        place = rank_place(plan, rank)
        own = table.stages_of(place.stage)
        beside = [other in own for stage in own for other in (stage - 1, stage + 1)]
        same = first.setdefault((place[1:], *(kinds[stage] for stage in own), *beside), rank)
        if same != rank:
            found[rank] = same
    return found


def _kinds_of_stages(plan: ResolvedPlan, partition: Sequence[int]) -> Iterator[object]:
    """What decides what a stage does: of each of its layers whether it is an MoE layer, which of
    its modules are recomputed, and which have adapters; and whether it is the first or last stage.
    """
    dense = plan.shape.moe.first_dense if plan.shape.moe else plan.shape.layers
    recomputed: dict[int, list[str]] = {}
    for path in recomputed_modules(plan.strategy.recompute, plan.shape):
        _, layer, *within = path.split(".")
        recomputed.setdefault(int(layer), []).append(".".join(within))
    none: tuple[tuple[str, ...], ...] = ((),) * plan.shape.layers
    adapted = adapted_by_layer(plan.shape, plan.lora) if plan.lora else none
    first = 0
    for stage, number in enumerate(partition):
        layers = range(first, first := first + number)
        ends = stage == 0, stage == len(partition) - 1
        yield (
            ends,
            tuple(
                (index >= dense, tuple(recomputed.get(index, ())), adapted[index])
                for index in layers
            ),
        )


def translated(calls: Sequence[Call], of: Axes, to: Axes, example: int, rank: int) -> list[Call]:
    """The calls of `rank` from those of `example`, a rank of its class.

    Args:
        calls: Calls of `example`.
        of: Its mesh.
        to: The mesh of `rank`.
        example: Rank of `calls`.
        rank: Rank to translate to.
    """
    known: dict[tuple[str, tuple[int, ...], int, bool], tuple[tuple[int, ...], int]] = {}

    def change(call: Call) -> Call:
        key = call.group, call.ranks, call.peer, call.kind in P2P
        if key not in known:
            known[key] = _place(call, of, to, example, rank)
        ranks, peer = known[key]
        return call._replace(ranks=ranks, peer=peer)

    return changed(calls, change)


def _place(call: Call, of: Axes, to: Axes, example: int, rank: int) -> tuple[tuple[int, ...], int]:
    """(ranks of the group, the peer) as `rank` sees them."""
    if call.group in ("world", STORE):
        return call.ranks, call.peer
    axis = call.group.split(" ")[0] if call.group not in of else call.group
    theirs, own = of[axis], to[axis]
    ranks = tuple(own[theirs.index(member)] for member in call.ranks)
    if call.peer < 0:
        return ranks, call.peer
    index = theirs.index(call.peer)
    if axis.startswith(RING) and call.kind in P2P:
        index = (index - theirs.index(example) + own.index(rank)) % len(own)
    return ranks, own[index]
