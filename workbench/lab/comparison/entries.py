"""What a comparison knows of each plan or run: its profiles, its plan and how far its run came."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import PlanError
from workbench.plan.plan_diff import differing
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.profile import Profile

if TYPE_CHECKING:
    from workbench.runs.run import Run


@dataclass
class ComparisonEntry:
    """One plan or run of a comparison: its name, its profiles, and its plan where it has one."""

    name: str
    profiles: list[Profile]
    plan: Plan | None = None
    state: str | None = None
    """How far its run came, in words; None for what is no run."""

    def profile_of(self, source: str) -> Profile | None:
        """The profile of one source; the last where there are several."""
        return next(
            (profile for profile in reversed(self.profiles) if profile.source == source), None
        )


def entries_of(items: Sequence[Plan | Profile | Run | Sequence[Profile]]) -> list[ComparisonEntry]:
    """One entry a plan, run or group of profiles, numbered where names are equal.

    Args:
        items: Plans are estimated; runs are estimated and measured. Profiles in a row belong to one
            entry until a source comes again.

    Raises:
        PlanError: A plan is illegal.
    """
    entries = [_entry(item) for item in _group_profiles(items)]
    names = [entry.name for entry in entries]
    for number, entry in enumerate(entries, start=1):
        if names.count(entry.name) > 1:
            entry.name = f"{entry.name} ({number})"
    return entries


def _group_profiles(items: Sequence[Any]) -> list[Any]:
    groups: list[Any] = []
    for item in items:
        last = groups[-1] if groups and isinstance(groups[-1], list) else None
        if not isinstance(item, Profile):
            groups.append(tuple(item) if isinstance(item, Sequence) else item)
        elif last is not None and item.source not in [profile.source for profile in last]:
            last.append(item)
        else:
            groups.append([item])
    return groups


def _entry(item: Any) -> ComparisonEntry:
    from workbench.planner import estimate

    if isinstance(item, Plan):
        return ComparisonEntry(item.resolve().name, [estimate(item)], item)
    if isinstance(item, Sequence):
        profiles = list(item)
        return ComparisonEntry(profiles[0].run, profiles, state=_run_state(profiles))
    # The state is read before the records: every step that it speaks of is then among them.
    state = item.state
    measured = item.profile()
    words = _state_words(state.phase, measured)
    return ComparisonEntry(item.plan.name, [estimate(item.plan), measured], item.plan, words)


def _run_state(profiles: Sequence[Profile]) -> str | None:
    """How far the run came that was measured; None where its directory is not here."""
    for measured, run in _measured_runs(profiles):
        with contextlib.suppress(ValueError, PlanError):
            return _state_words(run.state.phase, measured)
    return None


def _measured_runs(profiles: Sequence[Profile]) -> Iterator[tuple[Profile, Run]]:
    """Each measured profile with its run, of those whose directory is here."""
    from workbench.runs.run import Run

    for profile in profiles:
        if profile.source == "measured" and "run_dir" in profile.notes:
            with contextlib.suppress(ValueError, PlanError):
                yield profile, Run(profile.notes["run_dir"])


def _state_words(phase: str, measured: Profile) -> str:
    """A run's phase, the last step (counted from 1) if it ended early, and what was left out."""
    words = phase
    if phase in ("failed", "stopped"):
        last = measured.steps.step.max()
        words += " before step 1" if last != last else f" after step {int(last) + 1}"
    return "; ".join([words, *(f"{what} left out" for what in measured.notes.get("left_out", []))])


def plan_differences(entries: Sequence[ComparisonEntry]) -> dict[str, dict[str, Any]]:
    """Dotted field -> its value by entry, of the fields in which the plans are not all equal."""
    plans = {entry.name: plan for entry in entries if (plan := _resolved_plan(entry))}
    return {
        name: dict(zip(plans, values)) for name, values in differing(list(plans.values())).items()
    }


def _resolved_plan(entry: ComparisonEntry) -> ResolvedPlan | None:
    """The entry's own plan, else that of the run on which it was measured, else None."""
    if entry.plan:
        return entry.plan.resolve()
    for _, run in _measured_runs(entry.profiles):
        with contextlib.suppress(ValueError, PlanError):
            return run.plan
    return None
