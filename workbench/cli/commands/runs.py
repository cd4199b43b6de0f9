"""Commands about runs and this machine: run, attach, stop, runs, doctor."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import AllowCode, Json, Root, emit, planned
from workbench.cli.progress import STOP_SECONDS, followed, waiting
from workbench.cli.terminal import tell
from workbench.plan.schema import Plan
from workbench.runs.run import Run
from workbench.runs.store.run_state import State

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory, or its name under the folder of runs.")
]
INTERRUPTED = 130


@planned
def run(
    plan: Plan,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow it to its end; Ctrl-C stops it.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Run or checkpoint to go on from.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run what by its estimate does not fit.")
    ] = False,
    port: Annotated[
        int | None, typer.Option("--port", help="Port where ranks meet; default a free one.")
    ] = None,
    allow_code: AllowCode = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Train a plan on this machine through `accelerate launch`; returns at once, the run goes
    on.
    """
    source = resume if resume is None or Path(resume).exists() else verbs.attach(resume, root=root)
    with waiting("starting") as told:
        started = verbs.run(
            plan,
            force=force,
            resume=source,
            root=root,
            port=port,
            allow_code=allow_code,
            progress=told,
        )
    if not wait:
        emit(json, _answer(started, started.state), Text(_hint(started)))
        return
    _follow_to_end(started, json, stop_on_interrupt=True)


def attach(
    name: RunName,
    once: Annotated[
        bool, typer.Option("--once", help="Show what it is doing now, and return.")
    ] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Follow a run to its end, from any shell; Ctrl-C only lets go of it."""
    found = verbs.attach(name, root=root)
    if once:
        _show(found, found.state, json)
        return
    _follow_to_end(found, json, stop_on_interrupt=False)


def stop(
    name: RunName,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Save a checkpoint first.")
    ] = False,
    grace: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds before ranks are ended.")
    ] = 30.0,
    root: Root = None,
    json: Json = False,
) -> None:
    """Stop a run after its step, and wait until it is over."""
    found = verbs.attach(name, root=root)
    found.stop(checkpoint=checkpoint, grace_seconds=grace)
    state = found.wait(grace + 30.0)
    emit(json, _answer(found, state), tables.runs([found]))


def runs(root: Root = None, json: Json = False) -> None:
    """Runs kept on this machine, latest first."""
    found = verbs.runs(root)
    emit(json, [_answer(one, one.state) for one in found], tables.runs(found))


def doctor(json: Json = False) -> None:
    """What is attached, what is installed, what is missing and how to mend it."""
    from workbench.cli.commands.doctor import examine

    found = examine()
    emit(json, [asdict(finding) for finding in found], tables.findings(found))
    if any(finding.ok is False for finding in found):
        raise typer.Exit(1)


def _follow_to_end(found: Run, json: bool, stop_on_interrupt: bool) -> None:
    try:
        state = followed(found)
    except KeyboardInterrupt:
        if stop_on_interrupt:
            tell(f"stopping {found.id}")
            found.stop()
            _show(found, found.wait(STOP_SECONDS), json)
        else:
            tell(f"{found.id} goes on; `workbench attach {found.id}` comes back to it")
        raise typer.Exit(INTERRUPTED) from None
    _show(found, state, json)
    if state.phase == "failed":
        raise typer.Exit(1)


def _show(found: Run, state: State, json: bool) -> None:
    profile = found.profile()
    measured = {**profile.summary(), "loss": profile.loss}
    emit(
        json,
        {**measured, **_answer(found, state)},
        tables.profile(profile),
        Text(tables.ending(found, state)),
    )


def _answer(found: Run, state: State) -> dict[str, Any]:
    """What a machine wants to know of a run."""
    cause = asdict(state.cause) if state.cause else None
    return {
        "run": found.id,
        "run_dir": str(found.dir),
        "phase": state.phase,
        "world_size": state.world_size,
        "steps": state.steps,
        "exit_code": state.exit_code,
        "cause": cause,
        "warning": state.warning or None,
    }


def _hint(found: Run) -> str:
    return (
        f"{found.id} started\nfollow: workbench attach {found.dir}\nstop:   workbench stop "
        f"{found.dir}"
    )
