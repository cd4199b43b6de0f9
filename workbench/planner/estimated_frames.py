"""The frames of an estimate, from figures by rank that is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from workbench.costmodel.communication.collective_call import CollectiveCall
from workbench.costmodel.inputs.config import Array
from workbench.plan.rank_placement import rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.profile import MOMENTS, Columns, columns_of, frame


class ShownRanks(NamedTuple):
    """The ranks that an estimate has rows of, and their pipeline ranks."""

    ranks: list[int]
    stages: list[int]

    @classmethod
    def of(cls, plan: ResolvedPlan, ranks: list[int]) -> ShownRanks:
        """Ranks of a complete plan."""
        return cls(ranks, [rank_place(plan, rank).stage for rank in ranks])

    def frame(self, kind: str, head: dict[str, Any], columns: dict[str, list[Any]]) -> Columns:
        """A frame from columns, of which `at` has each row's place among `ranks`."""
        at = np.array(columns.pop("at"), dtype=int)
        arrays = {name: np.array(values) for name, values in columns.items()}
        arrays = {"stage": np.array(self.stages)[at], **arrays, "rank": np.array(self.ranks)[at]}
        return columns_of(kind, arrays | head, len(at))


def memory_frame(
    head: dict[str, Any],
    moments: Mapping[str, Mapping[str, Array]],
    beyond: Mapping[str, Mapping[str, Array]],
    shown: ShownRanks,
    always: str = "",
) -> Columns:
    """A row a rank, moment and category that is not nothing, or `always`; those of other tiers at
    every moment, for they do not move.

    Args:
        head: Cells that every row has.
        moments: Moment -> category -> bytes on the device, by shown rank.
        beyond: Tier (host, disk) -> category -> bytes there, by shown rank.
        shown: The ranks.
        always: A category whose rows are kept where they are 0.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("at", "moment", "tier", "category", "bytes")
    }
    for moment in MOMENTS:
        for tier, table in (("device", moments[moment]), *beyond.items()):
            for category, sizes in table.items():
                for at, size in enumerate(sizes.tolist()):
                    if size > 0 or category == always:
                        for name, value in zip(columns, (at, moment, tier, category, round(size))):
                            columns[name].append(value)
    return shown.frame("memory", head, columns)


def collectives_frame(
    head: dict[str, Any], calls: list[list[CollectiveCall]], shown: ShownRanks
) -> Columns:
    """A row a kind of call, from each shown rank's `calls`."""
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
