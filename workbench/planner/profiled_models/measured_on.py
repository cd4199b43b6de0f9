"""On what the times of a layer profile were measured: nothing scales them to the plan's GPU."""

from __future__ import annotations

from workbench.plan.resolved_plan import ResolvedPlan


def measured_on(plan: ResolvedPlan) -> str:
    """A sentence for a complete plan whose model is a layer profile; empty for other models."""
    if not plan.profiled:
        return ""
    source = plan.layer_profile.source.removeprefix("measured ")
    where = f"as measured {source}" if source else "as measured (the file does not say on what)"
    return f"{where}; not scaled to {plan.gpu.name}, whose memory and links alone are used"
