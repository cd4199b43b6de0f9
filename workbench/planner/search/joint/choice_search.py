"""The best division of one choice into stages: a dynamic program over lines, whose answer is
estimated, until both agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.planner.search.joint.joint_plans import with_tied_table
from workbench.planner.search.joint.stage_division import StageDivision
from workbench.planner.search.joint.stage_estimates import Stage, StageFigures
from workbench.planner.search.joint.stage_lines import StageLines
from workbench.units import gib_text, seconds_text

Division = tuple[tuple[int, int, int], ...]
"""(variant, layers, recomputed) of each stage."""
ROUNDS = 12
"""Divisions that are estimated at most."""


@dataclass(frozen=True)
class Divided:
    """Stages with what the estimate says of them."""

    stages: tuple[Stage, ...]
    figures: StageFigures
    seconds: float
    """Of a step."""
    is_exact: bool
    """Whether the dynamic program knew its figures."""

    @property
    def peak(self) -> float:
        """Largest bytes of any rank."""
        return float(self.figures.peak.max())

    def reason(self, memory: float) -> str:
        """Why the stages have these layers."""
        each, peaks = self.figures.seconds, self.figures.peak
        slowest, again = int(each.argmax()), sum(stage.recomputed for stage in self.stages)
        most, least = (seconds_text(float(s)) for s in (each.max(), each.min()))
        own = f"stage {slowest} is the slowest with {most} a microbatch"
        own = f"{own}, the others take {least} or more" if each[1:].size else f"{most} a microbatch"
        layers = f"{again} of {sum(stage.layers for stage in self.stages)} layers recomputed"
        fits = fits_text(float(peaks.max()), memory)
        return f"{own}; {layers}, {fits}"


def fits_text(peak: float, memory: float) -> str:
    """How much of the memory that the risk leaves is taken."""
    return f"{gib_text(peak)} of {gib_text(memory)} within the risk (estimated)"


def best_division(lines: StageLines, memory: float) -> Divided | None:
    """The division whose step takes least of those within `memory` bytes; None where none fits."""
    best, tried = None, set()
    for _ in range(ROUNDS):
        division = _divided(lines, memory)
        if division is None or division in tried:
            return best
        tried.add(division)
        stages = stages_of(lines, division)
        figures = lines.estimates.figures(stages)
        is_exact = lines.put_right(division, figures)
        one = Divided(stages, figures, figures.step_seconds(lines.microbatches), is_exact)
        if one.peak <= memory and (best is None or one.seconds < best.seconds):
            best = one
        if is_exact:
            return best
    return best


def _divided(lines: StageLines, memory: float) -> Division | None:
    """By what is known of the lines."""
    table = lines.table(memory)
    costs = {1: table.costs(lines.num_layers)}  # in units of the submesh, which all stages have
    found = StageDivision(costs, lines.stages, lines.microbatches).best()
    return None if found is None else tuple(table.division(found.layers))


def stages_of(lines: StageLines, division: Division) -> tuple[Stage, ...]:
    """The stages of a division."""
    found = tuple(
        Stage(layers, lines.variants[variant][at], recomputed)
        for at, (variant, layers, recomputed) in enumerate(division)
    )
    plan = lines.estimates.plan
    is_tied = plan.shape.tied and plan.strategy.tensor.ranks > 1
    return with_tied_table(found) if is_tied else found
