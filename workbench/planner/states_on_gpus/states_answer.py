"""How many GPUs hold the states of a model, and how many a whole step needs, in one value that
shows itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.planner.states_on_gpus.state_terms import GB, StateRecipe
from workbench.planner.states_on_gpus.whole_step import WholeStep
from workbench.planner.table_text import aligned_lines, captioned_html_table
from workbench.units import gib_text, quantity_text
from workbench.untrusted_text import escaped

STEP_TITLE = "A whole step, recomputing all: states, activations and buffers (estimated)"
STEP_HEADS = (
    "strategy",
    "GPU",
    "precision",
    "GPUs",
    "peak memory",
    "GPU memory",
    "host memory a rank",
)
PRINTED = "GB are 1e9 bytes, as the memory of a GPU is printed; nothing but the states is held."


@dataclass(frozen=True, repr=False)
class StatesAnswer:
    """Model states of a number of parameters on GPUs. Figures are estimated."""

    name: str
    """Of the model that a whole step is estimated of."""
    parameters: float
    """Whose states are counted."""
    recipes: tuple[StateRecipe, ...]
    gpu_memory: tuple[float, ...]
    """Printed sizes of GPUs, GB."""
    steps: tuple[WholeStep, ...]
    step_words: str
    """Model, sequence length and micro-batch of the whole step."""

    @property
    def title(self) -> str:
        """What the first table counts."""
        return f"Model states of {quantity_text(self.parameters)} parameters, Adam (estimated)"

    @property
    def heads(self) -> tuple[str, ...]:
        """Of the table of states."""
        sizes = (f"GPUs of {size:g} GB" for size in self.gpu_memory)
        return ("states", "bytes a parameter", "terms", "in all", *sizes, "source")

    def states_cells(self) -> list[tuple[str, ...]]:
        """One row a recipe under `heads`."""
        return [
            (
                recipe.name,
                f"{recipe.bytes_per_parameter:g}",
                recipe.sum_of_terms,
                f"{recipe.total(self.parameters) / GB:,.6g} GB",
                *(f"{recipe.gpus(self.parameters, size * GB):,}" for size in self.gpu_memory),
                recipe.source,
            )
            for recipe in self.recipes
        ]

    def step_cells(self) -> list[tuple[str, ...]]:
        """One row a strategy and GPU under `STEP_HEADS`."""
        return [_step_cells(step) for step in self.steps]

    def below_steps(self) -> list[str]:
        """Lines below the table of steps: what does not fit, and of what it is."""
        none = [f"{one.strategy} on {one.gpu}: {one.reason}" for one in self.steps if one.reason]
        return [*none, self.step_words]

    def divisions(self) -> list[str]:
        """The arithmetic of the first recipe, a line a size of GPU."""
        first = self.recipes[0]
        total = first.total(self.parameters) / GB
        each = f"{quantity_text(self.parameters)} x {first.bytes_per_parameter:g} bytes"
        return [
            f"{each} = {total:,.6g} GB; / {size:g} GB = {total / size:,.4g}: "
            f"{first.gpus(self.parameters, size * GB):,} GPUs"
            for size in self.gpu_memory
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, for machines."""
        return {
            "source": "estimated",
            "model": self.name,
            "parameters": self.parameters,
            "states": [self._recipe_json(recipe) for recipe in self.recipes],
            "whole_step_of": self.step_words,
            "whole_step": [step.to_json() for step in self.steps],
        }

    def _recipe_json(self, recipe: StateRecipe) -> dict[str, Any]:
        gpus = {f"{size:g}": recipe.gpus(self.parameters, size * GB) for size in self.gpu_memory}
        return recipe.to_json() | {"bytes": recipe.total(self.parameters), "gpus_by_gb": gpus}

    def __repr__(self) -> str:
        states = aligned_lines([self.heads, *self.states_cells()], left=0)
        step = aligned_lines([STEP_HEADS, *self.step_cells()], left=0)
        lines = [self.title, *states, PRINTED, *self.divisions(), "", STEP_TITLE, *step]
        return "\n".join([*lines, *self.below_steps()])

    def _repr_html_(self) -> str:
        words = _paragraphs([PRINTED, *self.divisions()])
        return (
            captioned_html_table(self.title, self.heads, self.states_cells())
            + words
            + captioned_html_table(STEP_TITLE, STEP_HEADS, self.step_cells())
            + _paragraphs(self.below_steps())
        )


def _step_cells(step: WholeStep) -> tuple[str, ...]:
    m = step.memory
    return (
        step.strategy,
        step.gpu,
        step.precision,
        f"{step.gpus:,}" if step.gpus else "none",
        gib_text(m.peak_bytes) if step.gpus else "–",
        gib_text(m.capacity_bytes),
        gib_text(m.host_bytes) if step.gpus and m.host_bytes else "–",
    )


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escaped(line)}</p>" for line in lines)
