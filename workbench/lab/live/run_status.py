"""The banner of a live view: where the run is, how long it will take, and if it failed, why."""

from __future__ import annotations

import statistics
import time
from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.profile import WARM_UP_STEPS, after_warm_up, step_time_words
from workbench.units import count_text, loss_text, percent_text, seconds_text

if TYPE_CHECKING:
    from workbench.runs.store.run_state import State

STOP = {
    "label": "Stop",
    "action": "stop",
    "hint": "Finish the step that is running, then end the run",
}
PHASE_WORDS = {
    "joining": "Joining process groups",
    "building": "Building the model",
    "compiling": "Compiling kernels, once for this machine",
    "training": "Training",
    "evaluating": "Evaluating on validation text",
    "checkpointing": "Saving a checkpoint",
    "done": "Finishing",
}
PHASE_TONES = {"finished": "good", "failed": "bad", "stopped": "calm", "stopping": "busy"}
RECENT_STEPS = 20
"""Steps whose median step time predicts the rest."""


@dataclass
class StepTimes:
    """Numbers of steps, one at a time, and the median that `Profile.step_seconds` is of them."""

    first: list[float] = field(default_factory=list)
    """Those of the first steps."""
    rest: list[float] = field(default_factory=list)
    """Those of the others, the smallest first."""

    def add(self, value: float) -> None:
        """The next step's."""
        if len(self.first) < WARM_UP_STEPS:
            self.first.append(value)
        else:
            insort(self.rest, value)

    @property
    def counted(self) -> list[float]:
        """Those that count."""
        return after_warm_up(self.first + self.rest)

    @property
    def median(self) -> float | None:
        """Their median; None before the first step."""
        return statistics.median(self.counted) if self.first else None


@dataclass
class RunProgress:
    """What the banner shows of a run, updated from its telemetry records."""

    steps: int
    world_size: int
    ranks_up: set[int] = field(default_factory=set)
    phase: str = "building"
    detail: str | None = None
    """Detail of the phase, such as the kernel that is compiled."""
    steps_done: int = 0
    skipped: int = 0
    """Steps that loss scaling skipped."""
    loss: float | None = None
    """Loss of the last step; None where it was not finite."""
    times: StepTimes = field(default_factory=StepTimes)
    tokens: StepTimes = field(default_factory=StepTimes)
    seconds: list[float] = field(default_factory=list)
    """Step times of the recent steps, on rank 0 as all of the steps here."""
    data_seconds: list[float] = field(default_factory=list)
    """How long the recent steps waited for their batch."""
    left_out: list[str] = field(default_factory=list)
    """Telemetry that could not be read, in words."""

    def add_records(self, records: list[dict[str, Any]]) -> None:
        """Take in telemetry records, each with its rank."""
        for record in records:
            if record["kind"] != "phase" or record["phase"] != "joining":
                self.ranks_up.add(record["rank"])
            if record["kind"] == "phase":
                self.phase, self.detail = record["phase"], record.get("detail")
            if record["kind"] == "step":
                self.steps_done = max(self.steps_done, record["step"] + 1)
                if record["rank"] == 0:
                    self._step(record)

    def _step(self, record: dict[str, Any]) -> None:
        self.times.add(record["seconds"])
        self.tokens.add(record["tokens"])
        self.seconds = [*self.seconds[1 - RECENT_STEPS :], record["seconds"]]
        waited = record.get("data_seconds") or 0.0
        self.data_seconds = [*self.data_seconds[1 - RECENT_STEPS :], waited]
        self.loss = record["loss"]
        self.skipped += bool(record.get("skipped"))

    @property
    def step_time_words(self) -> str:
        """The step time, as every view of a run has it."""
        return step_time_words(self.times.median, len(self.times.counted))

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of the whole job, as `Profile.tokens_per_second`."""
        seconds, tokens = self.times.median, self.tokens.median
        return tokens / seconds if tokens and seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the remaining steps take at the recent step time."""
        return (
            statistics.median(self.seconds) * (self.steps - self.steps_done)
            if self.seconds
            else None
        )


def run_banner(
    name: str,
    state: State,
    progress: RunProgress,
    stopping: bool = False,
    folder: str = "",
    behind: bool = False,
) -> dict[str, Any]:
    """The banner of a run, as `Board.show_banner` takes it.

    Args:
        name: The run's id.
        state: Its state on disk.
        progress: What its telemetry says.
        stopping: Whether Stop was pressed and has no effect yet.
        folder: The run directory, for the line that says how to attach again.
        behind: Whether more of its telemetry is written than was read.
    """
    reading = behind and state.phase != "failed"
    shown: dict[str, Any] = {
        "tone": "busy" if reading else PHASE_TONES.get(state.phase, "busy"),
        "headline": reading_headline(progress)
        if reading
        else run_headline(state, progress, stopping),
        "lines": [line for line in (state.warning, pace_line(state, progress), name) if line]
        + [*state.notes, *(f"left out: {words}" for words in progress.left_out)],
        "fraction": progress.steps_done / progress.steps if progress.steps else None,
        "buttons": []
        if state.final
        else [{**STOP, "disabled": stopping or state.phase == "stopping"}],
        "code": "",
        "reconnect": f"The run goes on without it. To follow it again: "
        f"wb.watch(wb.attach({folder or name!r}))",
    }
    if state.phase == "failed" and state.cause:
        shown["lines"] = [line for line in (state.cause.advice, *shown["lines"]) if line]
        shown["code"] = state.cause.log_tail
    return shown


def reading_headline(progress: RunProgress) -> str:
    """One line that says how far a long history has been read."""
    return f"Reading {progress.steps_done:,} of {progress.steps:,} steps"


def run_headline(state: State, progress: RunProgress, stopping: bool) -> str:
    """One line that says where the run is."""
    position = f"step {progress.steps_done} of {progress.steps}"
    if state.phase == "finished":
        return f"Finished: {progress.steps_done} steps"
    if state.phase == "stopped":
        return f"Stopped after {position}"
    if state.phase == "failed":
        return f"Failed: {state.cause.message if state.cause else 'no cause is known'}"
    if stopping or state.phase == "stopping":
        return f"Stopping after the step that is running · {position}"
    if len(progress.ranks_up) < progress.world_size:
        return f"Starting: {len(progress.ranks_up)} of {progress.world_size} ranks are up"
    doing = PHASE_WORDS.get(progress.phase, progress.phase)
    return (
        f"{doing}: {progress.detail} · {position}" if progress.detail else f"{doing} · {position}"
    )


def pace_line(state: State, progress: RunProgress) -> str:
    """Loss, throughput, step time, time elapsed and time left."""
    words = []
    if progress.seconds:
        words.append(f"loss {loss_text(progress.loss)}")
    if progress.skipped:
        words.append(f"{progress.skipped} steps skipped (gradients not finite in fp16)")
    if progress.tokens_per_second:
        words.append(f"{count_text(progress.tokens_per_second)} tokens/s")
    if progress.seconds:
        words.append(f"step time {progress.step_time_words}")
    if sum(progress.data_seconds) and sum(progress.seconds):
        share = sum(progress.data_seconds) / sum(progress.seconds)
        words.append(f"data loading {percent_text(share)}")
    if state.started:
        words.append(
            f"{seconds_text(int(max(0.0, (state.ended or time.time()) - state.started)))} elapsed"
        )
    if not state.final and progress.seconds_left:
        words.append(f"about {seconds_text(round(progress.seconds_left))} left")
    return " · ".join(words)
