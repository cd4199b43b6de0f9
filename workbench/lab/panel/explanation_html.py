"""The text below a plan's charts: its cost, and what binds its step time and memory."""

from __future__ import annotations

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.planner.explain.bottlenecks import find_bottleneck
from workbench.planner.explain.explanation import cost_line
from workbench.planner.framework_limits import broken_limits
from workbench.planner.training_cost import training_cost
from workbench.profile import Profile
from workbench.untrusted_text import escaped


def reasons_html(resolved: ResolvedPlan, profile: Profile) -> str:
    """Cost and binding constraint of a plan as HTML; what does not bind follows in grey.

    Args:
        resolved: The plan.
        profile: its estimate.
    """
    found = find_bottleneck(resolved, profile)
    other = found.time if found.constraint == "memory" else found.memory
    lines = [
        *(_line(words, bold=True) for words in broken_limits(resolved)),
        _line(cost_line(training_cost(resolved, profile))),
        _line(found.sentence, bold=True),
        _line(other),
    ]
    return (
        f'<div class="wb-reasons" style="font-size:13px;line-height:1.5;margin:2px 0 '
        f'6px">{"".join(lines)}</div>'
    )


def _line(text: str, bold: bool = False) -> str:
    weight = "font-weight:600;" if bold else "color:var(--jp-ui-font-color2,#616161);"
    return f'<div style="{weight}">{escaped(text)}</div>'
