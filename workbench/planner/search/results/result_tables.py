"""What a search found, for people: its best plans and its front as rows, text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.planner.search.results.strategy_summary import by_stage, strategy_summary
from workbench.planner.table_text import aligned_lines, captioned_html_table
from workbench.units import (
    days_text,
    dollars_text,
    gib_text,
    interval_text,
    risk_text,
    seconds_text,
)
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.planner.search.results.search_result import Candidate, SearchResult
    from workbench.planner.search.results.stage_figures import StageFigures
    from workbench.planner.unequal_stages.other_planners import PlannerFigures

CANDIDATE_HEADS = (
    "step time",
    "90 % interval",
    "peak memory",
    "OOM risk",
    "tokens/s",
    "MFU",
    "published",
    "GPUs",
    "strategy",
)
STAGE_HEADS = ("microbatches", "latency model", "ACR", "speed-up")
"""Of the unequal space: the step by DAPPLE's latency model, the activation-communication ratio, and
the compute of one GPU over the step.
"""
BASELINE_HEADS = (
    "planner",
    "latency model",
    "speed-up",
    "states, activations",
    "microbatches",
    "replicas",
)
BASELINE_TITLE = (
    "Other planners on the layers of the first plan, all by the latency model, which counts less "
    "than the step time above (estimated)"
)
OPTIONAL_HEADS = ("tokens/s", "published", "MFU", "90 % interval")
"""What a narrow table leaves out first."""
SHOWN_SLOWDOWN = 1.01
"""Slow-down by the allocator's retries from which on it is shown."""
MAX_FRONT_ROWS = 12
FRONT_TITLE = "Less memory for more time: none of these is beaten in both (estimated)"
STAGES_FRONT_TITLE = (
    "Less memory for more time: none of these is beaten in both by another that was estimated"
)
OBJECTIVE_WORDS = {"gpus": "number of GPUs"}
"""Objectives whose name is no phrase."""


def search_text(found: SearchResult) -> str:
    """How much was searched, and why nothing was found where nothing was."""
    less = ""
    if found.top and found.gpus and found.top[0].plan.world_size < found.gpus:
        less = (
            f"The first uses {found.top[0].plan.world_size} of {found.gpus} GPUs: a token "
            f"takes fewer GPU-hours, "
        )
        less += (
            f"for fewer GPUs wait less for one another; --where gpus={found.gpus} keeps them all.\n"
        )
    why = [f"the first plan: {found.top[0].reason}"] if found.top and found.top[0].reason else []
    lines = [f"{less}{_searched(found)}", *why, *published_lines(found)]
    times = found.layer_times and f"layer times: {found.layer_times}"
    return "\n".join(
        [*lines, *found.every_note, *filter(None, (times, found.assumed, found.empty))]
    )


def _searched(found: SearchResult) -> str:
    if found.of_stages:
        return (
            f"{found.candidates:,} combinations of tensor size, recomputation and microbatches in "
            f"{found.seconds:.2f} s; of the plans with their best stages that were estimated "
            f"{format(found.feasible, ',') if found.feasible else 'none'} meet every condition"
        )
    if found.divided is not None:
        meeting = format(found.feasible, ",") if found.feasible else "none"
        return (
            f"{found.candidates:,} choices of submesh, microbatch and ZeRO stage were divided into "
            f"stages in {found.seconds:.2f} s; of the {found.divided:,} plans of their best "
            f"divisions that were estimated {meeting} meet every condition"
        )
    rate = f"{found.seconds:.2f} s ({found.rate:,.0f} a second)"
    return f"{found.candidates:,} legal plans in {rate}, {found.feasible:,} meet every condition"


def published_lines(found: SearchResult) -> list[str]:
    """What was published near the first plan, and what it is far in from there."""
    if not found.top or not found.top[0].published:
        return []
    first = found.top[0]
    near = first.published
    lines = [
        f"best published MFU on {_gpu_name(first)} near this scale: {near['highest_mfu']:.1%}, "
        f"{near['highest_mfu_of']}"
        if near["highest_mfu"] is not None
        else "no step was published on this GPU, in this precision, near its scale"
    ]
    lines += [f"the first plan's {first.promise}"] if first.promise else []
    far = near["extrapolates"]
    lines.append(f"nearest measured step: {near['nearest']}")
    return [*lines, f"error may be larger: {far}"] if far else lines


def _gpu_name(one: Candidate) -> str:
    gpu = one.plan.cluster.gpu
    return gpu if isinstance(gpu, str) else gpu.name


def search_tables(found: SearchResult) -> list[tuple[str, Sequence[Candidate]]]:
    """(title, plans) of what was found; a long front is thinned evenly, both its ends kept."""
    if not found.top:
        return []
    front = STAGES_FRONT_TITLE if found.of_stages else FRONT_TITLE
    return [
        (f"Best by {OBJECTIVE_WORDS.get(found.objective, found.objective)} (estimated)", found.top),
        (front, thin_front(found.pareto, found.most)),
    ]


def thin_front(front: Sequence[Candidate], most: int = MAX_FRONT_ROWS) -> Sequence[Candidate]:
    """At most `most` of the front, and `MAX_FRONT_ROWS`, its ends among them."""
    last, most = len(front) - 1, min(most, MAX_FRONT_ROWS)
    if last < most or most == 1:
        return front[:most]
    return [front[round(i * last / (most - 1))] for i in range(most)]


def table_heads(found: SearchResult) -> tuple[str, ...]:
    """Headings: with days and cost where tokens were asked for, and what is known of stages."""
    more = STAGE_HEADS if found.of_stages else ()
    bill = ("time", "cost") if found.tokens else ()
    return (*CANDIDATE_HEADS[:-1], *more, *bill, CANDIDATE_HEADS[-1])


def table_row(found: SearchResult, one: Candidate) -> tuple[str, ...]:
    """One row under `table_heads`."""
    figures, bill = candidate_cells(one), found.bill(one)
    more = _stage_cells(one.stages) if one.stages else ()
    if not bill:
        return (*figures[:-1], *more, figures[-1])
    price = "–" if bill["dollars"] is None else dollars_text(bill["dollars"])
    return (*figures[:-1], *more, days_text(bill["days"] or 0.0), price, figures[-1])


def _stage_cells(stages: StageFigures) -> tuple[str, ...]:
    ratio = stages.activation_communication_ratio
    seconds, speed_up = seconds_text(stages.latency_seconds), f"{stages.speed_up:.1f}x"
    return str(stages.microbatches), seconds, f"{ratio:.2g}", speed_up


def baseline_row(one: PlannerFigures) -> tuple[str, ...]:
    """One row under `BASELINE_HEADS`."""
    return (
        one.name,
        "does not fit" if one.seconds is None else seconds_text(one.seconds),
        "–" if one.speed_up is None else f"{one.speed_up:.1f}x",
        "–" if one.memory_bytes is None else gib_text(one.memory_bytes),
        "–" if one.microbatches is None else str(one.microbatches),
        by_stage(one.replicas),
    )


def candidate_cells(one: Candidate) -> tuple[str, ...]:
    """One row under `CANDIDATE_HEADS`."""
    rate, best = one.step_tokens / one.seconds, one.published.get("highest_mfu")
    same = f" (same: {', '.join(one.twins)})" if one.twins else ""
    retries = f" x{one.slowdown:.2f}" if one.slowdown >= SHOWN_SLOWDOWN else ""
    return (
        f"{seconds_text(one.seconds)}{retries}",
        interval_text(one.interval) if one.interval else "–",
        gib_text(one.peak_bytes),
        "–" if one.risk is None else risk_text(one.risk),
        f"{rate:,.0f}",
        "–" if one.mfu is None else f"{one.mfu:.1%}{' above' if one.promise else ''}",
        "–" if best is None else f"{best:.1%}",
        str(one.plan.world_size),
        strategy_summary(one.plan) + same,
    )


def search_result_text(found: SearchResult) -> str:
    """The tables and what was searched, as lines."""
    lines: list[str] = []
    for title, plans in search_tables(found):
        rows = [table_heads(found), *(table_row(found, one) for one in plans)]
        lines += [title, *aligned_lines(rows, left=len(rows[0]) - 1), ""]
    if found.baselines:
        rows = [BASELINE_HEADS, *map(baseline_row, found.baselines)]
        lines += [BASELINE_TITLE, *aligned_lines(rows, left=0), ""]
    return "\n".join([*lines, search_text(found)])


def as_html(found: SearchResult) -> str:
    """The tables and what was searched, for a notebook."""
    shown = "".join(
        captioned_html_table(title, table_heads(found), (table_row(found, one) for one in plans))
        for title, plans in search_tables(found)
    )
    if found.baselines:
        rows = map(baseline_row, found.baselines)
        shown += captioned_html_table(BASELINE_TITLE, BASELINE_HEADS, rows)
    return shown + "".join(f"<p>{escaped(line)}</p>" for line in search_text(found).split("\n"))
