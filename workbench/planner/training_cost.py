"""What training on so many tokens will cost: days, hours of GPUs, money and energy, from an
estimated step.

Power is a GPU's board power times (what it draws while it waits + what computing adds, times the
share of the step that computes), and its share of the host; energy is that times the site's power
usage effectiveness. The constants stand with their sources in `data/planner.yaml`, section
`energy`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from workbench import data_files
from workbench.fields.bounds import PRICE, TRAINED, hold
from workbench.machine.hardware import GPU
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.profile import Profile

HOUR, DAY = 3600.0, 86400.0
TOKENS_A_PARAMETER = 20
"""Tokens a parameter that use a budget of compute best (Hoffmann et al. 2022, arXiv 2203.15556)."""


@dataclass(frozen=True)
class PowerModel:
    """What GPUs, hosts and sites draw; meanings and sources stand in `data/planner.yaml`."""

    idle_share: float
    dynamic_share: float
    host_share: float
    pue: float


@dataclass(frozen=True)
class TrainingCost:
    """The estimated price of `tokens`. None where something it needs is unknown; `missing` says
    what.
    """

    source: str
    tokens: int
    tokens_from: str
    """Why so many."""
    tokens_per_second: float
    seconds: float
    gpu_hours: float
    price_per_hour: float | None
    """USD of one GPU."""
    price_source: str
    dollars: float | None
    watts: float | None
    """Mean power at the site's meter, of one GPU with its share of the host."""
    kwh: float | None
    missing: tuple[str, ...]
    source_words: str
    """Source of the figures for people, and that the plan does not fit."""

    @property
    def days(self) -> float:
        """Days of training without a pause."""
        return self.seconds / DAY

    def to_json(self) -> dict[str, Any]:
        """The fields and the days, for machines."""
        names = [field.name for field in fields(self) if field.name != "source_words"]
        return {name: getattr(self, name) for name in names} | {"days": self.days}


def training_cost(
    plan: ResolvedPlan, profile: Profile, tokens: float | None = None, price: float | None = None
) -> TrainingCost:
    """The cost of training a complete `plan` on `tokens`, by the step of its estimate `profile`.

    `tokens` default to 20 a parameter, the compute-optimal number; `price` is of one GPU, USD an
    hour, and default to the GPU's own. Raises `PlanError` for numbers that cannot be meant.
    """
    _check_amounts(tokens, price)
    step = float(profile.steps.seconds.iloc[0])
    rate = float(profile.steps.tokens.iloc[0]) / step
    wanted = int(tokens or TOKENS_A_PARAMETER * parameters(plan.shape).active)
    hours = wanted / rate / HOUR * plan.world_size
    each, price_source = (
        (plan.gpu.price_per_hour, plan.gpu.price_source) if price is None else (price, "as given")
    )
    watts = watts_per_gpu(plan.gpu, profile.notes["time"]["compute"] / step)
    return TrainingCost(
        source=profile.source,
        tokens=wanted,
        tokens_from="as given" if tokens else "Chinchilla, 20/param",
        tokens_per_second=rate,
        seconds=wanted / rate,
        gpu_hours=hours,
        price_per_hour=each,
        price_source=price_source if each is not None else "",
        dollars=None if each is None else hours * each,
        watts=watts,
        kwh=None if watts is None else hours * watts / 1000,
        missing=_missing_figures(plan.gpu, each, watts),
        source_words=profile.source_words,
    )


def watts_per_gpu(gpu: GPU, computing: float) -> float | None:
    """Mean power at the site's meter of one GPU and its share of the host; `computing` is the
    share of the step.
    """
    if gpu.watts is None:
        return None
    p = power_model()
    board = p.idle_share + p.dynamic_share * min(1.0, max(0.0, computing))
    return gpu.watts * (board + p.host_share) * p.pue


@lru_cache(maxsize=1)
def power_model() -> PowerModel:
    """The constants of section `energy`."""
    section = data_files.read_data_file("data/planner.yaml")["energy"]
    return PowerModel(
        **{field.name: float(section[field.name]["value"]) for field in fields(PowerModel)}
    )


def _missing_figures(gpu: GPU, price: float | None, watts: float | None) -> tuple[str, ...]:
    notes = []
    if price is None:
        notes.append(
            f"no public price of {gpu.name} is known; give one (--price, "
            f"cluster.gpu.price_per_hour)"
        )
    if watts is None:
        notes.append(f"the board power of {gpu.name} is not known; give it (cluster.gpu.watts)")
    return tuple(notes)


def _check_amounts(tokens: float | None, price: float | None) -> None:
    if tokens is not None:
        hold("--tokens", tokens, 1, TRAINED)
    if price is not None:
        hold("--price", price, 0, PRICE, "USD an hour of one GPU, ")
