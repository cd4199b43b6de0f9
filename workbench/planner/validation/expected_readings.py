"""What a published row's way of reading memory should show of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.memory.reported_memory import bounds_of_kind, reported_memory_interval
from workbench.costmodel.rates.fitted_memory import MemoryFit, published_memory_fit
from workbench.planner.validation.measured_rows import MeasuredRow
from workbench.planner.validation.predictions import Prediction
from workbench.units import GIB


@dataclass(frozen=True)
class ExpectedReading:
    """A reading, GiB."""

    least: float
    """What the lowest kind that it can be would show: the reading itself where its kind is known,
    else allocated memory.
    """
    most: float
    """The same of the highest kind, reserved memory."""
    likely: float
    """What the highest kind would show where no freed block waits for another stream."""
    low: float
    """5 % bound."""
    high: float
    """95 % bound."""


def expected_reading(
    row: MeasuredRow, p: Prediction, stack: str = "", fit: MemoryFit | None = None
) -> ExpectedReading | None:
    """What `row`'s way of reading should show of the plan that `p` predicts; None where a
    prediction has no readings.

    Args:
        row: The row; its own reading is not looked at.
        p: The prediction of its plan.
        stack: Framework profile that the row names, for the interval.
        fit: Fit to readings; None: the published one.
    """
    if p.reported is None:
        return None
    fit = published_memory_fit() if fit is None else fit
    low, _, high = reported_memory_interval(stack, fit)
    lowest, highest = bounds_of_kind(row.memory_kind)
    reported, slack = p.reported, fit.slack

    def shown(kind: str, factor: float = 1.0, waiting: float = 1.0) -> float:
        stages = reported.readings(slack, factor, waiting)[kind]
        return float((stages[0] if row.memory_of_first_stage else stages.max()) / GIB)

    return ExpectedReading(
        least=shown(lowest),
        most=shown(highest),
        likely=shown(highest, waiting=0.0),
        low=shown(lowest, low),
        high=shown(highest, high),
    )
