"""What a search found, for people: its best plans and its front as rows, text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.planner.explain.number_words import days, gib, html_table, seconds
from workbench.planner.search.strategy_summary import short
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.planner.search.search import Candidate, SearchResult

HEADS = ("step time", "peak memory", "tokens/s", "GPUs", "strategy")
SHOWN_OF_FRONT = 12
FRONT = "Less memory for more time: none of these is beaten in both (estimated)"


def told(found: SearchResult) -> str:
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
    return f"{rate}, {found.feasible:,} meet every condition" + (
        f"\n{found.empty}" if found.empty else ""
    )


def tables(found: SearchResult) -> list[tuple[str, Sequence[Candidate]]]:
    """(title, plans) of what was found; a long front is thinned evenly, both its ends kept."""
    if not found.top:
        return []
    return [
        (f"Best by {found.objective} (estimated)", found.top),
        (FRONT, thinned(found.pareto, found.most)),
    ]


def thinned(front: Sequence[Candidate], most: int = SHOWN_OF_FRONT) -> Sequence[Candidate]:
    """At most `most` of the front, and `SHOWN_OF_FRONT`, its ends among them."""
    last, most = len(front) - 1, min(most, SHOWN_OF_FRONT)
    if last < most or most == 1:
        return front[:most]
    return [front[round(i * last / (most - 1))] for i in range(most)]


def heads(found: SearchResult) -> tuple[str, ...]:
    """Headings: with days and cost where tokens were asked for."""
    return (*HEADS[:-1], "time", "cost", HEADS[-1]) if found.tokens else HEADS


def row(found: SearchResult, one: Candidate) -> tuple[str, ...]:
    """One row under `heads`."""
    figures, bill = cells(one), found.bill(one)
    if not bill:
        return figures
    price = "–" if bill["dollars"] is None else f"${bill['dollars']:,.0f}"
    return (*figures[:-1], days(bill["days"] or 0.0), price, figures[-1])


def cells(one: Candidate) -> tuple[str, ...]:
    """One row under `HEADS`."""
    rate = one.step_tokens / one.seconds
    return (
        seconds(one.seconds),
        gib(one.peak_bytes),
        f"{rate:,.0f}",
        str(one.plan.world_size),
        short(one.plan),
    )


def as_text(found: SearchResult) -> str:
    """The tables and what was searched, as lines."""
    lines: list[str] = []
    for title, plans in tables(found):
        rows = [heads(found), *(row(found, one) for one in plans)]
        widths = [max(len(line[i]) for line in rows) for i in range(len(rows[0]) - 1)]
        numbers = (
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in rows
        )
        lines += [title, *(f"{some}  {line[-1]}" for some, line in zip(numbers, rows)), ""]
    return "\n".join([*lines, told(found)])


def as_html(found: SearchResult) -> str:
    """The tables and what was searched, for a notebook."""
    shown = "".join(
        html_table(title, heads(found), (row(found, one) for one in plans))
        for title, plans in tables(found)
    )
    return shown + "".join(f"<p>{escaped(line)}</p>" for line in told(found).split("\n"))
