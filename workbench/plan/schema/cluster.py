"""Which GPUs a job runs on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workbench.fields.bounds import RANKS, Ranks
from workbench.fields.frozen import Frozen
from workbench.machine.hardware import GPU, Fabric


class Cluster(Frozen):
    """Which GPUs, how many, and how they are wired."""

    gpu: str | GPU = Field(
        description="GPU name from `workbench gpus`; `local` is what is attached."
    )
    gpus: Annotated[int, Field(ge=1), RANKS] = Field(
        description="Ranks in the whole job; at most 1,048,576."
    )
    nodes: Ranks | None = Field(
        None, description="Nodes; default gpus / gpus_per_node, rounded up."
    )
    gpus_per_node: Ranks | None = Field(
        None, description="GPUs in a node; default from the fabric."
    )
    fabric: str | Fabric | None = Field(
        None, description="Fabric name; default: the GPU's usual one."
    )
    calibration: str | None = Field(
        None, description="Calibration file that `workbench calibrate` wrote."
    )
    calibration_sha256: str | None = Field(
        None, description="Hash of that file; filled when a plan is resolved."
    )
