"""Observers of a step: measuring without changing it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from workbench.schedules import Action


class Observer(Protocol):
    """Observes a step without changing it: wraps every action, and is called at each moment."""

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """A context around one action of the schedule, or around a named part of the step."""
        ...

    def moment(self, name: str) -> None:
        """Called when the step reaches a moment of `profile.MOMENTS`."""
        ...


class NullObserver:
    """An observer that does nothing."""

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """No wrapping."""
        return nullcontext()

    def moment(self, name: str) -> None:
        """Nothing."""
