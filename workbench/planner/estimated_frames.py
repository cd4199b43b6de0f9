"""The frames of an estimate, from figures of the ranks that it has rows of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.inputs.config import Array
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.profile import MOMENTS, Columns, columns_of, frame
from workbench.schedules.simulator import Interval


class ShownRanks(NamedTuple):
    """Ranks that an estimate has rows of, each with its stage; figures are in their order."""

    ranks: Sequence[int]
    stages: Sequence[int]

    def frame(self, kind: str, head: dict[str, Any], columns: dict[str, list[Any]]) -> Columns:
        """A frame from columns, of which `at` has each row's place among the ranks."""
        at = np.array(columns.pop("at"), dtype=int)
        arrays = {name: np.array(values) for name, values in columns.items()}
        arrays = {"stage": np.array(self.stages)[at], **arrays, "rank": np.array(self.ranks)[at]}
        return columns_of(kind, arrays | head, len(at))


def memory_frame(
    head: dict[str, Any],
    moments: Mapping[str, Mapping[str, Array]],
    host: Mapping[str, Array],
    shown: ShownRanks,
) -> Columns:
    """Of device memory by moment and category, and of host memory by category: bytes by rank.

    A row a rank, moment and category that is not nothing; host rows at every moment, for they
    do not move.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("at", "moment", "tier", "category", "bytes")
    }
    for moment in MOMENTS:
        for tier, table in (("device", moments[moment]), ("host", host)):
            for category, sizes in table.items():
                for at, size in enumerate(sizes.tolist()):
                    if size > 0:
                        for name, value in zip(columns, (at, moment, tier, category, round(size))):
                            columns[name].append(value)
    return shown.frame("memory", head, columns)


def timeline_frame(
    head: dict[str, Any], actions: Iterable[tuple[int, Interval]], shown: ShownRanks
) -> Columns:
    """A row an action, each with the place of its rank."""
    rows = list(actions)
    columns: dict[str, list[Any]] = {
        "at": [at for at, _ in rows],
        "stage": [i.action.stage for _, i in rows],
        "microbatch": [i.action.microbatch for _, i in rows],
        "action": [i.action.kind for _, i in rows],
        "start": [i.start for _, i in rows],
        "end": [i.end for _, i in rows],
    }
    return shown.frame("timeline", head, columns)


def collectives_frame(
    head: dict[str, Any], calls: Sequence[Sequence[CollectiveCall]], shown: ShownRanks
) -> Columns:
    """A row a kind of call, of each rank's `calls`."""
    names = ("axis", "kind", "group_size", "dtype", "bytes", "count", "action")
    rows = [(at, call) for at, own in enumerate(calls) for call in own]
    columns: dict[str, list[Any]] = {
        name: [getattr(call, name) for _, call in rows] for name in names
    }
    columns |= {name: [round(x) for x in columns[name]] for name in ("bytes", "count")}
    columns["at"] = [at for at, _ in rows]
    return shown.frame("collectives", head, columns)


def steps_frame(head: dict[str, Any], seconds: float, plan: ResolvedPlan) -> Columns:
    """The one estimated step of a complete plan."""
    tokens = plan.training.global_batch * plan.training.sequence_length
    row = head | {"rank": 0, "seconds": seconds, "tokens": tokens, "skipped": False}
    return Columns(row, 1, lambda: frame("steps", [row]))
