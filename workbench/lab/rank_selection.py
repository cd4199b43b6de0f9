"""Which ranks to show one by one, and their labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from workbench.profile import Profile

MAX_RANKS_SHOWN = 16
"""Up to this many ranks every one is shown; beyond it a map, a band and the extremes."""


def int_or_none(value: object) -> int | None:
    """A frame's integer cell, or None where it is empty."""
    return None if value is None or value != value else int(str(value).split(".")[0])


def stages_by_rank(profile: Profile) -> dict[int, str]:
    """Rank -> its stages in words ('0', or '0+4' where a rank holds several), from the rows of the
    profile.
    """
    found: dict[int, set[int]] = {}
    for frame in (profile.memory, profile.timeline):
        for rank, stage in dict.fromkeys(zip(frame["rank"].tolist(), frame.stage.tolist())):
            if (one := int_or_none(rank)) is not None and (own := int_or_none(stage)) is not None:
                found.setdefault(one, set()).add(own)
    return {rank: "+".join(map(str, sorted(found[rank]))) for rank in sorted(found)}


def shown_ranks(profiles: Sequence[Profile]) -> dict[int, str]:
    """Ranks to draw one by one -> their labels.

    All of them up to `MAX_RANKS_SHOWN`. Beyond: one of each group of identical ranks where the
    instrument gives them, else the eight with the largest peak, the median and the smallest.
    """
    world = max((profile.world_size for profile in profiles), default=0)
    stages: dict[int, str] = {}
    for profile in profiles:
        stages |= stages_by_rank(profile)
    several = len(set(stages.values())) > 1
    if world <= MAX_RANKS_SHOWN:
        return {rank: rank_label(rank, stages if several else {}) for rank in range(world)}
    representative = next(
        (
            p.representative
            for p in profiles
            if 0 < len(set(p.representative.values())) <= MAX_RANKS_SHOWN
        ),
        None,
    )
    if representative:
        num_identical = Counter(representative.values())
        return {
            rank: rank_label(rank, stages if several else {}, num_identical[rank])
            for rank in sorted(set(representative.values()))
        }
    return {
        rank: rank_label(rank, stages if several else {})
        for rank in extreme_ranks(next((p.peak_bytes_by_rank for p in profiles), {}))
    }


def extreme_ranks(values: Mapping[int, float], worst: int = 8) -> list[int]:
    """The ranks with the `worst` largest values, the median and the smallest, in rank order."""
    order = sorted(values, key=lambda rank: (-values[rank], rank))
    return sorted({*order[:worst], *order[len(order) // 2 : len(order) // 2 + 1], *order[-1:]})


def rank_label(rank: int, stages: Mapping[int, str], identical: int = 1) -> str:
    """Label of a rank in a chart: 'rank 8 · stage 1 · ×8' where it stands for 8 ranks that are
    identical.
    """
    words = [f"rank {rank}"]
    if rank in stages:
        words.append(f"stage {stages[rank]}")
    if identical > 1:
        words.append(f"×{identical}")
    return " · ".join(words)
