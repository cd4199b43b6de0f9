"""Edits of a plan's fine-tuning. What a change of the method takes out of the plan comes back with
the method that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.lab.panel.plan_controls import PlanControl
from workbench.lab.panel.typed_values import AUTO
from workbench.plan.schema import Plan, Training, build_plan, written_fields
from workbench.planner.methods.finetune_methods import FULL, LORA, OF_ADAPTERS

OF_LORA = ("lora_rank", "lora_alpha", "lora_targets", "base_format", "base_group")
"""Controls of what full fine-tuning has none of."""
CLEARED = {"base": ("base", "base_sha256"), "preference_beta": ("preference",)}
"""Control -> fields of `finetune` that go where it is cleared; of others, the field itself."""


@dataclass(frozen=True)
class TaskMemory:
    """Fields of `finetune` that edits of the method took out of the plan, as they were written."""

    dropped: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value."""
    quantize: Mapping[str, Any] = field(default_factory=dict)
    """The 4-bit base that was last set."""

    def after(self, old: Plan, new: Plan) -> TaskMemory:
        """The memory of the plan `new` that an edit of `old` made. What is cleared under the same
        method does not come back.
        """
        before, now = finetune_fields(old), finetune_fields(new)
        was = before.get("quantize")
        found = self if was is None or _four_bit(new) else replace(self, quantize=was)
        if _method(old) == _method(new):
            return found
        dropped = {**self.dropped, **before}
        return replace(found, dropped={k: v for k, v in dropped.items() if k not in now})

    def with_method(self, plan: Plan, method: str | None) -> Plan:
        """`plan` fine-tuned by `method`, or by the last one, with what is remembered of it."""
        data = written_fields(plan)
        training = data.pop("training", {})
        task = {**self.dropped, **(data.pop("finetune", None) or training)}
        task |= {} if method is None else {"method": method}
        leave = OF_ADAPTERS if task.get("method") == FULL else ()
        task = {name: value for name, value in task.items() if name not in leave}
        return build_plan(data | {"finetune": task})


def finetune_edit(plan: Plan, control: PlanControl, value: Any, memory: TaskMemory) -> Plan:
    """`plan` with a control of fine-tuning set, by a method that has what it sets.

    Raises:
        PlanError: No plan can hold the value.
    """
    if control.name == "method":
        return pre_training(plan) if value is None else memory.with_method(plan, value)
    if value is AUTO:
        return _cleared(plan, control)
    if value is None and control.name == "base_format":
        return plan.replace(**{"finetune.quantize": None}) if _four_bit(plan) else plan
    if control.name in OF_LORA and _method(plan) != LORA:
        plan = memory.with_method(plan, LORA)
    elif plan.finetune is None:
        plan = memory.with_method(plan, None)
    if control.name == "base":
        plan = _cleared(plan, control)  # and its hash
    if control.name in ("base_format", "base_group") and not _four_bit(plan):
        plan = plan.replace(**{"finetune.quantize": dict(memory.quantize)})
    return plan.replace(**{control.path: value})


def pre_training(plan: Plan) -> Plan:
    """`plan` that trains, with the batch and the optimizer of its fine-tuning."""
    data = written_fields(plan)
    task = data.pop("finetune", None) or data.get("training", {})
    shared = {name: value for name, value in task.items() if name in Training.model_fields}
    return build_plan(data | {"training": shared})


def finetune_fields(plan: Plan) -> dict[str, Any]:
    """What is written of fine-tuning alone: not the batch, the steps or the optimizer."""
    task = written_fields(plan).get("finetune") or {}
    return {name: value for name, value in task.items() if name not in Training.model_fields}


def _method(plan: Plan) -> str | None:
    return plan.finetune.method if plan.finetune else None


def _four_bit(plan: Plan) -> bool:
    return plan.finetune is not None and plan.finetune.quantize is not None


def _cleared(plan: Plan, control: PlanControl) -> Plan:
    """`plan` without what a control of fine-tuning sets; itself where it has none of it."""
    data = written_fields(plan)
    *above, last = control.path.split(".")
    inner: Any = data
    for name in above if control.name not in CLEARED else above[:1]:
        inner = inner.get(name) or {}
    for name in CLEARED.get(control.name, (last,)):
        inner.pop(name, None)
    return build_plan(data)
