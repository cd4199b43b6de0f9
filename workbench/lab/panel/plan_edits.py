"""What an edit in the panel does to a plan: the field itself, and what that field requires.

Nothing else changes. An edit that would change the default global batch writes the present one into
the plan: step times of different global batches cannot be compared. The banner lists side effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import PlanError
from workbench.lab.panel.control_values import MISSING, panel_data, read_path, value_text
from workbench.lab.panel.finetune_edits import TaskMemory, finetune_edit
from workbench.lab.panel.plan_controls import PlanControl, panel_path, plan_controls
from workbench.lab.panel.typed_values import AUTO
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules import legal_sizes
from workbench.plan.rules.check import check
from workbench.plan.schema import Plan, build_plan, written_fields
from workbench.schedules.generators import SCHEDULES

GLOBAL_BATCH, MICRO_BATCH = "training.global_batch", "training.micro_batch"
HOLDS_GLOBAL_BATCH = ("micro_batch", "strategy", "algorithm", "tensor")
"""Edits that may change the micro-batch, and with it the default of the global batch."""
MAY_NEED_GRID = ("strategy", "algorithm", "tensor")
"""Edits that may ask for a tensor grid, which splits a micro-batch into parts."""
MAX_MULTIPLES = 64
"""Multiples of the least batch that are tried on either side of the one requested."""


def apply_edit(
    plan: Plan, control: PlanControl, value: Any, before: ResolvedPlan | None, memory: TaskMemory
) -> Plan:
    """`plan` with one control set, and the changes that this requires.

    Args:
        plan: The plan as written.
        control: The control that was edited.
        value: Its new value; `AUTO` leaves the field out.
        before: `plan` resolved, where it was legal.
        memory: What a method of fine-tuning brings back.

    Raises:
        PlanError: No plan can hold the value.
    """
    if control.path.startswith("finetune."):
        return finetune_edit(plan, control, value, memory)
    changed = (
        without_field(plan, control.path)
        if value is AUTO
        else plan.replace(**_assigned(control, value, before))
    )
    if control.name in MAY_NEED_GRID and MICRO_BATCH in _wrong(changed):
        changed = without_field(changed, MICRO_BATCH)
    return (
        _with_batch(changed, before.training.global_batch)
        if before and control.name in HOLDS_GLOBAL_BATCH
        else changed
    )


def without_field(plan: Plan, path: str) -> Plan:
    """`plan` with a field left out, so that it gets its default."""
    data = written_fields(plan)
    *above, last = path.split(".")
    if above[:1] == ["training"]:
        above[0] = plan.task_section
    inner: Any = data
    for name in above:
        inner = inner.get(name, {})
    inner.pop(last, None)
    return build_plan(data)


def side_effects(
    control: PlanControl, old: Mapping[str, Any], new: Mapping[str, Any], batch_written: bool
) -> str:
    """In words, what an edit of `control` changed besides it.

    Args:
        control: The control that was edited.
        old: Control name -> value before the edit.
        new: Control name -> value after it.
        batch_written: Whether the edit wrote the present global batch into the plan.
    """
    others = [
        other
        for name, other in plan_controls().items()
        if other is not control and old[name] != new[name]
    ]
    changes = ", ".join(
        f"{other.label} {control_text(other, old)} → {control_text(other, new)}" for other in others
    )
    lines = (
        [f"{control.label} {control_text(control, new)} also changed: {changes}."]
        if changes
        else []
    )
    if batch_written and old["global_batch"] == new["global_batch"]:
        lines.append(f"Global batch stays {new['global_batch']}; clear its field for auto.")
    return " ".join(lines)


def control_text(control: PlanControl, shown: Mapping[str, Any]) -> str:
    """A control's value in words."""
    value = shown[control.name]
    if control.name == "tensor" and isinstance(value, list):
        return " × ".join(map(str, value))
    none = next((text for text, choice in control.choices if choice is None), None)
    left_out = "none" if control.path.startswith("finetune.") else "auto"
    return value_text(value) or none or left_out


def _assigned(control: PlanControl, value: Any, before: ResolvedPlan | None) -> dict[str, Any]:
    """Field -> value of an edit, with the sizes that a name asks for."""
    # A preset has its own settings: fields that were set for another preset are dropped.
    if control.name == "strategy":
        return {"strategy": {"preset": value}}
    changes = {control.path: value}
    if before and control.name == "algorithm":
        changes["strategy.tensor.size"] = _grid(before, value)
    if before and control.name == "schedule" and value in SCHEDULES:
        low, most = SCHEDULES[value].min_chunks, SCHEDULES[value].max_chunks or before.shape.layers
        changes["strategy.pipeline.chunks"] = min(max(before.strategy.pipeline.chunks, low), most)
    return changes


def _grid(before: ResolvedPlan, algorithm: str) -> int | list[int]:
    """The size of an algorithm's tensor axis that is nearest to the present number of ranks, and
    above one.
    """
    ranks, others = before.strategy.tensor.ranks, before.sizes["pipeline"] * before.sizes["context"]
    if algorithm == "1d":
        return ranks
    grids = legal_sizes.grids(algorithm, before.world_size // others, before.shape)
    return min(grids, key=lambda grid: (math.prod(grid) == 1, abs(math.prod(grid) - ranks)))


def _with_batch(plan: Plan, batch: int) -> Plan:
    """`plan` with the global batch that is written in it, or else `batch`; the nearest legal one
    where it is not.
    """
    written = read_path(panel_data(plan), GLOBAL_BATCH)
    if written is MISSING:
        try:
            if plan.resolve().training.global_batch == batch:
                return plan
        except PlanError:
            return plan
        plan = plan.replace(**{GLOBAL_BATCH: batch})
    return (
        _nearest(plan, batch if written is MISSING else written)
        if GLOBAL_BATCH in _wrong(plan)
        else plan
    )


def _nearest(plan: Plan, wanted: int) -> Plan:
    """`plan` with the legal global batch nearest to `wanted`; itself where none is found, or more
    is wrong.
    """
    try:
        resolved = without_field(plan, GLOBAL_BATCH).resolve()
    except PlanError:
        return plan
    unit = resolved.training.micro_batch * resolved.sizes["data"]
    first = max(1, wanted // unit - MAX_MULTIPLES)
    near = sorted(
        (unit * n for n in range(first, wanted // unit + MAX_MULTIPLES)),
        key=lambda batch: abs(batch - wanted),
    )
    tried = (plan.replace(**{GLOBAL_BATCH: batch}) for batch in near)
    return next((found for found in tried if not _wrong(found)), plan)


def _wrong(plan: Plan) -> set[str]:
    """Fields that are illegal, as controls name them."""
    return {panel_path(problem.field) for problem in check(plan)}
