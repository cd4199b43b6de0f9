"""Starting only what can run here and fits: what the verb `run`, the notebook's button and a
comparison ask for.
"""

from __future__ import annotations

from pathlib import Path

from workbench.checkpoint.checksums import Told
from workbench.errors import PlanError, Problem
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.runs.launch import subprocess_verbs
from workbench.runs.launch.preflight import preflight
from workbench.runs.run import Run, start


def run(
    plan: Plan,
    *,
    force: bool = False,
    resume: str | Path | Run | None = None,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
    progress: Told = lambda words: None,
) -> Run:
    """`start`, refusing also what by its estimate does not fit its cards, unless `force`. Raises
    `PlanError`.
    """
    full = ready(plan, force=force, root=root, port=port, allow_code=allow_code)
    return start(
        full,
        root=root,
        force=force,
        resume=resume,
        port=port,
        allow_code=allow_code,
        progress=progress,
    )


def ready(
    plan: Plan,
    *,
    force: bool = False,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
) -> ResolvedPlan:
    """The complete plan, if this machine can run it now; raises `PlanError` with what stands
    against it, as `run`.

    A model that is code is built once in a child process, to see that the plan's operators name
    what it has.
    """
    full = plan.resolve()
    problems = preflight(full, root=root, port=port, force=force, allow_code=allow_code)
    if full.code and not problems:
        subprocess_verbs.inspect(full)
    if not force:
        problems = [*_unfit(plan, full.gpu), *problems]
    if problems:
        raise PlanError(problems)
    return full


def _unfit(plan: Plan, gpu: GPU) -> list[Problem]:
    try:
        profile = estimate(plan)
    except PlanError:  # what cannot be estimated cannot be run either, and preflight says so
        return []
    if profile.fits is not False:
        return []
    need, have = max(profile.peak_bytes_by_rank.values()) / 2**30, gpu.memory_gib
    change = f"; smallest change that fits: {words}" if (words := advice(profile)) else ""
    message = (
        f"does not fit: the estimate needs {need:.2f} GiB of the {have:.2f} GiB of "
        f"{gpu.name}{change}"
    )
    return [Problem("cluster.gpu", f"{message}; `--force` (force=True) runs it nevertheless")]


def advice(profile: Profile) -> str:
    """The smallest change that makes an estimated plan fit, in words; empty where it fits or none
    is known.
    """
    found = profile.notes.get("advice")
    return (
        f"{found['field']} from {found['from']} to {found['to']}"
        if isinstance(found, dict)
        else str(found or "")
    )
