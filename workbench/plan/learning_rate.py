"""Learning-rate schedule of a run, without torch."""

from __future__ import annotations

import math

from workbench.plan import schema


def learning_rate(step: int, optimizer: schema.Optimizer, total_steps: int) -> float:
    """Learning rate of a step: linear warm-up to the peak, then constant, linear or cosine decay.

    The last step of the run has exactly `final_ratio` of the peak, unless the decay is constant.

    Args:
        step: The step, from 0.
        optimizer: The plan's optimizer.
        total_steps: Steps of the run.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.decay == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    left = 1 - progress if optimizer.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (optimizer.final_ratio + (1 - optimizer.final_ratio) * left)
