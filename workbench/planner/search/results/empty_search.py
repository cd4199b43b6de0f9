"""Why a search found nothing, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.costmodel.memory.reported_memory import (
    largest_peak_at_risk,
    probability_of_running_out,
)
from workbench.fields.bounds import RANKS
from workbench.plan.schema import Plan
from workbench.planner.framework_limits import framework_limits
from workbench.planner.memory_advice import plan_peak_bytes
from workbench.planner.plan_changes import gpus_with_more_memory
from workbench.planner.plan_conditions import Condition
from workbench.planner.search.constraints import condition_words, searched_values
from workbench.planner.search.least_memory import least_memory_plan
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.planner.search.search_space import SearchSpace, search_space
from workbench.planner.search.space_scan import SearchStats, scan_space
from workbench.units import GIB, bytes_text, gib_text

DOUBLINGS = 5
"""Of the GPUs, that are tried for a deadline."""


@dataclass(frozen=True)
class Left:
    """What a search with fewer conditions finds: how many plans, and the fastest of them."""

    feasible: int
    seconds: float
    peak_bytes: float


Look = Callable[[Sequence[Condition]], Left | None]
"""A search under some conditions; None where it finds nothing."""


def look_in(space: SearchSpace) -> Look:
    """The search of a space of which every plan is evaluated."""

    def look(conditions: Sequence[Condition]) -> Left | None:
        left = scan_space(space, conditions, "time", 1)
        if not left.feasible:
            return None
        best = left.best.top[0]
        return Left(left.feasible, best.seconds, best.peak)

    return look


def which_condition(space: SearchSpace, constraints: Sequence[Condition], look: Look) -> str:
    """Which condition emptied a search, and what would be found without it; "" where none did."""
    for number, c in enumerate(constraints):
        if left := look([*constraints[:number], *constraints[number + 1 :]]):
            fastest = (
                f"the fastest takes {left.seconds:.3g} s a step and "
                f"{bytes_text(left.peak_bytes)} (estimated)"
            )
            of = ", ".join(condition_words(searched_values(space, c)))
            values = f" (searched: {of})" if of else ""
            return (
                f"no plan meets '{c.text}'{values}; without it {left.feasible:,} do, {fastest}"
                f"{limit_words(space, c.field)}"
            )
    if len(constraints) > 1 and (left := look(())):
        quoted = ", ".join(f"'{c.text}'" for c in constraints)
        return f"no plan meets {quoted} together; without them {left.feasible:,} do"
    return ""


def why_none_fits(space: SearchSpace, seen: SearchStats) -> str:
    """Why no plan of a space is feasible, whatever the conditions."""
    gpu, s = space.fixed_configs[0].gpu, space.fixed_configs[0]
    if not seen.candidates:
        return (
            f"no combination of axes divides {s.world_size} GPUs and a batch of {s.global_batch} "
            f"sequences; change cluster.gpus or training.global_batch{limit_words(space)}"
        )
    least, stack = seen.least_peak_bytes, space.base.strategy.stack
    chance = probability_of_running_out(least, gpu.memory_gib * GIB, stack)
    allow = f" allow --risk {math.ceil(100 * chance) / 100:g},"
    riskier = allow if space.risk < chance < 0.5 else ""
    hosts = ""
    if seen.beyond_host:
        size = gib_text((space.base.cluster.fabric.host_memory_gib or 0) * GIB)
        hosts = f", {seen.beyond_host:,} fit the GPU but offload more than a host of {size} holds"
    return (
        f"no plan fits {gpu.name} of {gpu.memory_gib:.1f} GiB with a chance of running out of "
        f"memory of at most {space.risk:.0%}: the smallest of {seen.candidates:,}, offloading "
        f"among them, peaks at {least / GIB:.1f} GiB, a chance of {chance:.0%}{hosts} "
        f"(estimated);{riskier} change cluster.gpu, cluster.gpus, the sequence length or the model"
        f"{_hardware_that_fits(space)}"
    )


def _hardware_that_fits(space: SearchSpace) -> str:
    """The first doubling of the GPUs on which some plan fits, else the first larger GPU, of the
    same vendor if it can be; "" where none does.
    """
    asked, base = space.asked, space.base
    more = ({"cluster.gpus": base.world_size * 2**n} for n in range(1, DOUBLINGS + 1))
    larger = ({"cluster.gpu": gpu.name} for some in gpus_with_more_memory(base.gpu) for gpu in some)
    for change in (*more, *larger):
        gpus = change.get("cluster.gpus", base.world_size)
        if gpus > RANKS.most:
            continue
        plan = asked.replace(**change, **{"cluster.nodes": None, "cluster.fabric": None})
        if words := _least_on(plan, space.risk):
            return f"; {gpus:,} x {change.get('cluster.gpu', base.gpu.name)} would do: {words}"
    return ""


def _least_on(plan: Plan, risk: float) -> str:
    """The strategy of least memory and its peak; "" where it does not fit within the risk."""
    least = least_memory_plan(plan)
    if least is None:
        return ""
    full = least.resolve()
    peak = plan_peak_bytes(full)
    if peak > largest_peak_at_risk(risk, full.gpu.memory_gib * GIB, full.strategy.stack):
        return ""
    return f"{strategy_summary(least)}, {bytes_text(peak)} (estimated)"


def why_no_stages_fit(space: SearchSpace) -> str:
    """The same of the unequal space: there may be too few layers and sequences for the ranks, or
    none fits.
    """
    gpu, s, base = space.fixed_configs[0].gpu, space.fixed_configs[0], space.base
    if few := _too_few(space):
        return few
    if base.profiled:
        return (
            f"no stages on {s.world_size} {gpu.name} of {gpu.memory_gib:.1f} GiB fit the layers of "
            f"'{base.profiled.layer_profile}' and a batch of {s.global_batch} (estimated); change "
            f"cluster.gpu, cluster.gpus, training.global_batch or the model"
        )
    return (
        f"no stages on {s.world_size} {gpu.name} of {gpu.memory_gib:.1f} GiB fit the model and "
        f"microbatches of a batch of {s.global_batch} sequences with a chance of running out of "
        f"memory of at most {space.risk:.0%} (estimated); change cluster.gpus, the sequence "
        f"length or the model, or search --space default, which shards more{limit_words(space)}"
    )


def _too_few(space: SearchSpace) -> str:
    """Why no cut and replicas take every rank: each has a layer and a sequence; "" where some
    do.
    """
    s, base = space.fixed_configs[0], space.base
    layers = len(base.layer_profile.layers) if base.profiled else base.shape.layers
    tensor = max(t for t in space.tensor if isinstance(t, int) and s.world_size % t == 0)
    ranks, most = s.world_size // tensor, layers * s.global_batch
    if ranks <= most:
        return ""
    return (
        f"no stages take all of {s.world_size} GPUs: each of {ranks} replicas has a layer and a "
        f"sequence, and {layers} x {s.global_batch} (layers x training.global_batch) = {most}; "
        f"legal: cluster.gpus up to {most * tensor}, or training.global_batch from "
        f"{math.ceil(ranks / layers)}"
    )


def limit_words(space: SearchSpace, field: str = "") -> str:
    """What the framework cannot do about a field, or at all."""
    limits = framework_limits(space.base.strategy.stack)
    named = [
        str(limit)
        for limit in limits
        if not field
        or any(c.field.rpartition(".")[0] == field.rpartition(".")[0] for c in limit.when)
    ]
    return "".join(f"; {words}" for words in named)


def deadline_constraint(space: SearchSpace, days: float, tokens: float) -> Condition:
    """The longest step that trains the tokens in time."""
    longest = days * 86400 * space.batch * space.base.training.sequence_length / tokens
    return Condition(f"deadline of {days:g} days", "expected_seconds", "<=", longest)


def deadline_advice(
    plan: Plan, whole: SearchSpace, others: Sequence[Condition], days: float, tokens: float
) -> str:
    """The days of the fastest plan, and the first doubling of the GPUs that is in time; "" where no
    plan is left.
    """
    left = scan_space(whole, others, "time", 1)
    if not left.feasible:
        return ""
    takes = left.best.top[0].expected / deadline_constraint(whole, days, tokens).value * days
    needs = f"; it needs {takes:,.3g} days for {tokens:g} tokens"
    for more in range(1, DOUBLINGS + 1):
        gpus = plan.cluster.gpus * 2**more
        more_gpus = plan.replace(**{"cluster.gpus": gpus, "cluster.nodes": None})
        space = replace(search_space(more_gpus), risk=whole.risk)
        limit = deadline_constraint(space, days, tokens)
        if (
            gpus <= RANKS.most
            and (found := scan_space(space, [*others, limit], "time", 1)).feasible
        ):
            in_time = found.best.top[0].expected / limit.value * days
            return f"{needs}; {gpus:,} GPUs would do, in {in_time:,.3g} days (estimated)"
    return f"{needs}; {2**DOUBLINGS} times the GPUs would not do either (estimated)"
