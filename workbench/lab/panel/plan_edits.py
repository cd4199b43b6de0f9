"""What an edit in the panel does to a plan: the field itself, and what that field requires.

Nothing else changes. The global batch is held: an edit that would change its default writes the
present one into the plan, for as long as it is not the default, because step times of different
global batches cannot be compared. The banner lists side effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
MAY_NEED_GRID = ("strategy", "algorithm", "tensor")
"""Edits that may ask for a tensor grid, which splits a micro-batch into parts."""
MAX_MULTIPLES = 64
"""Multiples of the least batch that are tried on either side of the one requested."""


@dataclass(frozen=True)
class HeldBatch:
    """A global batch that edits of other controls stay at."""

    wanted: int
    chosen: bool
    """True where a person set it: else it is a default of the plan as it was before."""


def apply_edit(
    plan: Plan,
    control: PlanControl,
    value: Any,
    before: ResolvedPlan | None,
    memory: TaskMemory,
    held: HeldBatch | None = None,
) -> Plan:
    """`plan` with one control set, and the changes that this requires.

    Args:
        plan: The plan as written.
        control: The control that was edited.
        value: Its new value; `AUTO` leaves the field out.
        before: `plan` resolved, where it was legal.
        memory: What a method of fine-tuning brings back.
        held: The global batch to stay at, where the edit is not of it.

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
    return _with_batch(changed, held) if held and control.name != "global_batch" else changed


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
    control: PlanControl,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    batch_written: bool,
    batch_problem: str = "",
) -> str:
    """In words, what an edit of `control` changed besides it.

    Args:
        control: The control that was edited.
        old: Control name -> value before the edit.
        new: Control name -> value after it.
        batch_written: Whether the edit wrote the present global batch into the plan.
        batch_problem: Why the global batch could not stay.
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
    if batch_problem:
        lines.append(f"Global batch {batch_problem}.")
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


def held_batch(plan: Plan, before: ResolvedPlan | None, held: HeldBatch | None) -> HeldBatch | None:
    """The global batch that edits of `plan` stay at: what is `held` already, else what is written
    in it, else the default that it had.
    """
    if held:
        return held
    written = read_path(panel_data(plan), GLOBAL_BATCH)
    if isinstance(written, int):
        return HeldBatch(written, chosen=True)
    return HeldBatch(before.training.global_batch, chosen=False) if before else None


def _with_batch(plan: Plan, held: HeldBatch) -> Plan:
    """`plan` at the global batch that is held, the nearest legal one where it is not; nothing is
    written of a batch that nobody chose where the default is the same.
    """
    try:
        free = without_field(plan, GLOBAL_BATCH)
        default = free.resolve().training.global_batch
    except PlanError:
        return plan
    if default == held.wanted and not held.chosen:
        return free
    plan = free.replace(**{GLOBAL_BATCH: held.wanted})
    return _nearest(plan, held.wanted) if GLOBAL_BATCH in _wrong(plan) else plan


def batch_problem(plan: Plan, held: HeldBatch | None) -> str:
    """Why `plan` cannot stay at the global batch that is held, in words; empty where it does."""
    written = read_path(panel_data(plan), GLOBAL_BATCH)
    if held is None or written in (MISSING, held.wanted):
        return ""
    problems = check(plan.replace(**{GLOBAL_BATCH: held.wanted}))
    found = (problem for problem in problems if panel_path(problem.field) == GLOBAL_BATCH)
    return next((problem.message for problem in found), "")


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
