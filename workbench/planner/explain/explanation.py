"""Everything that is said of a plan beyond memory and time, in one value that shows itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.planner.explain.asked_table import AskedTable
from workbench.planner.explain.bottlenecks import Bottleneck
from workbench.planner.explain.method_savings import MethodSavings
from workbench.planner.explain.plan_figures import ChangeEffect, PlanFigures
from workbench.planner.table_text import aligned_lines, captioned_html_table
from workbench.planner.training_cost import TrainingCost
from workbench.units import (
    days_text,
    digits,
    dollars_text,
    duration_text,
    gib_text,
    interval_text,
    quantity_text,
    risk_text,
    seconds_text,
    signed_text,
)
from workbench.untrusted_text import escaped

ROUNDING = 1e-9
"""Relative difference of two estimates that comes of arithmetic alone."""
EFFECT_HEADS = (
    *("change", "step time", "Δ step time", "tokens/s", "peak memory", "Δ memory"),
    *("OOM risk", "fits"),
)


@dataclass(frozen=True)
class Reasons:
    """What binds a plan, and what makes it fit where it does not. Figures are estimated."""

    bottleneck: Bottleneck
    fixes: tuple[ChangeEffect, ...]
    cannot: tuple[str, ...] = ()
    """What the plan asks of its framework that it cannot do."""

    @property
    def sentence(self) -> str:
        """The binding constraint in one sentence."""
        return self.bottleneck.sentence

    @property
    def binding(self) -> Bottleneck:
        """The old name of `bottleneck`."""
        warnings.warn("Reasons.binding is now bottleneck", DeprecationWarning, stacklevel=2)
        return self.bottleneck

    def __repr__(self) -> str:
        return "\n".join(
            [
                *self.cannot,
                self.bottleneck.memory,
                self.bottleneck.time,
                *effect_lines("What makes it fit", self.fixes),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """The constraint, the sentences, the fixes."""
        b = self.bottleneck
        fields = {
            "constraint": b.constraint,
            "sentence": b.sentence,
            "memory": b.memory,
            "time": b.time,
        }
        fixes = [fix.to_json() for fix in self.fixes]
        return fields | {"fixes": fixes, "cannot": list(self.cannot)}


@dataclass(frozen=True, repr=False)
class Explanation:
    """A plan explained: its cost, what binds it, what would change it. Figures are estimated."""

    name: str
    figures: PlanFigures
    interval: tuple[float, float]
    """Seconds between which nine of ten steps lie."""
    cost: TrainingCost
    reasons: Reasons
    sensitivity: tuple[ChangeEffect, ...]
    neighbours: tuple[ChangeEffect, ...]
    asked: tuple[AskedTable, ...] = ()
    """Further tables that were asked for."""
    savings: MethodSavings | None = None
    """Of a plan that trains adapters, beside full fine-tuning."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """What binds memory and time, and what the method of a fine-tuning saves."""
        binding = self.reasons.bottleneck
        saved = (self.savings.sentence,) if self.savings else ()
        return (binding.memory, binding.time, *saved)

    def tables(self) -> list[tuple[str, Sequence[ChangeEffect]]]:
        """(title, rows) of what is not empty."""
        every = [
            ("What makes it fit", self.reasons.fixes),
            ("Sensitivity", self.sensitivity),
            ("Neighbours: one knob, one step", self.neighbours),
        ]
        return [(f"{title} (estimated)", rows) for title, rows in every if rows]

    @property
    def step_line(self) -> str:
        """The step time in one line."""
        within = interval_text(self.interval)
        words = f"Step time: {seconds_text(self.figures.seconds)}, 90 % interval {within}"
        return f"{words} ({self.cost.source_words})."

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, for machines."""
        f = self.figures
        return {
            "plan": self.name,
            "source": "estimated",
            "step_seconds": f.seconds,
            "step_seconds_90": list(self.interval),
            "peak_bytes": f.peak_bytes,
            "capacity_bytes": f.capacity_bytes,
            "fits": f.fits,
            "probability_of_running_out": f.runs_out,
            "gpus": f.gpus,
            "cost": self.cost.to_json(),
            "reasons": self.reasons.to_json(),
            "sensitivity": [effect.to_json() for effect in self.sensitivity],
            "neighbours": [effect.to_json() for effect in self.neighbours],
            **({"savings": self.savings.to_json()} if self.savings else {}),
            **{table.key: list(table.data) for table in self.asked},
        }

    def __repr__(self) -> str:
        lines = [
            self.name,
            self.step_line,
            cost_line(self.cost),
            *self.reasons.cannot,
            *self.sentences,
        ]
        effects = (line for title, rows in self.tables() for line in effect_lines(title, rows))
        return "\n".join([*lines, *effects, *(f"\n{table}" for table in self.asked)])

    def _repr_html_(self) -> str:
        words = [
            self.step_line,
            cost_line(self.cost),
            *self.cost.missing,
            *self.reasons.cannot,
            *self.sentences,
        ]
        paragraphs = "".join(f"<p>{escaped(line)}</p>" for line in words)
        tables = (
            captioned_html_table(title, EFFECT_HEADS, map(effect_cells, rows))
            for title, rows in self.tables()
        )
        asked = (table._repr_html_() for table in self.asked)
        return "".join((f"<h4>{escaped(self.name)}</h4>{paragraphs}", *tables, *asked))


def cost_line(cost: TrainingCost) -> str:
    """The cost in one line."""
    parts = [
        f"{cost.tokens_per_second:,.0f} tokens/s",
        f"{quantity_text(cost.tokens)} tokens ({cost.tokens_from}) take {days_text(cost.days)}",
        f"{digits(cost.gpu_hours)} GPU-hours",
    ]
    if cost.dollars is not None:
        parts.append(f"{dollars_text(cost.dollars)} at ${cost.price_per_hour:g} a GPU-hour")
    if cost.kwh is not None:
        parts.append(f"{digits(cost.kwh)} kWh")
    return f"Cost: {', '.join(parts)} ({cost.source_words})."


def effect_cells(effect: ChangeEffect) -> tuple[str, ...]:
    """One row under `EFFECT_HEADS`."""
    return (
        effect.name,
        duration_text(effect.after.seconds),
        signed_text(effect.seconds_change, duration_text(abs(effect.seconds_change))),
        signed_text(
            effect.speed - 1,
            f"{abs(effect.speed - 1):.1%}" if abs(effect.speed - 1) > ROUNDING else "0",
        ),
        gib_text(effect.after.peak_bytes),
        signed_text(effect.peak_change, gib_text(abs(effect.peak_change))),
        risk_text(effect.after.runs_out),
        effect.after.fit_word,
    )


def effect_lines(title: str, rows: Sequence[ChangeEffect]) -> list[str]:
    """A table as lines of text; nothing where there are no rows."""
    if not rows:
        return []
    return ["", title, *aligned_lines([EFFECT_HEADS, *(effect_cells(row) for row in rows)], left=0)]
