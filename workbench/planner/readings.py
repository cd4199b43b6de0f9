"""What would be read off a card: torch's allocated and reserved memory, and nvidia-smi's, of each pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from workbench.plan import catalog
from workbench.planner.constants import Constants
from workbench.planner.memory import Memory
from workbench.planner.setting import Array
from workbench.planner.workload import Workload

KINDS = ("allocated", "reserved", "nvidia-smi")


def readings(w: Workload, m: Memory, constants: Constants) -> dict[str, Array]:
    """Peak bytes of each pipeline rank by kind of reading.

    Allocated: what lives, and workspaces, for they come from the allocator too. Reserved: that and the allocator's
    slack. nvidia-smi: that, the driver's context and the communicators' buffers, which no allocator sees.
    """
    said = shares()
    allocated = m.live + constants.workspace_mib * 2**20
    reserved = allocated * (1 + said["reserved_share"])
    outside = said["driver_mib"] + said["communicator_mib"] * communicators(w)
    return {"allocated": allocated, "reserved": reserved, "nvidia-smi": reserved + outside * 2**20}


def communicators(w: Workload) -> int:
    """Groups in which a rank communicates: one for each axis longer than one, and one of all ranks."""
    k = w.knobs
    sizes = (float(k.tensor), float(k.context), float(w.data), float(w.pipeline))
    return sum(size > 1 for size in sizes) + (w.setting.world > 1)


@lru_cache(maxsize=1)
def shares() -> Mapping[str, float]:
    """Constants of `data/planner.yaml` about readings."""
    return {name: float(said["value"]) for name, said in catalog.read("data/planner.yaml")["readings"].items()}
