"""Peak memory as tools report it: torch's allocated and reserved memory, and nvidia-smi's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from workbench import data_files
from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.peak_memory import PeakMemory, num_communicators
from workbench.costmodel.rates.constants import Constants

REPORTED_KINDS = ("allocated", "reserved", "nvidia-smi")
UNKNOWN_FRAMEWORK = "textbook"
"""Framework profile that stands for one that is not known."""
Z_95 = 1.6449
"""95 % quantile of the standard normal distribution."""


def reported_memory(w: Workload, m: PeakMemory, constants: Constants) -> dict[str, Array]:
    """Peak bytes of each pipeline rank by kind of reading.

    Allocated: the live set and workspaces, which come from the allocator too. Reserved: allocated
    and the allocator's slack, which it releases where the GPU is full. nvidia-smi: reserved, the
    driver's context and the communicators' buffers, which no allocator sees.

    Returns:
        Kind of `REPORTED_KINDS` -> bytes by pipeline rank.
    """
    shares = reported_memory_constants()
    allocated = m.live + constants.workspace_mib * 2**20
    outside = (shares["driver_mib"] + constants.communicator_mib * num_communicators(w)) * 2**20
    available = np.maximum(allocated, w.fixed.gpu.memory_gib * 2**30 - outside)
    reserved = np.minimum(allocated * (1 + shares["reserved_share"]), available)
    return {"allocated": allocated, "reserved": reserved, "nvidia-smi": reserved + outside}


def reported_memory_interval(kind: str, stack: str) -> tuple[float, float, float]:
    """(5 %, 50 %, 95 %) quantiles of a reading of `kind` over its prediction; wider for an unknown
    framework.
    """
    constants = reported_memory_constants()
    low, middle, high = (constants[f"{kind}_{name}"] for name in ("low", "middle", "high"))
    width = constants["unnamed_factor"] if stack == UNKNOWN_FRAMEWORK else 1.0
    return middle * (low / middle) ** width, middle, middle * (high / middle) ** width


def peak_memory_sigma(stack: str) -> float:
    """Standard deviation of the logarithm of required memory over its prediction."""
    constants = reported_memory_constants()
    return constants["need_spread"] * (
        constants["unnamed_factor"] if stack == UNKNOWN_FRAMEWORK else 1.0
    )


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
def reported_memory_constants() -> Mapping[str, float]:
    """Constants of `data/planner.yaml`, section `readings`."""
    return {
        name: float(entry["value"])
        for name, entry in data_files.read_data_file("data/planner.yaml")["readings"].items()
    }
