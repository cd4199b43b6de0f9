"""Commands about runs: run, attach, stop, runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import verbs
from workbench.cli import completion, tables
from workbench.cli.options import AllowCode, Json, Root, emit, planned
from workbench.cli.progress import STOP_SECONDS, Status, follow
from workbench.cli.terminal import print_message
from workbench.plan.schema import Plan
from workbench.runs.run import Run
from workbench.runs.store.run_state import State
from workbench.termination import exit_code

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run directory, or its name under the folder of runs.",
        autocompletion=completion.runs,
    ),
]


@planned
def run(
    plan: Plan,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow it to its end; Ctrl-C stops it.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Run or checkpoint to go on from.")
    ] = None,
    new_corpus: Annotated[
        bool, typer.Option("--new-corpus", help="Go on from a checkpoint on another corpus.")
    ] = False,
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
    source = resume if resume is None or Path(resume).exists() else verbs.attach(resume, root=root)
    with Status("starting") as status:
        started = verbs.run(
            plan,
            force=force,
            resume=source,
            root=root,
            port=port,
            allow_code=allow_code,
            new_corpus=new_corpus,
            progress=status,
        )
    if not wait:
        emit(json, _answer(started, started.state), lambda: [_hint(started)])
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
    found = verbs.attach(name, root=root)
    found.stop(checkpoint=checkpoint, grace_seconds=grace)
    state = found.wait(grace + 30.0)
    emit(json, _answer(found, state), lambda: [tables.runs_table([found])])


def runs(root: Root = None, json: Json = False) -> None:
    found = verbs.runs(root)
    emit(json, [_answer(one, one.state) for one in found], lambda: [tables.runs_table(found)])


def _follow_to_end(found: Run, json: bool, stop_on_interrupt: bool) -> None:
    try:
        state = follow(found)
    except KeyboardInterrupt as interrupt:
        if stop_on_interrupt:
            print_message(f"stopping {found.id}")
            found.stop()
            _show(found, found.wait(STOP_SECONDS), json)
        else:
            print_message(f"{found.id} goes on; `workbench attach {found.id}` comes back to it")
        raise typer.Exit(exit_code(interrupt)) from None
    _show(found, state, json)
    if state.phase == "failed":
        raise typer.Exit(1)


def _show(found: Run, state: State, json: bool) -> None:
    profile = found.profile()
    measured = {**profile.summary(), "loss": profile.loss}
    emit(
        json,
        {**measured, **_answer(found, state)},
        lambda: [tables.profile_table(profile), tables.ending(found, state)],
    )


def _answer(found: Run, state: State) -> dict[str, Any]:
    """The answer for machines."""
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
        "notes": state.notes or None,
    }


def _hint(found: Run) -> str:
    return (
        f"{found.id} started\nfollow: workbench attach {found.dir}\nstop:   workbench stop "
        f"{found.dir}"
    )
