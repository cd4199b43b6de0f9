"""Legality of each parallel axis: sizes against the world, the model and each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from workbench.errors import Problem
from workbench.plan import schedule_table
from workbench.plan.model.head_split import padded_heads_per_rank
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import AXES, Pipeline, Plan
from workbench.schedules.generators import SCHEDULES, bounded_names
from workbench.schedules.round_robin import takers
from workbench.units import counted


def _world(plan: ResolvedPlan) -> Iterator[Problem]:
    sizes, gpus = plan.sizes, plan.world_size
    axes = [
        axis
        for axis in AXES
        if axis != "data" and (axis != "pipeline" or not plan.strategy.pipeline.replicas)
    ]
    others = math.prod(sizes[axis] for axis in axes)
    if gpus % others:
        product = " x ".join(f"{axis} {sizes[axis]}" for axis in axes)
        yield Problem(
            "cluster.gpus",
            f"is {gpus}, which {product} = {others} does not divide; "
            f"legal: gpus {legal_sizes.near(gpus, _multiples(gpus, others))}, or axes whose "
            f"product is "
            f"{legal_sizes.near(others, legal_sizes.divisors(gpus))}",
        )
    if plan.strategy.preset == "single" and sizes["data"] > 1:
        yield Problem(
            "cluster.gpus",
            f"is {gpus}, but preset single is one device; legal: 1, or another preset (ddp)",
        )


def _multiples(near: int, unit: int) -> list[int]:
    return [unit * k for k in range(max(1, near // unit), near // unit + 2)]


def _tensor(plan: ResolvedPlan) -> Iterator[Problem]:
    tensor, shape = plan.strategy.tensor, plan.shape
    if tensor.algorithm != "1d":
        yield from _grid(plan)
    elif isinstance(tensor.size, list):
        yield Problem(
            "strategy.tensor.size", f"is the grid {tensor.size}, but algorithm 1d takes one number"
        )
    elif reasons := legal_sizes.exceeds(shape, tensor.size):
        most = min(shape.heads, shape.ffn, shape.moe.ffn if shape.moe else shape.ffn)
        yield Problem(
            "strategy.tensor.size",
            f"is {tensor.size}, more than {', '.join(reasons)}; "
            f"legal for {shape.name}: 1 to {most}",
        )
    elif plan.strategy.operators and (reasons := legal_sizes.splits(shape, tensor.size)):
        near = legal_sizes.near(tensor.size, legal_sizes.tensor_sizes(shape, shape.heads))
        yield Problem(
            "strategy.tensor.size",
            f"is {tensor.size}, which does not divide {', '.join(reasons)}, and "
            f"strategy.operators pad nothing; legal for {shape.name}: {near}",
        )
    length = plan.training.sequence_length // plan.strategy.context.size
    if tensor.sequence and length % tensor.ranks:
        yield Problem(
            "strategy.tensor.sequence",
            f"splits {length} tokens over {tensor.ranks} ranks; legal: false, "
            "or a sequence_length that the tensor size divides",
        )


def _grid(plan: ResolvedPlan) -> Iterator[Problem]:
    tensor, shape = plan.strategy.tensor, plan.shape
    found = legal_sizes.grids(tensor.algorithm, plan.world_size, shape)
    if tensor.size not in found and tensor.ranks > 1:
        form = {"2d": "[q, q]", "2.5d": "[q, q, d] with d up to q", "3d": "[l, l, l]"}[
            tensor.algorithm
        ]
        widths = f"heads = {shape.heads}, hidden = {shape.hidden} and ffn = {shape.ffn}"
        yield Problem(
            "strategy.tensor.size",
            f"is {tensor.size}; algorithm {tensor.algorithm} takes {form} whose "
            f"product divides {plan.world_size} and whose sides divide {widths}; "
            f"legal: {', '.join(map(str, found))}",
        )
    parts, batch = legal_sizes.token_parts(tensor.algorithm, tensor.size), plan.training.micro_batch
    if batch % parts:
        yield Problem(
            "training.micro_batch",
            f"is {batch}, which {tensor.algorithm} grid {tensor.size} splits "
            f"into {parts}; legal: {legal_sizes.near(batch, _multiples(batch, parts))}",
        )
    if tensor.sequence:
        yield Problem(
            "strategy.tensor.sequence",
            f"is true, which algorithm {tensor.algorithm} already implies; legal: false",
        )


def _pipeline(plan: ResolvedPlan) -> Iterator[Problem]:
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


def _schedule(plan: ResolvedPlan) -> Iterator[Problem]:
    pipeline, microbatches = plan.strategy.pipeline, plan.num_microbatches
    name, chunks, p = pipeline.schedule, pipeline.chunks, pipeline.size
    if name not in SCHEDULES and not name.endswith(".csv"):
        yield Problem(
            "strategy.pipeline.schedule",
            f"'{name}' is not known; legal: {', '.join(SCHEDULES)}, or a .csv",
        )
    elif broken := schedule_table.problem(plan):
        yield from broken.problems
    if (schedule := SCHEDULES.get(name)) is None:
        return
    low, most = schedule.min_chunks, schedule.max_chunks
    if chunks < low or (most is not None and chunks > most):
        yield Problem(
            "strategy.pipeline.chunks",
            f"is {chunks}, but schedule {name} takes {f'{low} or more' if most is None else low}",
        )
    if schedule.takes_microbatches(p, microbatches):
        return
    made = f"{plan.training.global_batch} makes {counted(microbatches, 'microbatch')}"
    if schedule.needs_multiple_of_ranks:
        needs = f", which schedule {name} needs in multiples of pipeline.size = {p}; legal: "
        legal = _batches(plan, _multiples(microbatches, p))
    else:
        each = schedule.min_microbatches_per_rank
        needs = f"; schedule {name} needs {each} for each pipeline rank; legal: at least "
        legal = _batches(plan, [each * p])
    yield Problem("training.global_batch", made + needs + legal)


def has_own_stages(stack: str) -> bool:
    """Whether stages under a framework may have replicas and microbatches in flight of their own:
    none of those with a profile has them.
    """
    return stack == "workbench"


def _in_flight(plan: ResolvedPlan) -> Iterator[Problem]:
    """Microbatches in flight can be bounded where a warm-up of forwards decides them."""
    p, field = plan.strategy.pipeline, "strategy.pipeline.in_flight"
    if p.in_flight is None:
        return
    if p.schedule not in bounded_names():
        yield Problem(
            field,
            f"is {p.in_flight}, but schedule {p.schedule} keeps what its order asks for; legal: "
            f"null, or schedule {' or '.join(bounded_names())}",
        )
    elif p.size == 1:
        yield Problem(
            field,
            f"is {p.in_flight}, but pipeline.size is 1, and one stage runs each microbatch back "
            "before the next; legal: null, or pipeline.size 2 or more",
        )
    elif isinstance(p.in_flight, list):
        yield from _in_flight_by_stage(p, p.in_flight)
    if not has_own_stages(plan.strategy.stack):
        yield Problem(
            field,
            f"is {p.in_flight}, but how many {plan.strategy.stack} keeps is its own; legal: null, "
            "or strategy.stack: workbench",
        )


def _in_flight_by_stage(p: Pipeline, held: list[int]) -> Iterator[Problem]:
    """A stage gets its microbatches from the one before, which keeps them until they come back."""
    field = "strategy.pipeline.in_flight"
    if len(held) != p.size:
        yield Problem(
            field,
            f"{held} gives {counted(len(held), 'stage')}; legal: {p.size} numbers, or one for all "
            "stages",
        )
        return
    replicas = (p.replicas if p.is_round_robin else None) or [1] * p.size
    sums = [most * count for most, count in zip(held, replicas)]
    for stage, (before, after) in enumerate(pairwise(sums), 1):
        if after > before:
            own = " on all its replicas" if p.is_round_robin else ""
            yield Problem(
                field,
                f"{held} lets stage {stage} keep {after}{own}, but stage {stage - 1} keeps "
                f"{before}; legal: not above that of the stage before",
            )


def _replicas(plan: ResolvedPlan) -> Iterator[Problem]:
    """Stages with replicas of their own (DAPPLE): whole stages of one chunk, ZeRO-1 at most within
    each.
    """
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
    no numbers do, and `_world` says so.
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
    """Chunks a rank, as far as the schedule takes them: `_schedule` names the others."""
    schedule = SCHEDULES.get(pipeline.schedule)
    return 1 if schedule and schedule.max_chunks == 1 else pipeline.chunks


def _distribution(plan: ResolvedPlan) -> Iterator[Problem]:
    """Replicas of a stage that take microbatches in turn: they need a schedule for it, and a
    microbatch each.
    """
    p, field = plan.strategy.pipeline, "strategy.pipeline.distribution"
    if p.distribution == "split":
        return
    if p.replicas is None:
        yield Problem(
            field,
            "is round_robin, but no stage has replicas of its own; legal: split, or "
            "pipeline.replicas",
        )
        return
    if p.schedule not in takers():
        yield Problem(
            field,
            f"is round_robin, which schedule {p.schedule} has no order for; legal: split, or "
            f"schedule {', '.join(takers())}",
        )
    if plan.num_microbatches < (most := max(p.replicas)):
        yield Problem(
            "training.global_batch",
            f"{plan.training.global_batch} makes {counted(plan.num_microbatches, 'microbatch')}, "
            f"but the {most} replicas of stage {p.replicas.index(most)} take one each in turn; "
            f"legal: at least {_batches(plan, [most])}, or pipeline.distribution: split",
        )


def _batches(plan: ResolvedPlan, microbatches: list[int]) -> str:
    return ", ".join(str(m * plan.training.micro_batch * plan.sizes["data"]) for m in microbatches)


def _data(plan: ResolvedPlan) -> Iterator[Problem]:
    data, replicas = plan.strategy.data, plan.sizes["data"] * plan.sizes["context"]
    one_size = not plan.strategy.pipeline.replicas  # else `_replicas` says what is legal
    needs = (
        ("shard", one_size and data.shard != "all", 1),
        ("offload", one_size and data.offload != "none", 3 if data.offload == "parameters" else 1),
        ("keep_gathered", data.keep_gathered, 3),
        ("in_flight", data.in_flight != 2, 2),
    )
    for field, used, stage in needs:
        if used and data.zero < stage:
            yield Problem(
                f"strategy.data.{field}",
                f"is {getattr(data, field)}, which needs data.zero {stage} "
                f"or more; zero is {data.zero}",
            )
    if data.in_flight != 2 and plan.strategy.stack != "workbench":
        yield Problem(
            "strategy.data.in_flight",
            f"is {data.in_flight}, but how many {plan.strategy.stack} keeps is "
            "its own; legal: 2, or strategy.stack: workbench",
        )
    if one_size and isinstance(data.shard, int) and replicas % data.shard:
        yield Problem(
            "strategy.data.shard",
            f"is {data.shard}, which does not divide data x context = {replicas}; "
            f"legal: all, {legal_sizes.near(data.shard, legal_sizes.divisors(replicas))}",
        )


def _context(plan: ResolvedPlan) -> Iterator[Problem]:
    context, size = plan.strategy.context, plan.strategy.tensor.size
    tensor = size if isinstance(size, int) else size[0]  # heads lie along one side of a grid
    length, world = plan.training.sequence_length, plan.world_size
    if context.size == 1:
        return
    kind = (length, tensor, context.algorithm, context.ulysses_size)
    if context.size not in legal_sizes.context_sizes(plan.shape, context.size, *kind):
        heads = (
            f"the {padded_heads_per_rank(plan.shape, tensor)[0]} heads that tensor = {tensor} "
            f"leaves"
        )
        rule = {
            "ring": f"2 x size divides sequence_length = {length}",
            "ulysses": f"size divides {heads}, and sequence_length = {length}",
            "usp": f"ulysses_size = {context.ulysses_size} divides {heads} and size; size and "
            f"2 x size / ulysses_size divide sequence_length = {length}",
        }[context.algorithm]
        sizes = legal_sizes.context_sizes(plan.shape, world, *kind)
        near = legal_sizes.near(context.size, sizes)
        yield Problem(
            "strategy.context.size",
            f"is {context.size}; {context.algorithm}: {rule}; legal: {near}",
        )


def _expert(plan: ResolvedPlan) -> Iterator[Problem]:
    expert, tensor = plan.strategy.expert, plan.strategy.tensor
    size, split = expert.size, expert.tensor or tensor.ranks
    if tensor.ranks % split or (tensor.algorithm != "1d" and split != tensor.ranks):
        legal = legal_sizes.divisors(tensor.ranks) if tensor.algorithm == "1d" else [tensor.ranks]
        names = ", ".join(map(str, legal))
        yield Problem(
            "strategy.expert.tensor",
            f"is {split} with {tensor.algorithm} tensor parallelism of {tensor.ranks} ranks; "
            f"legal: {names}",
        )
        return
    replicas = plan.sizes["data"] * plan.sizes["context"] * (tensor.ranks // split)
    if size == 1:
        return
    if plan.shape.moe is None:
        yield Problem(
            "strategy.expert.size", f"is {size}, but {plan.shape.name} has no experts; legal: 1"
        )
    elif size not in legal_sizes.expert_sizes(plan.shape, replicas):
        near = legal_sizes.near(size, legal_sizes.expert_sizes(plan.shape, replicas))
        yield Problem(
            "strategy.expert.size",
            f"is {size}; it divides {plan.shape.moe.experts} experts and "
            f"data x context{' x tensor / expert.tensor' * (split != tensor.ranks)} = {replicas}; "
            f"legal: {near}",
        )


def _placement(plan: Plan) -> Iterator[Problem]:
    order = plan.strategy.placement
    if sorted(order) != sorted(AXES):
        yield Problem("strategy.placement", f"{order} must name each of {', '.join(AXES)} once")


RULES: tuple[Callable[[ResolvedPlan], Iterator[Problem]], ...] = (
    _world,
    _tensor,
    _pipeline,
    _schedule,
    _in_flight,
    _replicas,
    _distribution,
    _data,
    _context,
    _expert,
    _placement,
)
"""Every rule of this file; each takes a complete plan."""
WITHOUT_SHAPE: tuple[Callable[[ResolvedPlan], Iterator[Problem]], ...] = (_world, _data, _placement)
"""Those that ask nothing of the model."""
OF_LAYERS = (*WITHOUT_SHAPE, _pipeline, _schedule, _in_flight, _replicas)
"""Those that ask for no more than its layers."""
