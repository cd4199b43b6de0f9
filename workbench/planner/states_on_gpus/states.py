"""How many GPUs hold the model states of a number of parameters, and what a whole step needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import refuse, unknown_name
from workbench.machine import gpu_catalog
from workbench.plan.model.parameter_count import parameters
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.states_on_gpus.state_terms import RECIPES, StateRecipe, recipe_of_plan
from workbench.planner.states_on_gpus.states_answer import StatesAnswer
from workbench.planner.states_on_gpus.subject_plan import number_of_parameters, subject_plan
from workbench.planner.states_on_gpus.whole_step import STRATEGIES, whole_step
from workbench.units import quantity_text

USUAL_GPUS = ("v100-sxm2-16gb", "v100-sxm2-32gb", "h100-sxm-80gb")
MEMORY_GB = (1.0, 10_000.0)
"""Smallest and largest printed memory of a GPU, GB."""


def states(
    subject: Plan | str | Path | float,
    gpu_memory: Sequence[float],
    gpus: Sequence[str],
    changes: Mapping[str, Any],
) -> StatesAnswer:
    """GPUs that hold the states alone, by printed memory; and for a whole step, by the estimate.

    Args:
        subject: A number of parameters, a model of the catalog, a plan file, or a plan.
        gpu_memory: Printed memory of GPUs, GB.
        gpus: GPUs of the catalog for a whole step; none: the plan's, else usual ones.
        changes: Fields of the plan to override, by dotted path.

    Raises:
        PlanError: The subject is unknown or illegal, or a number is out of range.
    """
    _check_sizes(gpu_memory)
    plan = subject_plan(subject, changes)
    chosen = tuple(gpus) or _usual_gpus(plan)
    for name in chosen:
        if name not in gpu_catalog.gpus():
            raise unknown_name("gpus", name, gpu_catalog.gpus())
    full = plan.resolve()
    total = None if isinstance(subject, Plan) else number_of_parameters(subject)
    return StatesAnswer(
        full.model_name,
        parameters(full.shape).total if total is None else total,
        _with_planned(full),
        tuple(map(float, gpu_memory)),
        tuple(whole_step(plan, gpu, preset) for gpu in chosen for preset in STRATEGIES),
        _step_words(full),
    )


def _check_sizes(gpu_memory: Sequence[float]) -> None:
    least, most = MEMORY_GB
    if not gpu_memory:
        raise refuse("--gpu-memory", "is empty; legal: printed sizes in GB, e.g. 16,32")
    for size in gpu_memory:
        if not least <= size <= most:  # NaN is neither
            raise refuse("--gpu-memory", f"is {size:g}; legal: {least:g} to {most:,.0f} GB a GPU")


def _with_planned(full: ResolvedPlan) -> tuple[StateRecipe, ...]:
    """Published ways of keeping states, and the plan's own where it is none of them."""
    own = recipe_of_plan(full)
    return RECIPES if own.sizes in {recipe.sizes for recipe in RECIPES} else (*RECIPES, own)


def _usual_gpus(plan: Plan) -> tuple[str, ...]:
    """The plan's GPU, and usual ones that have the precision that it asks for."""
    known, own = gpu_catalog.gpus(), plan.cluster.gpu
    asked = plan.strategy.precision
    usual = (name for name in USUAL_GPUS if asked == "auto" or asked in known[name].gpu.tflops)
    named = (own,) if isinstance(own, str) and own in known else ()
    return tuple(dict.fromkeys((*named, *usual)))


def _step_words(full: ResolvedPlan) -> str:
    task, total = full.training, quantity_text(parameters(full.shape).total)
    return (
        f"Of {full.model_name} ({total} parameters): sequences of {task.sequence_length:,} tokens, "
        f"micro-batch {task.micro_batch}, {task.optimizer.name}; the least number of GPUs, whole "
        f"nodes from one node on."
    )
