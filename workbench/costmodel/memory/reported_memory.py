"""Peak memory as tools report it: torch's allocated and reserved memory, and nvidia-smi's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from workbench import data_files
from workbench.costmodel.frameworks.framework_profile import is_fallback
from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.peak_memory import PeakMemory, num_communicators
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.rates.fitted_memory import MemoryFit, published_memory_fit

REPORTED_KINDS = ("allocated", "reserved", "nvidia-smi")
UNKNOWN_KIND = "unknown"
"""Kind of a reading that does not say which it is: between allocated and reserved."""
Z_95 = 1.6449
"""95 % quantile of the standard normal distribution."""


@dataclass(frozen=True)
class ReportedMemory:
    """What makes up the readings of a plan, bytes by pipeline rank."""

    allocated: Array
    """The live set and workspaces, which come from the allocator too."""
    held: Array
    """Freed blocks that wait for another stream (`torch.Tensor.record_stream`)."""
    outside: Array
    """The driver's context and the communicators' buffers, which no allocator sees."""
    capacity: float
    """Memory of the GPU."""
    allocated_in_first_step: Array
    """`allocated` of a run's first step, whose optimizer allocates its moments at its end."""

    def in_first_step(self) -> ReportedMemory:
        """What makes up readings that are taken after a run's first step."""
        return replace(self, allocated=self.allocated_in_first_step)

    def readings(self, slack: float, factor: float = 1.0, waiting: float = 1.0) -> dict[str, Array]:
        """Peak bytes by kind of `REPORTED_KINDS`.

        Reserved: allocated, held blocks, and the allocator's slack, all of which it releases
        where the GPU is full. nvidia-smi: reserved, and what no allocator sees.

        Args:
            slack: Share by which what the allocator reserves exceeds what it handed out.
            factor: Multiple of what is predicted to be allocated, for the bounds of a reading.
            waiting: Share of the held blocks that wait at the peak; all of them are the most.
        """
        allocated = factor * self.allocated
        available = np.maximum(allocated, self.capacity - self.outside)
        reserved = np.minimum(allocated * (1 + slack) + waiting * self.held, available)
        return {"allocated": allocated, "reserved": reserved, "nvidia-smi": reserved + self.outside}


def reported_memory(w: Workload, m: PeakMemory, constants: Constants) -> ReportedMemory:
    """What tools would report of a plan, by part."""
    workspaces = constants.workspace_mib * 2**20
    outside = driver_mib() + constants.communicator_mib * num_communicators(w)
    passes = w.microbatches_in_flight + 1  # forwards before a backward, and that backward
    recorded = w.fixed.framework.model_parallel.recorded_sequences
    held = recorded * passes * w.layers * w.hidden_activation_bytes
    return ReportedMemory(
        allocated=m.live + workspaces,
        held=w.zeros + held * (w.sequence_parallel > 1),
        outside=w.zeros + outside * 2**20,
        capacity=w.fixed.gpu.memory_gib * 2**30,
        allocated_in_first_step=m.live_in_first_step + workspaces,
    )


def bounds_of_kind(kind: str) -> tuple[str, str]:
    """(lowest, highest) kind that a reading of `kind` can be."""
    if kind in REPORTED_KINDS:
        return kind, kind
    return "allocated", "reserved"


def reported_memory_interval(
    stack: str, fit: MemoryFit | None = None
) -> tuple[float, float, float]:
    """(5 %, 50 %, 95 %) quantiles of a reading over its prediction; wider for an unknown framework.

    `fit` replaces the published one of `data/fitted_memory.json`.
    """
    fit = published_memory_fit() if fit is None else fit
    return fit.unnamed if is_fallback(stack) else fit.named


def peak_memory_sigma(stack: str) -> float:
    """Standard deviation of the logarithm of required memory over its prediction: the one whose
    95 % quantile is that of the readings.
    """
    return math.log(reported_memory_interval(stack)[2]) / Z_95


def probability_of_running_out(peak: float, capacity: float, stack: str) -> float:
    """Probability that a GPU of `capacity` bytes runs out of memory under a predicted `peak`, by a
    log-normal error of the framework profile `stack`.
    """
    if peak <= 0:
        return 0.0
    over = math.log(capacity / peak) / peak_memory_sigma(stack)
    return 0.5 * math.erfc(over / math.sqrt(2))


def largest_peak_at_risk(risk: float, capacity: float, stack: str) -> float:
    """Largest predicted peak, bytes, whose probability of running out of memory is `risk`."""
    return capacity * math.exp(-NormalDist().inv_cdf(1 - risk) * peak_memory_sigma(stack))


def memory_requirement(peak: float, capacity: float, stack: str) -> dict[str, float]:
    """Required memory of the rank with the largest peak, and the probability of running out.

    Args:
        peak: Predicted peak, bytes.
        capacity: Memory of the GPU, bytes.
        stack: Framework profile.

    Returns:
        `p50` and `p95` in bytes, and `probability_of_running_out` under a log-normal error.
    """
    deviation = peak_memory_sigma(stack)
    return {
        "p50": peak,
        "p95": peak * math.exp(Z_95 * deviation),
        "probability_of_running_out": probability_of_running_out(peak, capacity, stack),
    }


@lru_cache(maxsize=1)
def driver_mib() -> float:
    """MiB of a GPU whose process has allocated nothing, of `data/planner.yaml`."""
    table: Mapping[str, Mapping[str, float]] = data_files.read_data_file("data/planner.yaml")[
        "readings"
    ]
    return float(table["driver_mib"]["value"])
