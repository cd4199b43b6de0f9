"""Seconds and bytes of the stages of one choice by their layers: lines through a few figures of the
estimate, which are put right where a division is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.planner.autoshard.for_plans.stage_graph import leading_layers
from workbench.planner.search.joint.stage_choices import Strategies
from workbench.planner.search.joint.stage_division import Costs
from workbench.planner.search.joint.stage_estimates import Stage, StageEstimates, StageFigures

Figures = np.ndarray[Any, np.dtype[np.float64]]
"""`[figures, stages]`: seconds of a microbatch, seconds after the last one, bytes of each phase."""
SECONDS, AFTER, BYTES = 0, 1, slice(2, None)
Counts = np.ndarray[Any, np.dtype[np.int64]]
Variant = Sequence[Strategies]
"""Strategies of each stage."""


LOW = 4
"""Layers where lines are drawn, or more where the first stage has more that differ: of more, those
in between are alike.
"""
MOST = 0.8
"""Of an even share of layers, what a stage has at least."""
Again = tuple[Figures, Figures, Figures]


@dataclass
class StageLines:
    """Lines of every variant of one choice.

    Args:
        estimates: Of the choice.
        variants: Strategies of each stage, in some ways.
        num_layers: Of the model.
        recomputes: Whether layers may be recomputed.
    """

    estimates: StageEstimates
    variants: Sequence[Variant]
    num_layers: int
    recomputes: bool = True
    _plain: list[tuple[Figures, Figures]] = field(default_factory=list)
    """Of each variant: figures of `low` layers, and what a layer adds."""
    _again: dict[int, Again] = field(default_factory=dict)
    """Variant -> what the first recomputed layer adds, what another one does, and what it adds
    that all are; once asked for.
    """
    _exact: dict[tuple[int, int, int, int], Figures] = field(default_factory=dict)
    """(variant, stage, layers, recomputed) -> its figures."""
    _short: set[tuple[int, int, int]] = field(default_factory=set)
    """(variant, layers, recomputed) of stages shorter than `low` whose figures are known."""
    _missed: dict[tuple[int, int, int], Figures] = field(default_factory=dict)
    """(variant, stage, whether none, some or all are recomputed) -> what the line missed where it
    was last put right.
    """

    def __post_init__(self) -> None:
        for variant in self.variants:
            low = self._drawn(variant, self.low)
            self._plain.append((low, self._drawn(variant, self.low + 1) - low))

    @property
    def least(self) -> int:
        """Layers of the first stage: one more than those that no other stage has."""
        return 1 + leading_layers(self.estimates.plan.shape)

    @property
    def low(self) -> int:
        """Layers where lines are drawn."""
        return max(LOW, self.least)

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.estimates.stages

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.estimates.microbatches

    def least_seconds(self) -> float:
        """Of a microbatch on all stages, which by the lines none is below: all memory, and nothing
        exchanged.
        """
        drawn = np.array([[each[SECONDS] for each in own] for own in self._plain])
        layer = float(drawn[:, 1].min())
        ends = [0, -1] if self.stages > 1 else [0]
        bare = (drawn[:, 0, ends] - self.low * layer).min(0).sum()
        return float(bare + self.num_layers * layer)

    def least_bytes(self) -> float:
        """Of a rank, whatever is recomputed: an even share of what the lines say of any phase."""
        own = [self._even(at)[BYTES].min(0) for at in range(len(self.variants))]
        return float(np.min(own, axis=0).mean())

    def drop_worse(self, seconds: float) -> None:
        """Leave out variants that on no stage are both quick enough for a step of so many seconds
        and better than another one.
        """
        even = [self._even(at) for at in range(len(self.variants))]
        drawn = np.array([[own[SECONDS], own[BYTES].max(0)] for own in even])
        quick = np.any(MOST * self.microbatches * drawn[:, 0] < seconds, axis=1)
        kept: list[int] = []
        for at in drawn[:, 0].sum(1).argsort(kind="stable"):
            if quick[at] and not any((drawn[one] <= drawn[at]).all() for one in kept):
                kept.append(int(at))
        self.variants = [self.variants[at] for at in kept]
        self._plain = [self._plain[at] for at in kept]

    def _even(self, variant: int) -> Figures:
        """Figures of an even share of layers."""
        plain, layer = self._plain[variant]
        return plain + (self.num_layers / self.stages - self.low) * layer

    def table(self, memory: float) -> StageTable:
        """The fastest variant of each stage by its layers, that fits `memory` bytes of a rank."""
        most = self.num_layers - self.stages + 1
        least = most if self.stages == 1 else 1
        counts = np.arange(least, min(most, 2 * self.num_layers // self.stages + WIDER) + 1)
        found = [
            [self._fitting(variant, stage, counts, memory) for stage in range(self.stages)]
            for variant in range(len(self.variants))
        ]
        seconds, recomputed = (np.array([[one[k] for one in own] for own in found]) for k in (0, 1))
        return StageTable(counts, seconds, recomputed)

    def put_right(self, division: Sequence[tuple[int, int, int]], found: StageFigures) -> bool:
        """Take a division's own figures; whether they are what the lines said.

        Args:
            division: (variant, layers, recomputed) of each stage.
            found: What the estimate says of it.
        """
        exact, known = _figures(found), True
        for stage, (variant, layers, recomputed) in enumerate(division):
            counts = np.array([layers])
            said = self._said(variant, stage, counts, np.array([recomputed]))[:, 0, 0]
            if not np.allclose(said, exact[:, stage], rtol=1e-9, atol=0.0):
                known = False
                line = self._at(variant, stage, counts[:, None], np.array([[recomputed]]))
                extent = int(_extent(layers, recomputed))
                self._exact[variant, stage, layers, recomputed] = exact[:, stage]
                self._missed[variant, stage, extent] = exact[:, stage] - line[:, 0, 0]
        return known

    def _drawn(self, variant: Variant, layers: int, recomputed: int = 0) -> Figures:
        stages = [Stage(layers, own, recomputed) for own in variant]
        stages[0] = replace(stages[0], layers=max(layers, self.least))
        return _figures(self.estimates.figures(stages))

    def _recomputed(self, variant: int) -> Again:
        if variant not in self._again:
            own, (plain, _) = self.variants[variant], self._plain[variant]
            first, second, every = (self._drawn(own, self.low, count) for count in (1, 2, self.low))
            more = second - first
            self._again[variant] = first - plain, more, every - first - (self.low - 1) * more
        return self._again[variant]

    def _at(self, variant: int, stage: int, layers: Counts, recomputed: Counts) -> Figures:
        """Figures `[figures, ...]` of a stage by its line."""
        plain, layer = (each[:, stage, None, None] for each in self._plain[variant])
        own = plain + layer * (layers - self.low) + np.zeros(recomputed.shape)
        if not recomputed.any():
            return own
        first, more, every = (each[:, stage, None, None] for each in self._recomputed(variant))
        again = first + more * (recomputed - 1) + every * (recomputed == layers)
        return np.asarray(own + np.where(recomputed > 0, again, 0.0))

    def _said(self, variant: int, stage: int, counts: Counts, again: Counts) -> Figures:
        """Figures `[figures, counts, again]` of a stage, as far as is known."""
        own = self._at(variant, stage, counts[:, None], again[None, :])
        for extent in range(3):
            if (variant, stage, extent) in self._missed:
                missed = self._missed[variant, stage, extent]
                own += missed[:, None, None] * (_extent(counts[:, None], again[None, :]) == extent)
        for (v, i, layers, recomputed), exact in self._exact.items():
            if (v, i) == (variant, stage):
                own[:, *np.ix_(counts == layers, again == recomputed)] = exact[:, None, None]
        return own

    def _fitting(
        self, variant: int, stage: int, counts: Counts, memory: float
    ) -> tuple[Costs, Counts]:
        """(seconds, layers recomputed) by layers: as few recomputed as fit."""
        is_tight = self.recomputes and self._is_tight(variant, memory)
        again = np.arange(counts[-1] + 1 if is_tight else 1)
        if self.num_layers < self.low * self.stages:
            self._draw_short(variant, is_tight)
        own = self._said(variant, stage, counts, again)
        fits = (own[BYTES].max(0) <= memory) & (again[None, :] <= counts[:, None])
        fits &= (counts[:, None] >= self.least) | (stage > 0)
        fewest, rows = fits.argmax(1), np.arange(len(counts))
        # What follows the last microbatch counts as a share of each.
        seconds = own[SECONDS] + own[AFTER] / self.microbatches
        return np.where(fits.any(1), seconds[rows, fewest], np.inf), fewest

    def _draw_short(self, variant: int, is_tight: bool) -> None:
        """Figures of stages shorter than lines are drawn at, where most are."""
        for layers in range(1, self.low):
            for recomputed in range(layers + 1 if is_tight else 1):
                key = variant, layers, recomputed
                if key in self._short:
                    continue
                self._short.add(key)
                own = self._drawn(self.variants[variant], layers, recomputed)
                for stage in range(self.stages):
                    self._exact.setdefault((variant, stage, layers, recomputed), own[:, stage])

    def _is_tight(self, variant: int, memory: float) -> bool:
        """Whether it may not fit on a stage of twice an even share of layers."""
        plain, layer = self._plain[variant]
        apart = min(self.num_layers, 2 * self.num_layers / self.stages + WIDER) - self.low
        return bool((plain + apart * layer)[BYTES].max() > memory)


WIDER = 4
"""Layers that a stage may have beyond twice an even share."""


@dataclass(frozen=True)
class StageTable:
    """Stages of every variant, `[variants, stages, counts]`."""

    counts: Counts
    """Layers."""
    seconds: Costs
    """Of a microbatch, what follows the last one included; infinite where it does not fit."""
    recomputed: Counts

    def costs(self, num_layers: int) -> Costs:
        """The fastest, as `StageDivision` takes them."""
        stages = self.seconds.shape[1]
        found = np.full((stages, 2, 2, num_layers + 1), np.inf)
        for stage, own in enumerate(self.seconds.min(0)):
            ends = int(stage == 0), int(stage == stages - 1)
            found[stages - 1 - stage, *ends, self.counts] = own
        return found

    def division(self, layers: Sequence[int]) -> list[tuple[int, int, int]]:
        """(variant, layers, recomputed) of each stage that has these layers."""
        found = []
        for stage, count in enumerate(layers):
            at = int(count - self.counts[0])
            variant = int(self.seconds[:, stage, at].argmin())
            found.append((variant, count, int(self.recomputed[variant, stage, at])))
        return found


def _figures(found: StageFigures) -> Figures:
    phases = (found.phases[name] for name in sorted(found.phases))
    return np.array([found.seconds, sum(found.after.values()), *phases])


def _extent(layers: Any, recomputed: Any) -> Any:
    """0 where no layer is recomputed, 1 where some are, 2 where all are."""
    return (recomputed > 0) * (1 + (recomputed == layers))
