"""What the supervisor knows of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.runs.diagnose.failure_advice import HUNG
from workbench.safe_io.json_field_checks import whole
from workbench.units import seconds_text
from workbench.vocabulary import SHOWN_NAMES

HUNG_FACTOR = 3.0
"""A rank that is silent for so many times its slowest step is not a slow one."""


@dataclass
class RankStatus:
    """What is known of one rank from its records and its process."""

    rank: int
    pid: int | None = None
    step: int = -1
    action: str | None = None
    phase: str = "starting"
    joined: int = 0
    """Process groups that it began to join."""
    bye: bool = False
    gone: float | None = None
    """When its process was found gone, epoch seconds."""
    on_gpu: bool = False
    stopped: bool = False
    exit_code: int | None = None
    """How its process ended, -n for signal n, where the launcher was too late to ask before us."""
    slowest: float = 0.0
    """Seconds of its slowest step."""
    overflowing: int | None = None
    """The first of its last steps that loss scaling skipped because the loss was not finite."""
    unsaved: str = ""
    """Why its last checkpoint could not be written; empty where it could."""
    deadline: float = 0.0
    """Seconds for which it may be silent."""
    place: str = ""
    """Its node, in words, where there are several."""

    def take(self, record: Mapping[str, Any]) -> None:
        """Learn from one telemetry record."""
        kind = record["kind"]
        if kind == "hello":
            self.pid, self.phase = record["pid"], "started"
            self.on_gpu = str(record.get("device")).startswith("cuda")
            if whole(node := record.get("node")):
                self.place = f" of node {node} ({record['host']})"
        elif kind == "phase":
            self.phase = record["phase"]
            if self.phase == "joining":
                self.phase, self.joined = f"joining {record['detail']}", self.joined + 1
        elif kind == "step":
            self.step, self.action = record["step"], record["action"]
            lost = bool(record.get("skipped")) and record.get("loss") is None
            first = self.step if self.overflowing is None else self.overflowing
            self.overflowing = first if lost else None
            seconds = record.get("seconds")
            self.slowest = (
                max(self.slowest, seconds) if isinstance(seconds, int | float) else self.slowest
            )
        elif kind in ("checkpoint", "unsaved"):
            self.unsaved = record["message"] if kind == "unsaved" else ""
        self.bye = self.bye or kind == "bye"

    @property
    def name(self) -> str:
        """The rank, and its node where there are several, in words."""
        return f"rank {self.rank}{self.place}"

    @property
    def lost_loss(self) -> str:
        """Step since which no loss was finite, in words; empty where the last loss was."""
        if self.overflowing is None:
            return ""
        return (
            f"since step {self.overflowing} the loss is not finite: fp16 overflowed, and these "
            "steps changed nothing; a lower learning_rate or strategy.precision bf16 may avoid it"
        )

    @property
    def doing(self) -> str:
        """What its deadline is for, in words."""
        first = self.phase == "training" and self.step < 0
        return "the first step" if first else self.phase

    @property
    def where(self) -> str:
        """How far it came, in words."""
        if self.step < 0:
            return f"{self.phase}, no step done"
        words = SHOWN_NAMES.get(self.action or "", f"last action {self.action}")
        action = f", {words}" if self.action else ""
        hung = f"; {HUNG} {seconds_text(self.slowest)}" if self._is_hung else ""
        return f"{self.phase}, last step done: {self.step}{action}{hung}"

    @property
    def _is_hung(self) -> bool:
        """True where a step as long as it may be silent is far from any that it did."""
        return self.phase == "training" and 0 < HUNG_FACTOR * self.slowest <= self.deadline
