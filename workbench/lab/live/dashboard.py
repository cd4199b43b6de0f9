"""The dashboard: a run as it goes, from what its ranks write to disk, until it ends."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.lab.live import run_status
from workbench.lab.live.board import Board
from workbench.lab.live.output_cell import OutputCell, widget_bundle
from workbench.lab.live.run_charts import RunCharts
from workbench.lab.pictures import saved_notebook, snapshot
from workbench.runs.store.telemetry_reader import Reader

if TYPE_CHECKING:
    from workbench.plan.resolved_plan import ResolvedPlan
    from workbench.profile import Profile
    from workbench.runs.run import Run

POLL_SECONDS = 0.1


def watch(run: Run, beside: Sequence[Profile] | None = None) -> Dashboard:
    """Follow a run to its end; returns at once.

    Args:
        run: A run, in whatever phase.
        beside: Profiles drawn beside the measured one; default: the estimate of the run's plan.

    Returns:
        A dashboard that shows itself in a notebook, and stays as a picture when the run has ended.
    """
    return Dashboard(run, plan_estimates(run.plan) if beside is None else list(beside)).start()


def plan_estimates(plan: ResolvedPlan) -> list[Profile]:
    """The estimate of a plan, or nothing where the planner cannot make one."""
    from workbench.planner import estimate

    try:
        return [estimate(plan)]
    except ValueError:
        return []


class Dashboard:
    """One run's live view. It reads the run directory alone, so any number may follow one run,
    whoever started it.
    """

    def __init__(self, run: Run, beside: Sequence[Profile] = ()) -> None:
        self.run = run
        self.board = Board(self._press)
        self.measured = run.measured()
        self.view = RunCharts(self.board, self.measured.profile(), beside, run.plan.gpu.device)
        self.progress = run_status.RunProgress(run.plan.training.steps, run.plan.world_size)
        self._reader = Reader(run.dir)
        self._output = OutputCell()
        self._stopping = False
        self._behind = False
        """True while more of the telemetry is written than was read."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"watch {run.id}", daemon=True)

    def start(self) -> Dashboard:
        """Begin to follow, in a thread of its own."""
        state = self.run.state
        self._behind = state.final
        self._show_state(state)
        self._thread.start()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended and its snapshot is in place; whether that was within
        `timeout` seconds.
        """
        return self._over.wait(timeout)

    def snapshot(self) -> dict[str, Any]:
        """Mime bundle of the run as far as it is known: what a saved notebook shows."""
        banner = run_status.run_banner(self.run.id, self.run.state, self.progress)
        figures = self.view.figures(self.measured.profile())
        return snapshot.snapshot_bundle(
            figures, banner["headline"], banner["lines"], failed=banner["tone"] == "bad"
        )

    def picture(self) -> str:
        """The same as HTML with one image."""
        banner = run_status.run_banner(self.run.id, self.run.state, self.progress)
        return saved_notebook.picture_html(
            self.view.figures(self.measured.profile()), banner["headline"], banner["lines"]
        )

    def _ipython_display_(self) -> None:
        self._output.show(widget_bundle(self.board, f"Dashboard of {self.run.id}"))

    def _follow(self) -> None:
        try:
            while not self._poll():
                self._over.wait(POLL_SECONDS)
            self._output.replace(self.snapshot())
        except Exception:  # nobody above this thread would show it
            self.board.show_banner(
                tone="bad",
                headline="This view failed; the run continues without it",
                code=traceback.format_exc(),
            )
        finally:
            self._over.set()

    def _poll(self) -> bool:
        """Read new records; whether the run is over."""
        state = self.run.state  # first, so that a final state comes after its last records
        records = self._reader.poll()
        self._behind = self._reader.behind
        self.progress.left_out = self._reader.left_out
        if records:
            self.progress.add_records(records)
            self.view.add_rows(self.measured.add(records), self._evaluations(records))
        self._show_state(state)
        return state.final and not records  # of a long history one poll takes a part

    def _evaluations(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            record for record in records if record["kind"] == "evaluation" and record["rank"] == 0
        ]

    def _show_state(self, state: Any) -> None:
        self.board.show_banner(
            **run_status.run_banner(
                self.run.id, state, self.progress, self._stopping, str(self.run.dir), self._behind
            )
        )

    def _press(self, action: str) -> None:
        assert action == "stop", action
        self._stopping = True
        self.run.stop()
