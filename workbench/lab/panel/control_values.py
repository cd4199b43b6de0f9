"""What each control of the planner's panel shows for a plan: its value, where that is from, and
what would be legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import PlanError
from workbench.lab.panel.plan_controls import Choice, Knob, field_of, knobs, same
from workbench.plan.model_shape import Shape
from workbench.plan.resolution import with_preset
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.schema import Plan, written_fields

NAMED = ("model", "gpu", "fabric", "calibration", "partition", "precision", "gradient_dtype")
"""Controls that show the plan as asked: a name, or the rule that the complete plan has replaced by
what it gives.
"""
MISSING = object()


def values(asked: Plan, full: ResolvedPlan | None) -> dict[str, Any]:
    """What every control shows: what is written, else what the preset says, else what the complete
    plan `full` came to.

    `full` may be of an older plan where the one asked for is illegal; None where there has been no
    legal one.
    """
    written = written_fields(asked)
    preset = {"strategy": preset_of(asked)}
    filled = full.model_dump() if full else {}
    found = {}
    for name, knob in knobs().items():
        sources = [written, preset] if name in NAMED else [written, filled, preset]
        shown = next(
            (value for data in sources if (value := read(data, knob.path)) is not MISSING), MISSING
        )
        found[name] = _name(shown) if shown is not MISSING else _default(knob)
    return found


def preset_of(asked: Plan) -> dict[str, Any]:
    """The strategy with its preset's fields, rules unresolved; empty where the preset is not
    known.
    """
    try:
        return with_preset(asked.strategy)
    except PlanError:
        return {}


def origin(asked: Plan, knob: Knob) -> str:
    """Who set a field: "" the plan as written, else "preset", or "auto" for a default."""
    if read(written_fields(asked), knob.path) is not MISSING:
        return ""
    return "auto" if read({"strategy": preset_of(asked)}, knob.path) is MISSING else "preset"


def offers(full: ResolvedPlan) -> dict[str, tuple[Choice, ...]]:
    """The legal values of the controls whose values depend on the rest of the complete plan
    `full`.
    """
    s, shape, sizes = full.strategy, full.shape, full.sizes
    world, replicas = full.world_size, sizes["data"] * sizes["context"]
    ways = legal_sizes.context_sizes(
        shape, world, full.training.sequence_length, sizes["tensor"], s.context.algorithm
    )
    return {
        "tensor": tensor(full, shape),
        "pipeline": same(*legal_sizes.pipeline_sizes(shape, world, s.pipeline.chunks)),
        "context": same(*ways),
        "experts": same(*legal_sizes.expert_sizes(shape, replicas)),
        "shard": same("all", *legal_sizes.divisors(replicas)),
        "precision": _resolved("precision", s.precision),
        "gradient_dtype": _resolved("gradient_dtype", s.gradient_dtype),
        "fabric": ((f"auto · {full.fabric.name}", None), *knobs()["fabric"].choices[1:]),
    }


def tensor(full: Plan, shape: Shape) -> tuple[Choice, ...]:
    """Sizes of the tensor axis: those that divide the ranks and the model can fill, or the grids of
    its algorithm.
    """
    algorithm, world = full.strategy.tensor.algorithm, full.world_size
    if algorithm == "1d":
        return same(
            *(size for size in legal_sizes.divisors(world) if not legal_sizes.exceeds(shape, size))
        )
    return tuple(
        (" × ".join(map(str, grid)), grid) for grid in legal_sizes.grids(algorithm, world, shape)
    )


def with_value(choices: tuple[Choice, ...], value: Any) -> tuple[Choice, ...]:
    """`choices`, and `value` where it is not among them: in its place where they are sizes, else at
    the end.
    """
    if any(choice == value for _, choice in choices):
        return choices
    more = (*choices, (text_of(value), value))
    numbers = all(isinstance(choice, int) for _, choice in more)
    return tuple(sorted(more, key=lambda choice: choice[1])) if numbers else more


def text_of(value: Any) -> str:
    """A value as a person would write it in a field: nothing for none, a list by commas."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(data: Mapping[str, Any], path: str) -> Any:
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
        for text, value in knobs()[name].choices
    )


def _name(value: Any) -> Any:
    """What a written-out entry is called."""
    return value.get("name") or value.get("python") if isinstance(value, Mapping) else value


def _default(knob: Knob) -> Any:
    field = field_of(knob.path)
    return None if field.is_required() else field.get_default(call_default_factory=True)
