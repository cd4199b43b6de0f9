"""What the estimate says of the stages of a pipeline, without a plan for each of their divisions.

The figures are those of `costmodel`, of problem sizes whose stages have any layers and strategies:
what is divided by them and what is estimated of the plan that is written cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from workbench.costmodel.communication.collective_cost import axis_links
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.inputs.config import (
    Array,
    count_recomputed,
    fixed_config,
    searched_config,
    stage_homes,
    stages_of_each,
)
from workbench.costmodel.inputs.operator_strategies import OperatorStrategies
from workbench.costmodel.inputs.rank_workload import Workload, assemble_workload
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.costmodel.microbatch_durations import microbatch_durations
from workbench.costmodel.step_time import after_by_rank, step_overhead, step_time
from workbench.plan.operators.operator_sites import OUTPUT, Site, followed_by_positions
from workbench.plan.operators.strategy_form import Placement, parse_strategy, strategy_grid
from workbench.plan.rank_placement import first_ranks_of_stages, rank_place
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.operator_rules import axes_between, sites
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.search.joint.stage_choices import Strategies, of_layers


@dataclass(frozen=True)
class Stage:
    """One stage of a division."""

    layers: int
    strategies: Strategies
    recomputed: int = 0
    """Layers, its first, that are recomputed in backward."""


@dataclass(frozen=True)
class StageFigures:
    """What the estimate says of each stage, `[stages]`."""

    seconds: Array
    """Of a microbatch, forward and backward."""
    transfers: Array
    """Seconds of a microbatch's transfers that compute hides, which show where the pipeline fills
    and drains.
    """
    after: dict[str, Array]
    """Part of the step -> seconds after the last microbatch."""
    overhead: float
    """Seconds of a step that its size does not change."""
    phases: dict[str, Array]
    """Phase of the step -> most bytes of a rank."""

    @property
    def peak(self) -> Array:
        """Largest bytes at one instant."""
        return np.asarray(np.max(list(self.phases.values()), axis=0))

    def step_seconds(self, microbatches: int) -> float:
        """Of 1F1B: the slowest stage is busy, the others fill and drain the pipeline."""
        busy = (microbatches - 1) * self.seconds.max() + (self.seconds + self.transfers).sum()
        return float(busy + sum(each.max() for each in self.after.values()) + self.overhead)


@dataclass
class MeshPasses:
    """What plans of one model share: redistributions on each grid, and what ran for a stage."""

    _known: dict[tuple[int, ...], OperatorStrategies] = field(default_factory=dict)

    def on(self, plan: ResolvedPlan, grid: tuple[int, ...]) -> OperatorStrategies:
        """No strategies yet on a grid of tensor ranks."""
        if grid not in self._known:
            mesh = operator_mesh(plan, grid)
            self._known[grid] = OperatorStrategies(grid, {}, mesh.redistribution)
        return self._known[grid]


@dataclass
class StageEstimates:
    """Estimates of stages of one choice of the axes' sizes, batch and ZeRO stage.

    Args:
        plan: A complete plan of that choice, on balanced stages.
        shared: By all choices of one model on one cluster.
    """

    plan: ResolvedPlan
    shared: MeshPasses
    _placed: dict[tuple[int, tuple[int, ...]], tuple[tuple[str, Placement], ...]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.measured, self.constants = with_calibration(self.plan)
        ranks = first_ranks_of_stages(self.plan)
        self.places = [rank_place(self.plan, rank) for rank in ranks]
        self.fixed = fixed_config(self.measured)
        stages = [place.stage for place in self.places]
        self.searched = searched_config(self.measured, stages)
        self.ranks = self.plan.strategy.tensor.ranks
        length, sequences = self.fixed.sequence_length, self.plan.training.micro_batch
        self.sites = sites(self.plan.shape, sequences, self.ranks, length)
        self._alive: list[Strategies] = []

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return len(self.places)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        t, data = self.plan.training, self.plan.sizes["data"]
        return t.global_batch // (t.micro_batch * data)

    def figures(self, stages: Sequence[Stage]) -> StageFigures:
        """Of stages, first to last, whose layers need not add up to the model's."""
        w, constants = self._workload(stages), self.constants
        calls = step_collectives(w)
        d = microbatch_durations(w, constants, calls)
        after = after_by_rank(w, constants, d, calls, axis_links(w, constants))
        return StageFigures(
            d.passes,
            w.zeros + d.hidden_transfers,
            {part: w.zeros + x for part, x in after.items()},
            step_overhead(self.fixed.world_size, constants),
            peak_memory(w, constants).phases,
        )

    def step(self, stages: Sequence[Stage]) -> tuple[float, float]:
        """(seconds of a step under the plan's schedule, largest bytes of any rank) of all stages
        of the model.
        """
        w = self._workload(stages)
        peaks = peak_memory(w, self.constants).phases.values()
        return float(step_time(w, self.constants).seconds), float(np.max(list(peaks)))

    def _workload(self, stages: Sequence[Stage]) -> Workload:
        fixed = replace(
            self.fixed,
            partition=tuple(stage.layers for stage in stages),
            operators=self._operators(stages) if self.ranks > 1 else None,
        )
        again = [layer < stage.recomputed for stage in stages for layer in range(stage.layers)]
        recomputed, after = count_recomputed(np.array(again), fixed.partition)
        homes = stage_homes(fixed.pipeline, fixed.schedule, len(stages), fixed.table)
        own = np.concatenate(stages_of_each(homes, [place.stage for place in self.places]))
        searched = replace(
            self.searched, recomputed_layers=recomputed[own], layers_after_recomputed=after[own]
        )
        return assemble_workload(fixed, searched, self.places)

    def _operators(self, stages: Sequence[Stage]) -> OperatorStrategies:
        texts = {text for stage in stages for text in stage.strategies.values()}
        grid = strategy_grid(self.ranks, (parse_strategy(text, "strategy") for text in texts))
        placements: dict[str, Placement] = {}
        recomputed: set[str] = set()
        for start, stage in zip(_starts(stages), stages):
            own = self._placements(stage.strategies, grid)
            placements.update(each for each in own if not each[0].startswith("blocks."))
            placements.update(of_layers(own, start, stage.layers))
            recomputed |= {f"blocks.{start + layer}" for layer in range(stage.recomputed)}
        if self.plan.shape.positions == "learned":
            placements |= followed_by_positions(placements)
        bare = self.shared.on(self.plan, grid)
        between = axes_between(placements, [stage.layers for stage in stages])
        return replace(
            bare, placements=placements, recomputed=frozenset(recomputed), boundary=between
        )

    def _placements(
        self, strategies: Strategies, grid: tuple[int, ...]
    ) -> tuple[tuple[str, Placement], ...]:
        key = id(strategies), grid
        if key not in self._placed:
            self._alive.append(strategies)  # so that no other has its id
            self._placed[key] = tuple(_placed(self.sites, strategies, grid))
        return self._placed[key]


def _placed(
    known: Mapping[str, Site], strategies: Strategies, grid: tuple[int, ...]
) -> Iterator[tuple[str, Placement]]:
    last = max((name.split(".")[1] for name in known if name.startswith("blocks.")), key=int)
    for pattern, text in strategies.items():
        site, form = known[pattern.replace("*", last)], parse_strategy(text, pattern)
        yield pattern, site.placement(form, grid)
        if (output := site.output_placement(form, grid)) is not None:
            yield pattern + OUTPUT, output


def _starts(stages: Sequence[Stage]) -> Iterator[int]:
    return accumulate((stage.layers for stage in stages), initial=0)
