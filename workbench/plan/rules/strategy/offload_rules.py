"""Legality of what is offloaded to host memory beside `data.offload` itself."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import Problem
from workbench.plan.resolved_plan import ResolvedPlan

PARTS_OFFLOADED_BY = ("workbench", "deepspeed", "megatron")
"""Beginnings of the names of frameworks that offload a part of an optimizer: DeepSpeed by
offload_optimizer.ratio (ZeRO-Offload++), Megatron-LM by --optimizer-offload-fraction.
"""


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """Why what `data.offload` entails is not legal."""
    data = plan.strategy.data
    if data.offload_tier == "disk" and data.offload == "none":
        yield Problem(
            "strategy.data.offload_tier",
            "is disk, but data.offload is none; legal: host, or data.offload: optimizer or "
            "parameters",
        )
    yield from _ratio(plan)
    yield from _delayed_update(plan)


def _ratio(plan: ResolvedPlan) -> Iterator[Problem]:
    data, field = plan.strategy.data, "strategy.data.offload_ratio"
    if data.offload_ratio != 1 and data.offload != "optimizer":
        yield Problem(
            field,
            f"is {data.offload_ratio:g}, but data.offload is {data.offload}; legal: 1, or "
            "data.offload: optimizer",
        )
    elif data.offload_ratio == 0:
        yield Problem(
            field, "is 0, which offloads nothing; legal: above 0 to 1, or data.offload: none"
        )
    elif data.offload_ratio != 1 and not plan.strategy.stack.startswith(PARTS_OFFLOADED_BY):
        yield Problem(
            field,
            f"is {data.offload_ratio:g}, but {plan.strategy.stack} offloads all of an optimizer or "
            "nothing; legal: 1, or strategy.stack: workbench",
        )


def _delayed_update(plan: ResolvedPlan) -> Iterator[Problem]:
    s, field = plan.strategy, "training.optimizer.delayed_update"
    if not plan.training.optimizer.delayed_update:
        return
    if s.data.offload == "none" or s.data.offload_ratio != 1:
        yield Problem(
            field,
            f"is true, but data.offload is {s.data.offload} and data.offload_ratio "
            f"{s.data.offload_ratio:g}: only a host that steps all parameters can do it beside the "
            "device; legal: false, or data.offload: optimizer or parameters with offload_ratio 1",
        )
    elif s.stack != "workbench":
        yield Problem(
            field, f"is true, but strategy.stack is {s.stack}; legal: false, or stack: workbench"
        )
