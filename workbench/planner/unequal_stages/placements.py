"""The three ways to give a stage its devices (DAPPLE, 2007.01045, section 4): fresh nodes first,
used nodes first, or spread over the used nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from workbench.planner.unequal_stages.stage_times import Stage
from workbench.planner.unequal_stages.topology import Counts, Ints, Topology

POLICIES = ("fresh", "append", "scatter")
APPEND = POLICIES.index("append")
"""What ranks in the order of the stages are: the policy that a plan can say."""


def placed(
    ends: Sequence[int], replicas: Sequence[int], policies: Sequence[int], topology: Topology
) -> tuple[Stage, ...]:
    """Stages that end before layers `ends`, each on devices as its policy gives them."""
    used = before = (0,) * topology.nodes
    first, stages = 0, []
    for end, count, policy in zip(ends, replicas, policies):
        before = place(used, before, POLICIES[policy], count, topology.devices)
        used = tuple(a + b for a, b in zip(used, before))
        stages.append(Stage(first, end, before))
        first = end
    return tuple(stages)


@lru_cache(maxsize=2**14)
def place(used: Counts, previous: Counts, policy: str, replicas: int, devices: int) -> Counts:
    """Devices by node that `policy` gives to a stage of `replicas` replicas.

    Of nodes with as many used devices, those with more of the stage before (`previous`) come first.
    """
    order = np.lexsort((-np.array(previous), -np.array(used)))
    ahead = np.array([used])[:, order]
    found = np.zeros(len(used), dtype=np.int64)
    found[order] = counts_of(devices - ahead, ahead > 0, policy, np.array([replicas]))[0, 0]
    return tuple(found.tolist())


def counts_of(free: Ints, used: NDArray[np.bool_], policy: str, wanted: Ints) -> Ints:
    """Devices by node that `policy` gives to stages of several sizes, after several occupancies.

    Args:
        free: Free devices by node, `[occupancies, nodes]`, nodes with most used ones first.
        used: Whether a device of the node is used, `[occupancies, nodes]`.
        policy: One of `POLICIES`.
        wanted: Replicas of the stage, `[sizes]`.

    Returns:
        `[occupancies, sizes, nodes]`; fewer than wanted where fewer are free.
    """
    early = ~used if policy == "fresh" else used
    turns = np.arange(int(free.max(initial=0)))
    order = np.where(
        early[:, :, None],
        _places(np.where(early, free, 0), turns, policy),
        _places(np.where(early, 0, free), turns, policy)
        + np.where(early, free, 0).sum(axis=1)[:, None, None],
    )
    order = np.where(turns < free[:, :, None], order, wanted.max())
    given = order[:, None, :, :] < wanted[None, :, None, None]
    found: Ints = given.sum(axis=3)
    return found


def _places(free: Ints, turns: Ints, policy: str) -> Ints:
    """Place in the order of a node's first, second ... device: node by node, or one of each in
    turn.
    """
    if policy != "scatter":
        found: Ints = (np.cumsum(free, axis=1) - free)[:, :, None] + turns
        return found
    has_more = free[:, :, None] > turns
    earlier = np.minimum(free[:, :, None], turns).sum(axis=1, keepdims=True)
    ahead: Ints = earlier + np.cumsum(has_more, axis=1) - has_more
    return ahead
