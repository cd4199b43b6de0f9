"""Methods of fine-tuning beside each other, for people: rows, text and HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.plan.rules.supported import estimated_only
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.planner.table_text import aligned_lines, captioned_html_table
from workbench.units import (
    counted,
    days_text,
    digits,
    dollars_text,
    gib_text,
    percent_text,
    quantity_text,
    signed_text,
)
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.planner.methods.method_comparison import MethodComparison
    from workbench.planner.search.results.search_result import Candidate

BEST_HEADS = ("method", "goal", "GPUs", "time", "GPU-hours", "cost", "memory a GPU", "strategy")
SAVED_TITLE = "Change from full fine-tuning with the same goal (estimated)"
SAVED_HEADS = ("method", "goal", "GPUs", "time", "GPU-hours", "cost")
SAVED_FIELDS = ("gpus", "hours", "gpu_hours", "dollars")
STATES_TITLE = "Model states, of one copy of the model (estimated)"
STATES_HEADS = ("method", "parameters", "gradients", "optimizer", "in all", "of full")
NUMBERS = {*BEST_HEADS[2:-1], *SAVED_HEADS[2:], *STATES_HEADS[1:]}
"""Heads of columns that are aligned right."""


def best_title(found: MethodComparison) -> str:
    """What the first table is of."""
    tokens = f"{quantity_text(found.tokens)} tokens"
    batch = f"{counted(found.global_batch, 'sequence')} of {found.sequence_length:,} a step"
    on = f"up to {found.gpus:,} {found.gpu.name}"
    return f"Fine-tuning on {tokens}, {batch}, {on} (estimated)"


def best_rows(found: MethodComparison) -> list[tuple[str, ...]]:
    """The best plan of each method for each goal, under `BEST_HEADS`."""
    rows = []
    for method in found.methods:
        words = method.words
        for goal in found.goals if method.by_gpus else ():
            if best := method.best(goal):
                rows.append((words, goal, *_bill_cells(found, best)))
                words = ""
    return rows


def _bill_cells(found: MethodComparison, one: Candidate) -> tuple[str, ...]:
    bill = found.bill(one)
    return (
        f"{bill.gpus:,}",
        days_text(bill.hours / 24),
        digits(bill.gpu_hours),
        "–" if bill.dollars is None else dollars_text(bill.dollars),
        gib_text(one.peak_bytes),
        strategy_summary(one.plan),
    )


def saved_rows(found: MethodComparison) -> list[tuple[str, ...]]:
    """What each method changes of full fine-tuning, under `SAVED_HEADS`."""
    rows = []
    for method in found.methods[1:]:
        words = method.words
        for goal in found.goals:
            if saved := found.saved(method, goal):
                rows.append((words, goal, *(_change(saved.get(name)) for name in SAVED_FIELDS)))
                words = ""
    return rows


def _change(saved: float | None) -> str:
    if saved is None:
        return "–"
    return "0" if abs(saved) < 0.0005 else signed_text(-saved, percent_text(abs(saved)))


def state_rows(found: MethodComparison) -> list[tuple[str, ...]]:
    """Model states of each method, under `STATES_HEADS`."""
    full, rows = found.full.states, []
    for method in found.methods:
        if own := method.states:
            share = "–" if full is None else percent_text(own.total / full.total)
            rows.append((method.words, *map(gib_text, own), gib_text(own.total), share))
    return rows


def notes(found: MethodComparison) -> list[str]:
    """Which methods have no plan and why, and what is to be known of the others."""
    lines = [f"{each.words}: {each.empty}" for each in found.methods if each.empty]
    for each in found.methods:
        best = each.best("lowest cost")
        if best and (why := estimated_only(best.plan.resolve())):
            lines.append(f"{each.words}: the plan of lowest cost {why}")
    if any(map(_has_spare_host_memory, (one for each in found.methods for one in each.by_gpus))):
        lines.append("A plan on fewer GPUs than a node has may use all of its host memory.")
    return lines


def _has_spare_host_memory(one: Candidate) -> bool:
    return one.plan.strategy.data.offload != "none"


def tables(found: MethodComparison) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, heads, rows) of what is not empty."""
    every = [
        (best_title(found), BEST_HEADS, best_rows(found)),
        (SAVED_TITLE, SAVED_HEADS, saved_rows(found)),
        (STATES_TITLE, STATES_HEADS, state_rows(found)),
    ]
    return [each for each in every if each[2]]


def comparison_text(found: MethodComparison) -> str:
    """The tables and notes as lines."""
    lines: list[str] = []
    for title, heads, rows in tables(found):
        lines += [title, *aligned_lines([heads, *rows], left=0), ""]
    return "\n".join([*lines, *notes(found)])


def as_html(found: MethodComparison) -> str:
    """The tables and notes, for a notebook."""
    shown = "".join(
        captioned_html_table(title, heads, rows) for title, heads, rows in tables(found)
    )
    return shown + "".join(f"<p>{escaped(line)}</p>" for line in notes(found))
