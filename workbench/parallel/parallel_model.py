"""A rank's part of a model, and where it is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from workbench.adapters.four_bit_tensor import PARTS
from workbench.models import Transformer
from workbench.models.counter_dropout import SampleIndices
from workbench.parallel.activation_offload import ActivationOffload
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.expert.aux_loss import AuxLossCarrier
from workbench.parallel.four_bit.fill_four_bit import (
    ReadSlices,
    StoredMatrix,
    StoredWeight,
    fill_four_bit,
    stored_matrices,
)


@dataclass(frozen=True)
class StagePlacement:
    """Which stages of a pipeline a rank builds, and where."""

    stages: Sequence[int]
    """The rank's."""
    partition: list[int]
    """Number of layers of every stage of the pipeline."""
    overlap: bool
    """Whether gradients are reduced during backward: a gradient is complete as soon as the last
    backward has made it.
    """
    device: torch.device
    """Where parameters live."""
    dtype: torch.dtype
    """Of parameters."""
    gradient_dtype: torch.dtype
    """Of accumulated and reduced gradients."""


@dataclass
class ParallelModel:
    """A rank's part of the model: its pipeline stages, and their parameters and gradients."""

    stages: Mapping[int, nn.Module]
    store: ParamAndGradStore
    tied_across_stages: str | None
    """Local name of a weight that the first and the last stage share, if this rank has one of the
    two and another rank the other.
    """
    aux_loss: AuxLossCarrier
    """Aux losses of the stages without the head."""
    samples: SampleIndices
    """Which samples the stages see, for dropout."""
    boundary: tuple[int, ...] | None = None
    """Local shape of what passes between stages, where the plan's shape does not say it."""
    activation_offload: ActivationOffload | None = None
    """Host memory of recomputed layers' inputs."""

    stored: Mapping[str, StoredWeight] = field(default_factory=dict)
    """Local name of each weight in 4 bits -> what it is."""
    dtype: torch.dtype = torch.float32
    """Of parameters."""

    @property
    def stored_parts(self) -> set[str]:
        """Local names of the parameters that are their bytes."""
        return {f"{name}.{part}" for name in self.stored for part in PARTS}

    def fill_stored(self, read: ReadSlices) -> None:
        """Fill this rank's shards of weights in 4 bits, which `gather_frozen` gathers.

        Args:
            read: Reads or draws values of a weight, in the parameters' dtype: they are rounded as
                those of an unquantized base.
        """
        fill_four_bit(self.stored_matrices(), read, self.dtype)

    def stored_matrices(self) -> Iterator[StoredMatrix]:
        """What this rank's shards hold of weights in 4 bits."""
        store = self.store
        return stored_matrices(store.frozen_values, store.frozen_layouts, self.stored)

    @property
    def head(self) -> nn.Module | None:
        """The head, if this rank holds it."""
        ours = (stage for stage in self.stages.values() if isinstance(stage, Transformer))
        return next((stage.head for stage in ours if stage.head is not None), None)
