"""Layer profiles and plans that DAPPLE's authors published (2007.01045), as data/dapple has them.

The topology and what a device keeps are those of the authors' planner (LER0ever/HPGO,
src/environment and examples/vs_pipedream.rs): 2 nodes of 8 V100 of 16 GB; NVLink 25 GB/s, a ring
for each two devices; Ethernet 1 GB/s point to point and 3 GB/s in collectives.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.data_files import assets
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.model.layer_profile_csv import read_layer_profile
from workbench.planner.unequal_stages.placements import APPEND, placed
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology

_FOLDER = assets() / "data/dapple"
TOPOLOGY = Topology(2, 8, 25e9, 1e9, 3e9, most_rings=4, memory=16e9)


@dataclass(frozen=True)
class Published:
    """What the authors' comparison (examples/vs_pipedream.rs) says of a model."""

    global_batch: int
    microbatch: int
    optimizer_factor: float
    peak_per_sequence: float
    """Bytes of activations of one sequence, all layers."""
    offset: int
    """Layers of the profile before the one that their plans count as 0."""


MODELS = {
    "VGG-19": Published(1024, 32, 2, 70e6, 1),
    "BERT-Large": Published(128, 1, 3, 1736689664, 3),
    "XLNet-36": Published(128, 1, 3, 1.5 * 3942774528, 2),
    "AmoebaNet-36": Published(128, 1, 2, 1.5 * 250845152, 0),
}
"""Offsets by layers' names: their graphs leave out inputs, BERT's has the embeddings as layer 0,
XLNet's has 4 before the first layer.
"""


def published_profile(model: str) -> LayerProfile:
    """The layer profile of `model`. Its inputs take no time and no memory, as PipeDream's planner
    has it (optimizer_graph_hierarchical.py): they are on the first stage anyway.
    """
    profile = read_layer_profile(_FOLDER / "layer_profiles.csv", model)
    layers = tuple(
        replace(layer, forward_s=0.0, backward_s=0.0, activation_bytes=0.0)
        if layer.name.startswith("Input")
        else layer
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def published_batch(model: str, microbatches: int, whole_sequences: bool) -> Batch:
    """The global batch of `model` in `microbatches`."""
    known, profile = MODELS[model], published_profile(model)
    factor = known.peak_per_sequence * profile.profile_batch / profile.activations[-1]
    sequences = known.global_batch // microbatches
    return Batch(microbatches, sequences, whole_sequences, known.optimizer_factor, factor)


def published_stages(model: str, planner: str) -> tuple[Stage, ...]:
    """The plan of `planner` (DAPPLE or PipeDream) for `model`, by the names of the layers at its
    cuts.
    """
    with open(_FOLDER / "plans.csv", newline="", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["model"], row["planner"], row["verify"]) == (model, planner, "read")
        ]
    ends, replicas = _cuts(rows)
    last = len(published_profile(model).layers)
    ends = [end + MODELS[model].offset for end in ends[:-1]] + [last]
    return placed(ends, replicas, [APPEND] * len(ends), TOPOLOGY)


def _cuts(rows: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    if rows[0]["stage"]:
        return [int(row["end_index"]) for row in rows], [int(row["replicas"]) for row in rows]
    ends = [int(word) for word in rows[0]["notes"].split() if word.isdigit()]
    written = rows[0]["replicas"]
    many = written.endswith("stages of 1")
    return ends, [1] * len(ends) if many else [int(word) for word in written.split()]
