"""Tables of what lives at a rehearsed peak, and of what a step leaves behind."""

from __future__ import annotations

from workbench.cli.tables import table
from workbench.cli.terminal import Grid
from workbench.profile import Profile
from workbench.units import bytes_text
from workbench.vocabulary import SHOWN_NAMES

COLUMNS = ("module", "action", "category", "bytes")


def living_tables(found: Profile) -> list[Grid]:
    """Of a rehearsal over time: allocations at the peak of the rank with the largest one; what
    lives after the second step and did not after the first, on every rank.
    """
    peaks = found.peak_bytes_by_rank
    ranks = {row["rank"] for row in found.notes["peak_allocations"]}
    most = max(sorted(ranks), key=lambda rank: peaks[rank])
    at_peak = table(f"Largest allocations at the peak of rank {most} (rehearsed)", COLUMNS)
    for row in found.notes["peak_allocations"]:
        if row["rank"] == most:
            at_peak.add_row(
                row["module"],
                row["action"],
                SHOWN_NAMES.get(row["category"], row["category"]),
                bytes_text(row["bytes"]),
            )
    leaks = table("Live after the second step and not after the first (rehearsed)", COLUMNS)
    for row in found.notes["leaks"]:
        where = f"{row['module']} (rank {row['rank']})"
        leaks.add_row(
            where,
            row["action"],
            SHOWN_NAMES.get(row["category"], row["category"]),
            bytes_text(row["bytes"]),
        )
    if not found.notes["leaks"]:
        leaks.add_row("nothing", "", "", "")
    return [at_peak, leaks]
