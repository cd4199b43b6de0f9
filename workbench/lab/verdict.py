"""The words above a plan: whether it fits its cards, how fast it is, and what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.lab.units import bytes_text, count_text, digits, seconds_text
from workbench.plan.errors import Problem
from workbench.profile import Profile

BUTTONS = (
    {"label": "Write plan file", "action": "write", "hint": "Write the plan file named below"},
    {
        "label": "Rehearse",
        "action": "rehearse",
        "hint": "Run the real code on fake tensors: exact bytes, no cards needed",
    },
    {"label": "Run", "action": "run", "hint": "Train it on this machine"},
)


def banner(profile: Profile | None, problems: Sequence[Problem] = (), news: str = "") -> dict[str, Any]:
    """The banner of a plan's estimate; without one, of an illegal plan (`problems`: those told nowhere else)."""
    if profile is None:
        told = [str(problem) for problem in problems]
        lines = [*told, "The charts still show the last legal plan."]
        return shown("bad", "Not a legal plan: mend what is marked", lines, disabled=True)
    lines = [line for line in (change(profile), speed(profile), news) if line]
    return shown("bad" if profile.fits is False else "good", fit(profile), lines)


def shown(tone: str, headline: str, lines: list[str], disabled: bool = False) -> dict[str, Any]:
    """A banner with the planner's buttons."""
    buttons = [button | {"disabled": disabled} for button in BUTTONS]
    return {"tone": tone, "headline": headline, "lines": lines, "fraction": None, "buttons": buttons, "code": ""}


def fit(profile: Profile) -> str:
    """One line: the fullest rank against the card."""
    peaks = profile.peak_bytes_by_rank
    if not peaks:
        return "No memory is known"
    rank = max(peaks, key=lambda r: (peaks[r], -r))
    if not profile.capacity_bytes:
        return f"{bytes_text(peaks[rank])} on the fullest rank ({rank})"
    share = digits(100 * peaks[rank] / profile.capacity_bytes, 2)
    word = "Fits" if profile.fits else "Does not fit"
    told = f"{bytes_text(peaks[rank])} of {bytes_text(profile.capacity_bytes)} ({share} %)"
    return f"{word}: {told} on the fullest rank ({rank})"


def change(profile: Profile) -> str:
    """The smallest change that would make it fit, in words; empty where it fits."""
    if profile.fits is not False:
        return ""
    found = profile.notes.get("advice")
    if not found:
        return "No single change makes it fit: combine a larger count with more sharding or recomputing."
    to = f"{found['field']}: {found['from']} → {found['to']}"
    return f"Smallest change that fits: {to} ({bytes_text(found['peak_bytes'])} on the fullest rank)"


def speed(profile: Profile) -> str:
    """Step time and throughput, with their source."""
    if not profile.step_seconds:
        return ""
    tokens = profile.tokens_per_second
    pace = f" · {count_text(tokens)} tokens/s" if tokens else ""
    return f"{seconds_text(profile.step_seconds)} a step{pace} ({profile.source})"
