"""What is said of the stages of a plan of the unequal space."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StageFigures:
    """What DAPPLE's planner says of the stages of a plan (2007.01045), estimated."""

    microbatches: int
    latency_seconds: float
    """Of a step by its latency model: compute, transfers and all-reduces of the stages alone."""
    activation_communication_ratio: float
    """Mean transfer over mean compute of a microbatch (ACR): where it is small, few microbatches in
    flight (policy PA, 1f1b) are as fast as more (PB, eager-1f1b).
    """
    speed_up: float
    """Compute of the whole step on one GPU, without recomputation, over the step's seconds."""

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)
