"""The least number of GPUs on which a whole step fits, by the estimate of each strategy."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan, written_fields
from workbench.planner.memory_advice import PlannedMemory, planned_memory
from workbench.units import gib_text

STRATEGIES = ("ddp", "zero-3", "zero-offload", "zero-infinity")
"""Presets whose least number of GPUs is found, each recomputing all: they shard or offload states
and need no further choice.
"""
MOST_GPUS = 65_536
"""GPUs beyond which none are tried: more than any published run had."""
KEPT_FIELDS = ("precision", "gradient_dtype", "attention", "kernels", "loss", "stack")
"""Fields of `strategy` that say how numbers are kept, which no strategy changes."""


@dataclass(frozen=True)
class WholeStep:
    """What one strategy needs on one GPU type. Figures are estimated."""

    strategy: str
    gpu: str
    precision: str
    """Of parameters and gradients."""
    gpus: int | None
    """Least number of GPUs; None where no number does."""
    memory: PlannedMemory
    """On that many GPUs, or on the most that were tried."""

    @property
    def reason(self) -> str:
        """Why no number of GPUs does; "" where one does."""
        m = self.memory
        if self.gpus is not None:
            return ""
        if m.peak_bytes > m.capacity_bytes:
            return f"does not fit at any GPU count ({gib_text(m.peak_bytes)})"
        return f"does not fit the host at any GPU count ({gib_text(m.host_bytes)} a rank)"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        m = self.memory
        return {
            "strategy": self.strategy,
            "gpu": self.gpu,
            "precision": self.precision,
            "gpus": self.gpus,
            "peak_bytes": m.peak_bytes,
            "capacity_bytes": m.capacity_bytes,
            "host_bytes": m.host_bytes,
            "host_capacity_bytes": m.host_capacity_bytes,
            "reason": self.reason,
        }


def whole_step(plan: Plan, gpu: str, preset: str) -> WholeStep:
    """The least number of GPUs on which a step of a plan's model fits.

    From two GPUs on, more of them never need more memory each, so that the number is found by
    halving.

    Args:
        plan: Its model, sequence length, micro-batch and dtypes count.
        gpu: GPU of the catalog.
        preset: Of `STRATEGIES`.

    Raises:
        PlanError: The plan is illegal with that preset.
    """

    def memory(gpus: int) -> PlannedMemory:
        return planned_memory(on_gpus(plan, gpu, gpus, preset).resolve())

    alone = on_gpus(plan, gpu, 1, preset).resolve()
    counts, precision = [1, *_from_two_on(gpu)], alone.strategy.precision
    if not planned_memory(alone).fits:
        most = memory(counts[-1])
        if not most.fits:
            return WholeStep(preset, gpu, precision, None, most)
        del counts[: 1 + bisect_left(counts[1:], True, key=lambda gpus: memory(gpus).fits)]
    return WholeStep(preset, gpu, precision, counts[0], memory(counts[0]))


def _from_two_on(gpu: str) -> list[int]:
    """Numbers of GPUs from two on: part of a node, then whole nodes."""
    node = gpu_catalog.clusters()[gpu_catalog.gpus()[gpu].fabric].gpus_per_node
    return [*range(2, node), *range(max(2, node), MOST_GPUS + 1, node)]


def on_gpus(plan: Plan, gpu: str, gpus: int, preset: str) -> Plan:
    """The plan on that many GPUs under a preset that recomputes all, a micro-batch a rank."""
    written = written_fields(plan)
    kept = {k: v for k, v in written.get("strategy", {}).items() if k in KEPT_FIELDS}
    micro_batch = plan.training.micro_batch
    return plan.replace(
        name="",
        cluster={"gpu": gpu, "gpus": gpus},
        strategy={"preset": preset, "recompute": "full", **kept},
        **{"training.global_batch": gpus * micro_batch, "training.micro_batch": micro_batch},
    )
