"""Lines of the stages of every choice: what choices of one search share is computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from workbench.costmodel.inputs.config import FixedConfig
from workbench.errors import refuse
from workbench.plan.operators.strategy_form import read_strategies
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.for_plans.plan_machine import machine_model
from workbench.planner.autoshard.for_plans.stage_graph import leading_layers
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.autoshard.plan_problem import tensor_bytes
from workbench.planner.search.joint.equal_stages import EqualDivision
from workbench.planner.search.joint.joint_plans import bare_plan
from workbench.planner.search.joint.joint_space import JointChoice
from workbench.planner.search.joint.stage_choices import StageChoices, Strategies
from workbench.planner.search.joint.stage_estimates import MeshPasses, StageEstimates
from workbench.planner.search.joint.stage_lines import StageLines, Variant
from workbench.planner.search.search_space import SearchSpace, plan_on_gpus


@dataclass
class ChoicePricing:
    """Stages of one model on one cluster.

    Args:
        space: What is searched.
        setting: Its GPUs and batch.
    """

    space: SearchSpace
    setting: FixedConfig
    _choices: dict[tuple[int, int, int], StageChoices] = field(default_factory=dict)
    _meshes: dict[int, GraphPricing] = field(default_factory=dict)
    _passes: dict[int, MeshPasses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = plan_on_gpus(self.space.base, self.setting)
        self.pinned = read_strategies(self.space.asked.strategy.operators)

    def lines(self, choice: JointChoice) -> list[StageLines]:
        """Of all its variants, those together that stages may mix: what passes between stages is
        split as the last norms before are, if these are split alike.

        Raises:
            PlanError: No plan has these sizes.
        """
        stages = self.setting.world_size // choice.submesh.ranks
        plan = bare_plan(self.space, self.setting, choice, stages).resolve()
        estimates = StageEstimates(
            plan, self._passes.setdefault(choice.submesh.tensor, MeshPasses())
        )
        alike: defaultdict[tuple[str | None, ...], list[Variant]] = defaultdict(list)
        for variant in self._variants(choice, stages):
            alike[tuple(own.get(NORM) for own in variant[:-1])].append(variant)
        layers, recomputes = self.base.shape.layers, "full" in self.space.recompute
        return [StageLines(estimates, own, layers, recomputes) for own in alike.values()]

    def equal_division(self, choice: JointChoice) -> tuple[EqualDivision, list[Variant]]:
        """Of a choice whose schedule has equal stages, with its variants.

        Raises:
            PlanError: No plan has these sizes.
        """
        ranks = self.setting.world_size // choice.submesh.ranks
        plan = bare_plan(self.space, self.setting, choice, ranks).resolve()
        passes = self._passes.setdefault(choice.submesh.tensor, MeshPasses())
        partition = plan.strategy.pipeline.partition
        assert isinstance(partition, list)
        leading = leading_layers(self.base.shape)
        if choice.submesh.tensor > 1 and partition[0] < leading:
            what = f"has {partition[0]} layers on the first stage, but {leading} without experts "
            raise refuse(
                "strategy.pipeline.partition", f"{what}are searched as one; legal: {leading}"
            )
        estimates, recomputes = StageEstimates(plan, passes), "full" in self.space.recompute
        variants = list(self._variants(choice, len(partition)))
        return EqualDivision(estimates, partition, recomputes), variants

    def _variants(self, choice: JointChoice, stages: int) -> Iterator[Variant]:
        """Strategies of the first stage, of those in between and of the last, as many times as any
        of them has choices.
        """
        if choice.submesh.tensor == 1 and not self.pinned:
            yield [{}] * stages
            return
        own = self._on(choice)
        if stages == 1:
            yield from ([one] for one in own.of(True, True))
            return
        inner = own.of(False, False)
        ends = [_beside(own.of(*end), inner) for end in ((True, False), (False, True))]
        for first, middle, last in zip_longest(ends[0], inner, ends[1]):
            one = middle or inner[0]
            yield [first or ends[0][0], *[one] * (stages - 2), last or ends[1][0]]

    def _on(self, choice: JointChoice) -> StageChoices:
        tensor, microbatches = choice.submesh.tensor, choice.microbatches(self.setting.global_batch)
        key = tensor, choice.sequences, microbatches
        if key not in self._choices:
            # Redistributions are priced once for all numbers of microbatches.
            pricing = replace(self._on_ranks(tensor), microbatches=microbatches, _costs={})
            length = self.base.training.sequence_length
            sizes = self.base.shape, choice.sequences, length
            self._choices[key] = StageChoices(*sizes, pricing, self.pinned)
        return self._choices[key]

    def _on_ranks(self, tensor: int) -> GraphPricing:
        if tensor not in self._meshes:
            machine = machine_model(self.base, tensor)
            mesh = logical_mesh(tensor, machine)
            self._meshes[tensor] = GraphPricing(mesh, machine, tensor_bytes(self.base))
        return self._meshes[tensor]


def _beside(ends: Sequence[Strategies], inner: Sequence[Strategies]) -> list[Strategies]:
    """Choices of an end of the model in the order of those between the ends: beside each one that
    splits norms alike, for what passes between stages is split as their norms are.
    """
    left, found = list(ends), []
    for middle in inner:
        alike = [one for one in left if one[NORM] == middle[NORM]]
        again = [one for one in ends if one[NORM] == middle[NORM]]
        found.append(next(iter([*alike, *again, *ends])))
        left = [one for one in left if one is not found[-1]]
    return found + left


NORM = "blocks.*.mlp_norm"
"""The last norm of a stage."""
