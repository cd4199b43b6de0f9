"""What a search found, for people: its best plans and its front as rows, text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.planner.search.strategy_summary import strategy_summary
from workbench.planner.table_text import aligned_lines, captioned_html_table
from workbench.units import days_text, gib_text, interval_text, seconds_text
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.planner.search.search import Candidate, SearchResult

CANDIDATE_HEADS = (
    "step time",
    "90 % interval",
    "peak memory",
    "runs out",
    "tokens/s",
    "MFU",
    "published",
    "GPUs",
    "strategy",
)
OPTIONAL_HEADS = ("tokens/s", "published")
"""What a narrow table leaves out first."""
SHOWN_SLOWDOWN = 1.01
"""Slow-down by the allocator's retries from which on it is shown."""
MAX_FRONT_ROWS = 12
FRONT_TITLE = "Less memory for more time: none of these is beaten in both (estimated)"


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
    rate = (
        less
        + f"{found.candidates:,} legal plans in {found.seconds:.2f} s ({found.rate:,.0f} a second)"
    )
    lines = [f"{rate}, {found.feasible:,} meet every condition", *published_lines(found)]
    return "\n".join([*lines, *filter(None, (found.assumed, found.empty))])


def published_lines(found: SearchResult) -> list[str]:
    """What was published near the first plan, and what it is far in from there."""
    if not found.top or not found.top[0].published:
        return []
    first = found.top[0]
    near = first.published
    lines = [
        f"highest published MFU near its scale: {near['highest_mfu']:.1%}, {near['highest_mfu_of']}"
        if near["highest_mfu"] is not None
        else "no step was published on this GPU, in this precision, near its scale"
    ]
    lines += [f"the first plan's {first.promise}"] if first.promise else []
    far = near["extrapolates"]
    lines.append(f"nearest measured step: {near['nearest']}")
    return [*lines, f"extrapolates: {far}"] if far else lines


def search_tables(found: SearchResult) -> list[tuple[str, Sequence[Candidate]]]:
    """(title, plans) of what was found; a long front is thinned evenly, both its ends kept."""
    if not found.top:
        return []
    return [
        (f"Best by {found.objective} (estimated)", found.top),
        (FRONT_TITLE, thin_front(found.pareto, found.most)),
    ]


def thin_front(front: Sequence[Candidate], most: int = MAX_FRONT_ROWS) -> Sequence[Candidate]:
    """At most `most` of the front, and `MAX_FRONT_ROWS`, its ends among them."""
    last, most = len(front) - 1, min(most, MAX_FRONT_ROWS)
    if last < most or most == 1:
        return front[:most]
    return [front[round(i * last / (most - 1))] for i in range(most)]


def table_heads(found: SearchResult) -> tuple[str, ...]:
    """Headings: with days and cost where tokens were asked for."""
    return (
        (*CANDIDATE_HEADS[:-1], "time", "cost", CANDIDATE_HEADS[-1])
        if found.tokens
        else CANDIDATE_HEADS
    )


def table_row(found: SearchResult, one: Candidate) -> tuple[str, ...]:
    """One row under `table_heads`."""
    figures, bill = candidate_cells(one), found.bill(one)
    if not bill:
        return figures
    price = "–" if bill["dollars"] is None else f"${bill['dollars']:,.0f}"
    return (*figures[:-1], days_text(bill["days"] or 0.0), price, figures[-1])


def candidate_cells(one: Candidate) -> tuple[str, ...]:
    """One row under `CANDIDATE_HEADS`."""
    rate, best = one.step_tokens / one.seconds, one.published.get("highest_mfu")
    retries = f" x{one.slowdown:.2f}" if one.slowdown >= SHOWN_SLOWDOWN else ""
    return (
        f"{seconds_text(one.seconds)}{retries}",
        interval_text(one.interval),
        gib_text(one.peak_bytes),
        f"{one.risk:.1%}",
        f"{rate:,.0f}",
        f"{one.mfu:.1%}{' above' if one.promise else ''}",
        "–" if best is None else f"{best:.1%}",
        str(one.plan.world_size),
        strategy_summary(one.plan),
    )


def search_result_text(found: SearchResult) -> str:
    """The tables and what was searched, as lines."""
    lines: list[str] = []
    for title, plans in search_tables(found):
        rows = [table_heads(found), *(table_row(found, one) for one in plans)]
        lines += [title, *aligned_lines(rows, left=len(rows[0]) - 1), ""]
    return "\n".join([*lines, search_text(found)])


def as_html(found: SearchResult) -> str:
    """The tables and what was searched, for a notebook."""
    shown = "".join(
        captioned_html_table(title, table_heads(found), (table_row(found, one) for one in plans))
        for title, plans in search_tables(found)
    )
    return shown + "".join(f"<p>{escaped(line)}</p>" for line in search_text(found).split("\n"))
