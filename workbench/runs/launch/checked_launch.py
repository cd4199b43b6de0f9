"""Starting a run: resolve the plan once, run preflight once, write the run directory, and start the
supervisor.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from workbench.checkpoint.checkpoint_lock import clear_unfinished
from workbench.checkpoint.checksums import refuse_damaged
from workbench.checkpoint.intact_checkpoints import checkpoint_of, choose_checkpoint
from workbench.checkpoint.resume_changes import resume_notes
from workbench.checkpoint.resume_point import naming_field
from workbench.errors import PlanError, Problem
from workbench.interop import export
from workbench.plan.operators.traced.traced_json import TracedModel
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.estimate import estimate
from workbench.profile import Profile
from workbench.runs.launch import subprocess_verbs
from workbench.runs.launch.accelerate_command import Recipe, compose
from workbench.runs.launch.parent_death import python_module
from workbench.runs.launch.preflight import checkpoint_problems, preflight
from workbench.runs.launch.rendezvous_ports import checked_port
from workbench.runs.launch.traced_models import traced_model
from workbench.runs.run import Run
from workbench.runs.store.command_file import write_command
from workbench.runs.store.run_directory import create, default_root
from workbench.runs.store.run_state import first_state, is_run, write_state
from workbench.safe_io import yaml_files
from workbench.units import GIB
from workbench.untrusted_text import visible

Progress = Callable[[str], None]
CALIBRATION = "calibration.yaml"
"""A run's own copy of the calibration that its plan names."""


def run(
    plan: Plan,
    *,
    force: bool = False,
    resume: str | Path | Run | None = None,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
    new_corpus: bool = False,
    progress: Progress = lambda words: None,
) -> Run:
    """Start `plan`, refusing also what by its estimate does not fit; see `workbench.run`."""
    plan = _allowing(plan, new_corpus)
    full = ready(plan, force=force, resume=resume, root=root, port=port, allow_code=allow_code)
    return _launch(full, resume, root, port, allow_code, progress, Recipe())


def ready(
    plan: Plan,
    *,
    force: bool = False,
    resume: str | Path | Run | None = None,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
) -> ResolvedPlan:
    """Resolve a plan and check that this machine can run it now.

    A model that is given as Python is first traced in a child process, for its estimate, and then
    built in another, to see that the plan's operators name modules that it has.

    Args:
        plan: The plan as written, so that advice is free to change what follows from a change.
        force: Leave out the estimate, and what memory or disk are short of now.
        resume: A run, its directory, or a checkpoint to go on from.
        root: Folder of run directories.
        port: Port of the rendezvous; None: a free one.
        allow_code: Whether the user allows a model that is given as Python.

    Raises:
        PlanError: Everything that stands against the run.
    """
    full = _resumed(plan.resolve(), resume)
    problems = preflight(full, root=root, port=port, force=force, allow_code=allow_code)
    if not force:
        model = _traced(full) if full.code and not problems else None
        problems = [*_does_not_fit(plan, full, model), *problems]
    if problems:
        raise PlanError(problems)
    if full.code:
        subprocess_verbs.inspect(full)
    return full


def _traced(full: ResolvedPlan) -> TracedModel | None:
    """The plan's module, for an estimate; None where it has none: what cannot be traced may run."""
    try:
        return traced_model(full, allow_code=True)
    except ValueError:
        return None


def start(
    plan: Plan,
    *,
    root: str | Path | None = None,
    force: bool = False,
    resume: str | Path | Run | None = None,
    port: int | None = None,
    allow_code: bool = False,
    new_corpus: bool = False,
    progress: Progress = lambda words: None,
    _recipe: Recipe | None = None,
) -> Run:
    """Start `plan` without asking its estimate, and return at once; arguments as of `ready`.

    Raises:
        PlanError: Everything that preflight finds; then nothing has been written.
    """
    full = _resumed(_allowing(plan, new_corpus).resolve(), resume)
    if problems := preflight(full, root=root, port=port, force=force, allow_code=allow_code):
        raise PlanError(problems)
    return _launch(full, resume, root, port, allow_code, progress, _recipe or Recipe())


def _allowing(plan: Plan, new_corpus: bool) -> Plan:
    """The plan, which may go on from a checkpoint on another corpus where that is asked for."""
    return plan.replace(**{"checkpoint.new_corpus": True}) if new_corpus else plan


def _resumed(plan: ResolvedPlan, resume: str | Path | Run | None) -> ResolvedPlan:
    if resume is None:
        return plan
    return plan.with_fields(**{"checkpoint.load": str(checkpoint_of(_folder(resume)))})


def _folder(resume: str | Path | Run) -> str | Path:
    return resume.dir if isinstance(resume, Run) else resume


def _verified(
    plan: ResolvedPlan, resume: str | Path | Run | None, progress: Progress
) -> tuple[ResolvedPlan, list[str]]:
    """The plan, from a checkpoint whose checksums are verified, and what was skipped for it.

    Only now: whatever else stands against the run is found without reading all of a checkpoint.
    """
    if resume is not None:
        path, skipped = choose_checkpoint(_folder(resume), progress=progress)
        return plan.with_fields(**{"checkpoint.load": str(path)}), skipped
    if load := plan.checkpoint.load:
        refuse_damaged(Path(load), progress)
    return plan, []


def _does_not_fit(plan: Plan, full: ResolvedPlan, model: TracedModel | None) -> list[Problem]:
    try:
        profile = estimate(full, model)
    except PlanError:  # of what else cannot be estimated preflight says that it cannot run
        return []
    if profile.fits is not False:
        return []
    need, have = max(profile.peak_bytes_by_rank.values()) / GIB, full.gpu.memory_gib
    # Asked of the plan as written: a resolved one holds the batch and sizes that a change moves.
    change = None if plan.code else estimate(plan).advice
    change = f"; smallest change that fits: {change}" if change else ""
    message = (
        f"does not fit: the estimate needs {need:.2f} GiB of the {have:.2f} GiB of "
        f"{full.gpu.name}{_host_words(profile)}{change}"
    )
    return [Problem("cluster.gpu", f"{message}; `--force` (force=True) runs it nevertheless")]


def _host_words(profile: Profile) -> str:
    """What a rank needs of host memory beyond its share; "" where that holds it."""
    if not profile.exceeds_host:
        return ""
    share = (profile.host_capacity_bytes or 0) / GIB
    return f", and {profile.host_bytes / GIB:.2f} GiB of {share:.2f} GiB of host memory a rank"


def _launch(
    plan: ResolvedPlan,
    resume: str | Path | Run | None,
    root: str | Path | None,
    port: int | None,
    allow_code: bool,
    progress: Progress,
    recipe: Recipe,
) -> Run:
    """Write the run directory of a plan that has passed preflight, and start its supervisor."""
    full, notes = _verified(plan.pin(), resume, progress)
    if full.finetune and full.finetune.base:
        with naming_field("finetune.base"):
            refuse_damaged(Path(full.finetune.base), progress)
    if problems := checkpoint_problems(full):  # only hashes tell another text or base
        raise PlanError(problems)
    notes += resume_notes(full)
    meeting = checked_port(port)
    _clear_killed_run(full)

    def fill(folder: Path, final: Path) -> None:
        _write(folder / "plan.yaml", _with_calibration(full, folder, final).to_yaml())
        config = export.accelerate_config(full, meeting)
        _write(folder / "accelerate.yaml", yaml_files.dump(config))
        runs_code = allow_code and full.code is not None
        write_command(folder, compose(full, final, meeting, recipe, runs_code))
        write_state(folder, first_state(full.world_size, full.training.steps, notes))

    for note in notes:
        print(visible(note), file=sys.stderr, flush=True)
    folder = create(default_root(root), full.name, fill)
    _supervise(folder)
    return Run(folder)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _clear_killed_run(plan: Plan) -> None:
    """Free the disk of what the run that `plan` goes on from was writing when it was killed."""
    load = plan.checkpoint.load
    if load is not None and is_run(Path(load).parent.parent):
        clear_unfinished(Path(load).parent)


def _with_calibration(plan: ResolvedPlan, folder: Path, final: Path) -> ResolvedPlan:
    """The plan with a calibration of its own: the machine may be measured again while the run is
    in use.
    """
    source = plan.cluster.calibration
    if source is None:
        return plan
    shutil.copyfile(source, folder / CALIBRATION)
    return plan.with_fields(**{"cluster.calibration": str(final / CALIBRATION)})


def _supervise(folder: Path) -> None:
    """Start the supervisor of a run.

    It gets a session of its own: neither Ctrl-C in the terminal's process group nor the end of a
    notebook kernel reaches it.
    """
    with (folder / "logs" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [*python_module("workbench.runs.launch.supervisor"), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Its exit status must be collected here, or it stays a zombie as long as this process lives.
    threading.Thread(target=process.wait, name=f"reap {process.pid}", daemon=True).start()
