"""Steps that have been enqueued, until their scalars are on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.measure.memory_window import StepCounters
from workbench.engine.measure.step_timeline import StepTimeline


class HostCopy:
    """A small tensor on its way to the host; the host waits only where it asks for the values.

    Args:
        x: On CUDA copied behind what the stream has to do; on CPU it is there.
    """

    def __init__(self, x: Tensor) -> None:
        self._values, self._event = x, None
        if x.device.type == "cuda":
            self._values = page_locked_like(x)
            self._values.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tolist(self) -> list[float]:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._values.tolist()]


def page_locked_like(x: Tensor) -> Tensor:
    """An empty host tensor that a GPU can be copied to without the host waiting."""
    return torch.empty_like(x, device="cpu", pin_memory=True)


@dataclass
class StepUnderWay:
    """What the host knows of a step when it has enqueued it."""

    index: int
    began: float
    """time.perf_counter() when the host began with it."""
    cpu_began: float
    """time.process_time() then."""
    data_seconds: float
    """How long the step waited for its batch."""
    own_seconds: dict[str, float]
    """The host's own time by phase."""
    tokens: list[int]
    """Tokens of the global batch that have a target, of each source."""
    scalars: HostCopy
    bytes: int | None
    counters: StepCounters
    action: str
    timeline: StepTimeline | None = None
