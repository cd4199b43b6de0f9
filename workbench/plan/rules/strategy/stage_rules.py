"""Legality of pipeline stages: their layers and their replicas."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import Pipeline, Strategy
from workbench.schedules.generators import SCHEDULES
from workbench.units import counted


def partition(plan: ResolvedPlan) -> Iterator[Problem]:
    """Stages that the layers suffice for, and a partition that gives out each of them."""
    pipeline, layers = plan.strategy.pipeline, plan.num_layers
    stages = pipeline.size * pipeline.chunks
    if isinstance(pipeline.partition, list) and len(pipeline.partition) == stages:
        yield from _partition(pipeline.partition, stages, layers)
    elif stages > layers:
        yield Problem(
            "strategy.pipeline.size",
            f"{pipeline.size} x chunks {pipeline.chunks} = {stages} stages, but "
            f"{plan.model_name} has {counted(layers, 'layer')}; "
            f"legal sizes: 1 to {layers // pipeline.chunks}",
        )
    elif not isinstance(pipeline.partition, list):  # "uniform" stays where it has no answer
        even = [p for p in range(1, layers + 1) if layers % (p * pipeline.chunks) == 0]
        yield Problem(
            "strategy.pipeline.partition",
            f"uniform, but {stages} stages do not divide {counted(layers, 'layer')}; "
            f"legal: balanced, a list, or pipeline.size {legal_sizes.near(pipeline.size, even)}",
        )
    else:
        yield from _partition(pipeline.partition, stages, layers)


def _partition(counts: list[int], stages: int, layers: int) -> Iterator[Problem]:
    if len(counts) != stages or sum(counts) != layers:
        yield Problem(
            "strategy.pipeline.partition",
            f"{counts} gives {counted(len(counts), 'stage')} and "
            f"{counted(sum(counts), 'layer')}; legal: {_adding_up_to(layers, stages)}, or balanced",
        )
    elif 0 in counts[1:-1]:
        yield Problem(
            "strategy.pipeline.partition",
            f"gives stage {counts.index(0, 1)} of {stages} no layer; legal: a layer or more, but "
            "for the first stage, which has the embedding, and the last, which has the head",
        )


def _adding_up_to(total: int, numbers: int) -> str:
    """One number is `total` itself."""
    return f"{numbers} numbers that add up to {total}" if numbers > 1 else f"[{total}]"


def has_own_stages(stack: str) -> bool:
    """Whether stages under a framework may have replicas and microbatches in flight of their own:
    none of those with a profile has them.
    """
    return stack == "workbench"


def replicas(plan: ResolvedPlan) -> Iterator[Problem]:
    """Stages with replicas of their own (DAPPLE): one chunk each, at most ZeRO-1 within each."""
    s, ranks = plan.strategy, plan.strategy.pipeline.replicas
    if ranks is None:
        return
    if not has_own_stages(s.stack):
        yield Problem(
            "strategy.pipeline.replicas",
            f"is {ranks}, but {s.stack} replicates all stages alike; legal: null, or "
            "strategy.stack: workbench",
        )
    yield from _ranks_of_stages(plan, ranks)
    if s.pipeline.distribution == "split" and plan.training.micro_batch < max(ranks):
        stage = ranks.index(max(ranks))
        yield Problem(
            "training.micro_batch",
            f"is {plan.training.micro_batch}, but the {max(ranks)} replicas of stage {stage} share "
            f"the sequences of a microbatch; legal: {max(ranks)} or more, or "
            "pipeline.distribution: round_robin",
        )
    yield from _with_own_replicas(plan.strategy, ranks)


def _with_own_replicas(s: Strategy, ranks: list[int]) -> Iterator[Problem]:
    """What of a strategy stages with replicas of their own take."""
    needs: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("pipeline.chunks", _chunks_of(s.pipeline), (1,)),
        ("tensor.algorithm", s.tensor.algorithm, ("1d",)),
        ("data.zero", s.data.zero, (0, 1)),
        ("data.shard", s.data.shard, ("all",)),
        ("data.offload", s.data.offload, ("none",)),
        ("expert.size", s.expert.size, (1,)),
    )
    for field, value, legal in needs:
        if value not in legal:
            yield Problem(
                f"strategy.{field}",
                f"is {value}, but each stage has replicas of its own, {ranks}; legal: "
                f"{' or '.join(map(str, legal))}, or no pipeline.replicas",
            )
    if s.placement[-1] != "pipeline":
        yield Problem(
            "strategy.placement",
            f"ends with {s.placement[-1]}, but each stage has replicas of its own, {ranks}; legal: "
            "pipeline last, or no pipeline.replicas",
        )


def _ranks_of_stages(plan: ResolvedPlan, ranks: list[int]) -> Iterator[Problem]:
    """As many numbers as stages, and all GPUs. Where tensor x context does not divide the GPUs,
    no numbers do, and `axis_rules` says so.
    """
    stages, sizes, gpus = plan.strategy.pipeline.size, plan.sizes, plan.world_size
    left, rest = divmod(gpus, sizes["tensor"] * sizes["context"])
    if rest or (len(ranks) == stages and sum(ranks) == left):
        return
    legal = f"{_adding_up_to(left, stages)} = "
    if left < stages:
        legal = f"at most {counted(left, 'stage')} of a rank each, "
    yield Problem(
        "strategy.pipeline.replicas",
        f"{ranks} gives {counted(len(ranks), 'stage')} and {counted(sum(ranks), 'rank')}; legal: "
        f"{legal}{counted(gpus, 'GPU')} / (tensor {sizes['tensor']} x context {sizes['context']})",
    )


def _chunks_of(pipeline: Pipeline) -> int:
    """Chunks a rank, as far as the schedule takes them: `schedule_rules` names the others."""
    schedule = SCHEDULES.get(pipeline.schedule)
    return 1 if schedule and schedule.max_chunks == 1 else pipeline.chunks
