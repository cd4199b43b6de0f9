"""The banner of a plan: whether it fits its GPUs, its step time, and what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.errors import Problem
from workbench.lab.panel.control_values import value_text
from workbench.lab.panel.controls import control_of
from workbench.lab.panel.plan_controls import plan_controls
from workbench.profile import Profile
from workbench.units import bytes_text, count_text, digits, interval_text, seconds_text

SHOWN_SLOWDOWN = 1.01
"""Slow-down from which on it is shown."""
BUTTONS = (
    {"label": "Write plan file", "action": "write", "hint": "Write the plan file named above"},
    {
        "label": "Rehearse",
        "action": "rehearse",
        "hint": "Run the real code on fake tensors: exact bytes, no GPUs needed; a second press "
        "cancels",
    },
    {"label": "Run", "action": "run", "hint": "Train it on this machine"},
)
SHOW_RUN = {"label": "Show the run", "action": "show", "hint": "Scroll to its dashboard, below"}
"""Button of a planner whose run was started."""


def verdict_banner(
    profile: Profile | None, problems: Sequence[Problem] = (), news: str = "", drawn: bool = True
) -> dict[str, Any]:
    """The banner of a plan's estimate, or of an illegal plan.

    Args:
        profile: The estimate; None for an illegal plan.
        problems: What is illegal.
        news: A line about the last action.
        drawn: Whether the charts show an earlier legal plan.
    """
    if profile is None:
        lines = [
            news,
            *map(problem_line, problems),
            "The charts still show the last legal plan." if drawn else "",
        ]
        named = ", ".join(dict.fromkeys(problem_label(problem) for problem in problems))
        return make_banner(
            "bad", f"Not a legal plan: fix {named}", [line for line in lines if line], disabled=True
        )
    said = (advice_line(profile), step_time_line(profile), *published_lines(profile), news)
    lines = [line for line in said if line]
    more = [apply_button(profile)] if profile.fits is False and profile.notes.get("advice") else []
    return make_banner(
        "bad" if profile.fits is False else "good", fit_line(profile), lines, more=more
    )


def make_banner(
    tone: str,
    headline: str,
    lines: list[str],
    disabled: bool = False,
    more: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A banner with the planner's buttons, `more` of them first."""
    buttons = [button | {"disabled": disabled} for button in (*more, *BUTTONS)]
    return {
        "tone": tone,
        "headline": headline,
        "lines": lines,
        "fraction": None,
        "buttons": buttons,
        "code": "",
    }


def problem_label(problem: Problem) -> str:
    """The label of the control that a problem is about, else its field."""
    control = control_of(problem)
    return control.label if control else problem.field or "the plan"


def problem_line(problem: Problem) -> str:
    """A problem by its control's label and its field."""
    control = control_of(problem)
    return f"{control.label} ({problem.field}) {problem.message}" if control else str(problem)


def apply_button(profile: Profile) -> dict[str, Any]:
    """The button that makes the smallest change that fits."""
    return {"label": "Apply the change", "action": "apply", "hint": advice_words(profile)}


def fit_line(profile: Profile) -> str:
    """One line: peak memory (max rank) against the GPU's memory, and the risk that it is more."""
    peaks = profile.peak_bytes_by_rank
    if not peaks:
        return "No memory is known"
    rank = max(peaks, key=lambda r: (peaks[r], -r))
    if not profile.capacity_bytes:
        return f"Peak memory {bytes_text(peaks[rank])} (rank {rank})"
    share = digits(100 * peaks[rank] / profile.capacity_bytes, 2)
    word = "Fits" if profile.fits else "Does not fit"
    amount = f"{bytes_text(peaks[rank])} of {bytes_text(profile.capacity_bytes)}"
    risk = f", {profile.risk_words}" if profile.risk_words else ""
    host = f"{bytes_text(profile.host_bytes)} of {bytes_text(profile.host_capacity_bytes or 0)}"
    short = f"; host memory {host} a rank" if profile.exceeds_host else ""
    return f"{word}: peak memory {amount} ({share} %, rank {rank}){risk}{short}"


def advice_line(profile: Profile) -> str:
    """The smallest change that would make it fit, in words; empty where it fits."""
    if profile.fits is not False:
        return ""
    found = profile.notes.get("advice")
    if not found:
        return (
            "No single change makes it fit: combine a larger count with more sharding or "
            "recomputing."
        )
    return (
        f"Smallest change that fits: {advice_words(profile)} "
        f"(peak memory {bytes_text(found['peak_bytes'])})"
    )


def advice_words(profile: Profile) -> str:
    """The smallest change, by its controls' labels."""
    found = profile.notes["advice"]
    labels = {control.path: control.label for control in plan_controls().values()}
    if len(found["changes"]) == 1 or "strategy" in found["changes"]:
        return (
            f"{labels.get(found['field'], found['field'])} {value_text(found['from'])} → "
            f"{value_text(found['to'])}"
        )
    return ", ".join(
        f"{labels.get(path, path)} → {value_text(value)}"
        for path, value in found["changes"].items()
    )


def step_time_line(profile: Profile) -> str:
    """Step time with its interval, and throughput, with their source; nothing of what does not
    fit.
    """
    if not profile.step_seconds or profile.unfit_words:
        return ""
    tokens = profile.tokens_per_second
    pace = f" · {count_text(tokens)} tokens/s" if tokens else ""
    ends = profile.step_interval
    within = f" (90 % interval {interval_text(ends)})" if ends else ""
    return f"step time {seconds_text(profile.step_seconds)}{within}{pace} ({profile.source})"


def published_lines(profile: Profile) -> list[str]:
    """Notes on what its framework cannot do, on what is assumed of its GPU, and on a base that is
    elsewhere; where it fits also its retries where memory is nearly full, and its MFU with the
    published one.
    """
    notes = profile.notes
    lines = [notes[name] for name in ("cannot", "assumed_hardware", "base") if notes.get(name)]
    slower = notes.get("memory", {}).get("expected_slowdown") or 1.0
    if slower >= SHOWN_SLOWDOWN:
        lines.append(f"nearly full: allocator thrashing, about {digits(slower, 2)}x slower")
    return lines + ([] if profile.unfit_words else mfu_lines(profile))


def mfu_lines(profile: Profile) -> list[str]:
    """MFU beside the best published near it, and how far that is."""
    notes = profile.notes
    if not (near := notes.get("published")):
        return []
    best, far = near["highest_mfu"], near["extrapolates"]
    beside = (
        "none published on this GPU near this scale"
        if best is None
        else f"best published on this GPU near this scale {100 * best:.1f} %"
    )
    mfu = f"MFU {100 * notes['model_flops_utilisation']:.1f} % ({profile.source}); {beside}"
    return [
        mfu,
        *([near["promise"]] if near["promise"] else []),
        *([f"error may be larger: {far}"] if far else []),
    ]
