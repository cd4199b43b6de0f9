"""What each control of the planner's panel shows for a plan: its value, where that is from, and
what would be legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import PlanError
from workbench.lab.panel.plan_controls import (
    Choice,
    PlanControl,
    choices_of,
    plan_controls,
    schema_field,
)
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolution import with_preset
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.rules.strategy.kernel_rules import legal_kernels
from workbench.plan.schema import Plan, written_fields

SHOWN_AS_WRITTEN = (
    "model",
    "gpu",
    "fabric",
    "calibration",
    "partition",
    "precision",
    "gradient_dtype",
)
"""Controls that show the plan as written: a name, or a rule such as `balanced`, where the resolved
plan holds what the rule came to.
"""
MISSING = object()


def control_values(requested: Plan, resolved: ResolvedPlan | None) -> dict[str, Any]:
    """What every control shows.

    A control shows what is written in the plan, else the preset's value, else the resolved plan's.

    Args:
        requested: The plan as written, legal or not.
        resolved: The last legal plan, which is an older one where `requested` is illegal; None
            where there has been no legal plan.

    Returns:
        Control name -> value.
    """
    written = panel_data(requested)
    preset = {"strategy": preset_fields(requested)}
    filled = _with_task(resolved.model_dump()) if resolved else {}
    found = {}
    for name, control in plan_controls().items():
        sources = [written, preset] if name in SHOWN_AS_WRITTEN else [written, filled, preset]
        shown = next(
            (value for data in sources if (value := read_path(data, control.path)) is not MISSING),
            MISSING,
        )
        found[name] = _name(shown) if shown is not MISSING else _default(control)
        if not applies(requested, name):
            found[name] = None
    return found


def panel_data(plan: Plan) -> dict[str, Any]:
    """What is written in a plan, a fine-tuning's batch and optimizer as those of `training` too."""
    return _with_task(written_fields(plan))


def _with_task(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"training": data["finetune"]} if data.get("finetune") else data


def applies(plan: Plan, name: str) -> bool:
    """Whether a plan has what the control `name` sets: not all fine-tune, or have adapters, a 4-bit
    base or pairs of answers.
    """
    task, *sections = plan_controls()[name].path.split(".")
    sections = sections[:-1]
    if task != "finetune":
        return True
    tune = plan.finetune
    if tune is None or not sections:
        return tune is not None
    return tune.method == "lora" if sections == ["lora"] else getattr(tune, *sections) is not None


def preset_fields(requested: Plan) -> dict[str, Any]:
    """The strategy with its preset's fields, rules unresolved; empty where the preset is not
    known.
    """
    try:
        return with_preset(requested.strategy)
    except PlanError:
        return {}


def value_origin(requested: Plan, control: PlanControl) -> str:
    """Who set a field: "" the plan as written, else "preset", or "auto" for a default; "none" where
    the plan has nothing that the control sets.
    """
    named = any(choice is None for _, choice in control.choices)
    if not named and not applies(requested, control.name):
        return "none"
    if read_path(panel_data(requested), control.path) is not MISSING:
        return ""
    return (
        "auto"
        if read_path({"strategy": preset_fields(requested)}, control.path) is MISSING
        else "preset"
    )


def legal_choices(resolved: ResolvedPlan) -> dict[str, tuple[Choice, ...]]:
    """The legal values of the controls whose values depend on the rest of the complete plan
    `resolved`.
    """
    s, shape, sizes = resolved.strategy, resolved.shape, resolved.sizes
    world, replicas = resolved.world_size, sizes["data"] * sizes["context"]
    length, context = resolved.training.sequence_length, s.context
    kernels = legal_kernels(resolved)
    ways = legal_sizes.context_sizes(
        shape, world, length, sizes["tensor"], context.algorithm, context.ulysses_size
    )
    return {
        "tensor": tensor_choices(resolved, shape),
        "pipeline": choices_of(*legal_sizes.pipeline_sizes(shape, world, s.pipeline.chunks)),
        "context": choices_of(*ways),
        "experts": choices_of(*legal_sizes.expert_sizes(shape, replicas)),
        "shard": choices_of("all", *legal_sizes.divisors(replicas)),
        "attention": choices_of(*kernels["attention"]),
        "kernels": choices_of(*kernels["kernels"]),
        "head_loss": choices_of(*kernels["loss"]),
        "precision": _resolved("precision", s.precision),
        "gradient_dtype": _resolved("gradient_dtype", s.gradient_dtype),
        "fabric": (
            (f"auto · {resolved.fabric.name}", None),
            *plan_controls()["fabric"].choices[1:],
        ),
    }


def tensor_choices(resolved: Plan, shape: Shape) -> tuple[Choice, ...]:
    """Sizes of the tensor axis: those that divide the ranks and the model can fill, or the grids of
    its algorithm.
    """
    algorithm, world = resolved.strategy.tensor.algorithm, resolved.world_size
    if algorithm == "1d":
        return choices_of(
            *(size for size in legal_sizes.divisors(world) if not legal_sizes.exceeds(shape, size))
        )
    return tuple(
        (" × ".join(map(str, grid)), grid) for grid in legal_sizes.grids(algorithm, world, shape)
    )


def with_choice(choices: tuple[Choice, ...], value: Any) -> tuple[Choice, ...]:
    """`choices`, and `value` where it is not among them: in its place where they are sizes, else at
    the end.
    """
    if any(choice == value for _, choice in choices):
        return choices
    more = (*choices, (value_text(value), value))
    numbers = all(isinstance(choice, int) for _, choice in more)
    return tuple(sorted(more, key=lambda choice: choice[1])) if numbers else more


def value_text(value: Any) -> str:
    """A value as a person would write it in a field: nothing for none, a list by commas."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_path(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of plain data, or MISSING."""
    value: Any = data
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def _resolved(name: str, now: str) -> tuple[Choice, ...]:
    """The choices of a field whose `auto` has come to `now`."""
    return tuple(
        (f"auto · {now}" if value == "auto" else text, value)
        for text, value in plan_controls()[name].choices
    )


def _name(value: Any) -> Any:
    """What a written-out entry is called."""
    return value.get("name") or value.get("python") if isinstance(value, Mapping) else value


def _default(control: PlanControl) -> Any:
    field = schema_field(control.path)
    return None if field.is_required() else field.get_default(call_default_factory=True)
