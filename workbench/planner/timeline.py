"""The step as a picture: the schedule's table, simulated with each pipeline rank's estimated durations."""

from __future__ import annotations

from workbench.planner.step import Durations
from workbench.planner.workload import Workload
from workbench.schedules import Timeline, generate, names, simulate

ACTIONS = 1536
"""Most actions that are simulated; what a longer step adds only repeats."""


def timeline(w: Workload, d: Durations) -> tuple[Timeline | None, int]:
    """(timeline of one plan, microbatches in it); None where the schedule has no generator or fills too slowly."""
    s = w.setting
    whole, turn = int(w.microbatches), w.pipeline if s.schedule == "interleaved" else 1
    microbatches = min(whole, ACTIONS // (2 * w.pipeline * s.chunks) // turn * turn)
    if s.schedule not in names() or microbatches < min(whole, 2 * w.pipeline):
        return None, 0
    table = generate(s.schedule, w.pipeline, microbatches, s.chunks)
    seconds = {"F": d.forward, "B": d.backward, "I": d.backward - d.weight, "W": d.weight}
    placed = list(table.placement)
    by_stage = {kind: (by_rank / s.chunks)[placed].tolist() for kind, by_rank in seconds.items()}
    return simulate(table, by_stage), microbatches
