"""The planner: an interactive plan, estimated again at every edit.

The answer is `planner.plan`, a Plan like any other; what the controls show is only a way to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from workbench.errors import PlanError, Problem, refuse
from workbench.lab.charts import collectives, memory, memory_map, step_time_parts, timeline
from workbench.lab.charts.memory_map import has_memory_map
from workbench.lab.live.board import Board
from workbench.lab.live.output_cell import widget_bundle
from workbench.lab.panel import controls, fit_verdict
from workbench.lab.panel.cancellable import Cancellable
from workbench.lab.panel.control_values import MISSING, control_values, panel_data, read_path
from workbench.lab.panel.edit_history import EditHistory, RejectedInput
from workbench.lab.panel.explanation_html import reasons_html
from workbench.lab.panel.plan_controls import PlanControl, plan_controls
from workbench.lab.panel.plan_edits import (
    GLOBAL_BATCH,
    apply_edit,
    batch_problem,
    held_batch,
    side_effects,
)
from workbench.lab.panel.typed_values import parse_typed
from workbench.lab.pictures.saved_notebook import SavedPicture, picture_html
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan, written_fields
from workbench.plan.schema import parse_plan as plan_from
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.lab.live.dashboard import Dashboard
    from workbench.lab.live.figure import Figure
    from workbench.profile import Profile
    from workbench.runs.run import Run

DEFAULT_PLAN = {"model": "llama-3-8b", "gpu": "h100-sxm-80gb", "gpus": 8, "strategy": "zero-3"}


MAX_RANKS = 2**16
"""Charts of more ranks take seconds an edit."""


class Planner(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The interactive planner: controls, the estimate's charts, its explanation and the plan file.

    Args:
        plan: The plan to start from; default: Llama 3 8B with ZeRO-3 on eight H100.

    Attributes:
        plan: The last legal plan.
        profile: Its estimate.
        rehearsed: Its rehearsal, once the button was pressed.
        problems: What is illegal in the plan that the controls ask for.
        run: The run that the button started.
        path: The plan file that is written and loaded.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan.of(**DEFAULT_PLAN)  # type: ignore[arg-type]
        self.profile: Profile | None = None
        self.rehearsed: Profile | None = None
        self._rehearsal: Cancellable | None = None
        self.problems: list[Problem] = []
        self.run: Run | None = None
        self.dashboard: Dashboard | None = None
        self.path = "plan.yaml"
        self._resolved: ResolvedPlan | None = None
        self._news = ""
        self._history = EditHistory(self.plan)
        # JupyterLab sends what widgets do to a thread beside the one that runs cells.
        self._changing = threading.RLock()
        self.children: Any
        self.panel = controls.Panel(self._receive)
        self.board = Board(self._on_press)
        self.reasons, self._yaml = widgets.HTML(), widgets.HTML()
        self._saved = SavedPicture(self._picture)
        super().__init__([self.panel, self.board, self.reasons, self._yaml])
        self._replan()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(widget_bundle(self, f"Planner of {self.plan}"), raw=True)
        self._saved.show()

    def set(self, name: str, value: Any) -> None:
        """Set a control as its user would; an illegal value goes to `problems`.

        Args:
            name: A control, such as "tensor", or its field, such as "strategy.tensor.size".
            value: Its value; text is parsed as if it were typed.

        Raises:
            PlanError: There is no control of that name.
        """
        found = [
            control for control in plan_controls().values() if name in (control.name, control.path)
        ]
        if not found:
            raise refuse(name, f"is no control of the planner; legal: {', '.join(plan_controls())}")
        with self._changing:
            self._edit(found[0], value)

    def undo(self) -> None:
        """Take the last edit back."""
        with self._changing:
            self._history.undo()
            self._replan()

    def reset(self) -> None:
        """Back to the plan that was opened or loaded last; can be undone."""
        with self._changing:
            self._history.reset()
            self._replan()

    def load(self, path: str | Path | None = None) -> None:
        """Open a plan file; can be undone. Raises `PlanError` where it cannot be read."""
        self._open(Plan.load(path or self.path), str(path or self.path))

    def write(self, path: str | Path | None = None) -> Path:
        """Write the plan file; its path."""
        target = Path(path or self.path)
        target.write_text(self.plan.to_yaml(), encoding="utf-8")
        return target

    def apply(self) -> None:
        """Make the smallest change that fits; does nothing where the plan fits or none is known."""
        with self._changing:
            found = self.profile.notes.get("advice") if self.profile and not self.problems else None
            if self.profile and found:
                requested = self._history.now
                words = fit_verdict.advice_words(self.profile)
                fitting = requested.plan.replace(**found["changes"])
                held = None if GLOBAL_BATCH in found["changes"] else requested.held
                self._history.push(requested.with_plan("", fitting, held))
                self._replan(lambda: f"Applied: {words}.")

    def _edit(self, control: PlanControl, typed: Any) -> None:
        requested = self._history.now
        old = control_values(requested.plan, self._resolved)
        set_now = control.name == "global_batch"
        held = held_batch(requested.plan, self._resolved, requested.held)
        try:
            plan = apply_edit(
                requested.plan,
                control,
                parse_typed(control, typed),
                self._resolved,
                requested.memory,
                held,
            )
        except PlanError as error:
            self._history.push(
                requested.with_rejected(control.name, RejectedInput(typed, tuple(error.problems)))
            )
            self._replan()
            return
        self._history.push(requested.with_plan(control.name, plan, None if set_now else held))
        batch_written = (
            read_path(panel_data(requested.plan), GLOBAL_BATCH)
            is MISSING
            is not read_path(panel_data(plan), GLOBAL_BATCH)
        )
        why = "" if set_now else batch_problem(plan, held)
        self._replan(
            lambda: side_effects(
                control, old, control_values(plan, self._resolved), batch_written, why
            )
        )

    def _replan(self, news: Callable[[], str] = str) -> None:
        """Estimate what is requested and show it; `news()` is shown where it is legal."""
        from workbench.planner import estimate
        from workbench.runs.launch.preflight import base_notes

        requested = self._history.now
        try:
            resolved = requested.resolve()
            if resolved.world_size > MAX_RANKS:
                raise refuse(
                    "cluster.gpus",
                    f"is {resolved.world_size}; the planner shows at most {MAX_RANKS}",
                )
            profile = estimate(requested.plan)
            profile.notes.update(base_notes(resolved))
        except PlanError as error:
            self._refuse(error.problems)
            return
        self.plan, self.profile, self.rehearsed, self.problems, self._resolved = (
            requested.plan,
            profile,
            None,
            [],
            resolved,
        )
        self._news = news()
        self._show_controls()
        self._draw()
        self.reasons.value = reasons_html(requested.plan, resolved, profile)

    def _refuse(self, problems: list[Problem]) -> None:
        self.problems = problems
        self._show_controls()
        self._show_news("")

    def _show_controls(self) -> None:
        now, history = (
            controls.control_fields(self._history.now, self._resolved, self.problems),
            self._history,
        )
        self.panel.show(fields=now, undo=history.can_undo, reset=history.can_reset, path=self.path)

    def _draw(self) -> None:
        assert self.profile is not None
        self._show_news(self._news)
        self.board.put(*self._figures())
        if not has_memory_map(self.profile.world_size):
            self.board.remove("memory_map")
        self._yaml.value = plan_file_html(self.plan.to_yaml())
        self._saved.touch()

    def _figures(self) -> list[Figure]:
        assert self.profile is not None
        profiles = [self.profile, self.rehearsed] if self.rehearsed else [self.profile]
        found = [
            memory(*profiles),
            step_time_parts(self.profile),
            collectives(*profiles),
            timeline(self.profile),
        ]
        return (
            [*found, memory_map(self.profile)] if has_memory_map(self.profile.world_size) else found
        )

    def _picture(self) -> str:
        """What a saved notebook shows: the plan, its estimate and the run that was started."""
        assert self.profile is not None
        banner = fit_verdict.verdict_banner(self.profile)
        shown = [
            picture_html(self._figures(), banner["headline"], banner["lines"]),
            plan_file_html(self.plan.to_yaml()),
        ]
        return "".join([*shown, *([self.dashboard.picture()] if self.dashboard else [])])

    def _receive(self, content: dict[str, Any]) -> None:
        """Act on a message of the panel."""
        try:
            if content.get("type") == "edit" and content.get("name") in plan_controls():
                self.set(content["name"], content.get("value"))
            elif content.get("type") == "path":
                self.path = str(content.get("value"))
            elif content.get("type") == "upload":
                name = str(content.get("name"))
                self._open(plan_from(str(content.get("text")), where=name), name)
            elif content.get("type") in ("undo", "reset", "load"):
                getattr(self, content["type"])()
        except (ValueError, OSError) as error:
            self._show_news(str(error))

    def _open(self, plan: Plan, name: str) -> None:
        with self._changing:
            self._history.load(plan)
            self._replan(lambda: f"Loaded: {name}")

    def _on_press(self, action: str) -> None:
        act: dict[str, Callable[[], None]] = {
            "write": self._write,
            "rehearse": self._rehearse,
            "run": self._run,
            "apply": self.apply,
            "show": self._show_run,
        }
        try:
            act[action]()
        except (ValueError, OSError) as error:
            self._show_news(str(error))

    def _show_news(self, news: str) -> None:
        self._news = news
        profile = None if self.problems else self.profile
        banner = fit_verdict.verdict_banner(
            profile, self.problems, news, drawn=self.profile is not None
        )
        if self.dashboard:
            banner["buttons"].append(fit_verdict.SHOW_RUN)
        self.board.show_banner(**banner)

    def _write(self) -> None:
        self._show_news(f"Written: {self.write().absolute()}")

    def _run(self) -> None:
        from workbench.lab.live.dashboard import watch
        from workbench.runs.launch.checked_launch import run

        self.run = run(self.plan)
        self.dashboard = watch(self.run)
        self.children = (*self.children[:4], self.dashboard.board)
        self.dashboard.board.reveal()
        self._show_news(f"Started: {self.run.dir}")
        threading.Thread(target=self._redraw_when_over, args=(self.dashboard,), daemon=True).start()

    def _show_run(self) -> None:
        """Scroll to the dashboard of the run that was started."""
        if self.dashboard:
            self.dashboard.board.reveal()

    def _redraw_when_over(self, dashboard: Dashboard) -> None:
        """Draw a run that is over for the saved notebook."""
        dashboard.wait()
        self._saved.touch()

    def _rehearse(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.cancel()
            return
        self._rehearsal = rehearsal = Cancellable(self._show_progress)
        self._show_news("Rehearsing: the real code on fake tensors, in a process of its own …")
        threading.Thread(
            target=self._rehearse_now, args=(self.plan, rehearsal), daemon=True
        ).start()

    def _show_progress(self, done: int, of: int) -> None:
        self._show_news(f"Rehearsing: {done} of {of} actions. Press Rehearse again to cancel.")

    def _rehearse_now(self, plan: Plan, rehearsal: Cancellable) -> None:
        from workbench.runs.launch.subprocess_verbs import rehearse

        try:
            found = rehearse(plan, progress=rehearsal)
        except CancelledError:
            self._show_news("The rehearsal is cancelled.")
            return
        except (ValueError, RuntimeError, OSError) as error:
            self._show_news(f"The rehearsal failed: {error}")
            return
        finally:
            self._rehearsal = None
        with self._changing:
            if written_fields(plan) == written_fields(self.plan):
                self.rehearsed, self._news = found, "Rehearsed: drawn beside the estimate."
                self._draw()


def plan_file_html(yaml: str) -> str:
    """The plan file, to be unfolded."""
    style = (
        "font-size:12px;line-height:1.45;margin:4px "
        "0;padding:8px;background:var(--jp-layout-color2,#f4f4f4)"
    )
    return (
        f"<details><summary>Show the plan file</summary><pre "
        f'style="{style}">{escaped(yaml)}</pre></details>'
    )
