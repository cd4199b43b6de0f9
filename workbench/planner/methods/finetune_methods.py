"""The methods that a plan can be fine-tuned by, each as a plan of its own."""

from __future__ import annotations

from typing import Any

from workbench.errors import refuse
from workbench.plan.schema import Finetune, Lora, Plan, build_plan, written_fields

FULL, LORA, FOUR_BIT = "full", "lora", "lora-4-bit"
METHODS = (FULL, LORA, FOUR_BIT)
OF_ADAPTERS = ("lora", "quantize", "adapter")
"""Fields of `finetune` that full fine-tuning has none of."""


def method_plan(plan: Plan, method: str) -> Plan:
    """`plan` with all weights trained, or adapters beside its base in 16 or in 4 bits.

    Adapters are those of the plan, else the default; so is the 4-bit format.

    Raises:
        PlanError: The plan does not fine-tune.
    """
    if plan.finetune is None:
        raise refuse(
            "--methods",
            "compares ways to fine-tune, and the plan has no `finetune`; legal: a plan that has "
            "it in place of `training`, or --set finetune.sequence_length=4096",
        )
    task: dict[str, Any] = dict(written_fields(plan)["finetune"])
    leave = OF_ADAPTERS if method == FULL else () if method == FOUR_BIT else ("quantize",)
    task = {name: value for name, value in task.items() if name not in leave}
    task["method"] = "full" if method == FULL else "lora"
    if method == FOUR_BIT and task.get("quantize") is None:
        task["quantize"] = {}
    return build_plan(written_fields(plan) | {"finetune": task})


def method_words(plan: Plan) -> str:
    """A plan's method for people: `full`, `LoRA rank 8`, `LoRA rank 8, base in NF4`."""
    tune: Finetune | None = plan.finetune
    if tune is None or tune.method == "full":
        return "full"
    lora = tune.lora or Lora()
    base = f", base in {tune.quantize.format.upper()}" if tune.quantize else ""
    targets = {"all": "", "attention": " on attention"}.get(str(lora.targets), " on some layers")
    return f"LoRA rank {lora.rank}{targets}{base}"
