"""Everything that is said of a plan beyond memory and time, in one value that shows itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.planner.explain.bottlenecks import Binding
from workbench.planner.explain.number_words import (
    ROUNDING,
    count,
    days,
    gib,
    html_table,
    seconds,
    signed,
)
from workbench.planner.explain.plan_figures import Effect, Figures
from workbench.planner.training_cost import Cost
from workbench.untrusted_text import escaped

HEADS = ("change", "step time", "Δ step time", "tokens/s", "peak memory", "Δ memory", "fits")


@dataclass(frozen=True)
class Reasons:
    """What binds a plan, and what makes it fit where it does not. Figures are estimated."""

    binding: Binding
    fixes: tuple[Effect, ...]

    @property
    def sentence(self) -> str:
        """The binding constraint in one sentence."""
        return self.binding.sentence

    def __repr__(self) -> str:
        return "\n".join(
            [self.binding.memory, self.binding.time, *effect_lines("What makes it fit", self.fixes)]
        )

    def to_json(self) -> dict[str, Any]:
        """The constraint, the sentences, the fixes."""
        b = self.binding
        told = {
            "constraint": b.constraint,
            "sentence": b.sentence,
            "memory": b.memory,
            "time": b.time,
        }
        return told | {"fixes": [fix.to_json() for fix in self.fixes]}


@dataclass(frozen=True, repr=False)
class Explanation:
    """A plan explained: its cost, what binds it, what would change it. Figures are estimated."""

    name: str
    figures: Figures
    cost: Cost
    reasons: Reasons
    sensitivity: tuple[Effect, ...]
    neighbours: tuple[Effect, ...]

    def tables(self) -> list[tuple[str, Sequence[Effect]]]:
        """(title, rows) of what is not empty."""
        every = [
            ("What makes it fit", self.reasons.fixes),
            ("Sensitivity", self.sensitivity),
            ("Neighbours: one knob, one step", self.neighbours),
        ]
        return [(f"{title} (estimated)", rows) for title, rows in every if rows]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, for machines."""
        f = self.figures
        return {
            "plan": self.name,
            "source": "estimated",
            "step_seconds": f.seconds,
            "peak_bytes": f.peak_bytes,
            "capacity_bytes": f.capacity_bytes,
            "fits": f.fits,
            "gpus": f.gpus,
            "cost": self.cost.to_json(),
            "reasons": self.reasons.to_json(),
            "sensitivity": [effect.to_json() for effect in self.sensitivity],
            "neighbours": [effect.to_json() for effect in self.neighbours],
        }

    def __repr__(self) -> str:
        lines = [
            self.name,
            cost_line(self.cost),
            self.reasons.binding.memory,
            self.reasons.binding.time,
        ]
        return "\n".join(
            [*lines, *(line for title, rows in self.tables() for line in effect_lines(title, rows))]
        )

    def _repr_html_(self) -> str:
        words = [
            cost_line(self.cost),
            *self.cost.missing,
            self.reasons.binding.memory,
            self.reasons.binding.time,
        ]
        told = "".join(f"<p>{escaped(line)}</p>" for line in words)
        return f"<h4>{escaped(self.name)}</h4>{told}" + "".join(
            html_table(title, HEADS, map(cells, rows)) for title, rows in self.tables()
        )


def cost_line(cost: Cost) -> str:
    """The cost in one line."""
    told = [
        f"{cost.tokens_per_second:,.0f} tokens/s",
        f"{count(cost.tokens)} tokens ({cost.tokens_from}) take {days(cost.days)}",
        f"{cost.gpu_hours:,.0f} card-hours",
    ]
    if cost.dollars is not None:
        told.append(f"${cost.dollars:,.0f} at ${cost.price_per_hour:g} a card-hour")
    if cost.kwh is not None:
        told.append(f"{cost.kwh:,.0f} kWh")
    return f"Cost: {', '.join(told)} ({cost.source})."


def cells(effect: Effect) -> tuple[str, ...]:
    """One row under `HEADS`."""
    return (
        effect.name,
        seconds(effect.after.seconds),
        signed(effect.seconds_change, seconds(abs(effect.seconds_change))),
        signed(
            effect.speed - 1,
            f"{abs(effect.speed - 1):.1%}" if abs(effect.speed - 1) > ROUNDING else "0",
        ),
        gib(effect.after.peak_bytes),
        signed(effect.peak_change, gib(abs(effect.peak_change))),
        "yes" if effect.after.fits else "NO",
    )


def effect_lines(title: str, rows: Sequence[Effect]) -> list[str]:
    """A table as lines of text; nothing where there are no rows."""
    table = [HEADS, *(cells(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths)))
        for r in table
    ]
    return ["", title, *lines] if rows else []
