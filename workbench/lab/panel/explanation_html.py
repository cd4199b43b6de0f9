"""The text below a plan's charts: its cost, and what binds its step time and memory."""

from __future__ import annotations

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.explain.bottlenecks import find_bottleneck
from workbench.planner.explain.explanation import cost_line
from workbench.planner.explain.method_savings import method_savings
from workbench.planner.explain.plan_figures import explained_plan
from workbench.planner.framework_limits import broken_limits
from workbench.planner.training_cost import training_cost
from workbench.profile import Profile
from workbench.untrusted_text import escaped


def reasons_html(plan: Plan, resolved: ResolvedPlan, profile: Profile) -> str:
    """Cost and binding constraint of a plan as HTML; what does not bind follows in grey, and what
    adapters save. Of one that does not fit, its memory alone: it takes no time and costs nothing.

    Args:
        plan: The plan as written.
        resolved: The same, complete.
        profile: its estimate.
    """
    saved = None if resolved.lora is None else method_savings(explained_plan(plan, profile))
    found = find_bottleneck(resolved, profile)
    other = found.time if found.constraint == "memory" else found.memory
    lines = [_line(words, bold=True) for words in broken_limits(resolved)]
    if profile.unfit_words:
        lines.append(_line(found.memory, bold=True))
    else:
        cost = cost_line(training_cost(resolved, profile))
        lines += [_line(cost), _line(found.sentence, bold=True), _line(other)]
    lines += [_line(saved.sentence)] if saved else []
    return (
        f'<div class="wb-reasons" style="font-size:13px;line-height:1.5;margin:2px 0 '
        f'6px">{"".join(lines)}</div>'
    )


def _line(text: str, bold: bool = False) -> str:
    weight = "font-weight:600;" if bold else "color:var(--jp-ui-font-color2,#616161);"
    return f'<div style="{weight}">{escaped(text)}</div>'
