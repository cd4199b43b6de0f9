"""What recomputation (activation checkpointing) of a framework saves, repeats and offloads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecomputeBehavior:
    """Decides what full and selective recompute save of a layer and run again."""

    whole_layers: bool = False
    """Whether full recompute runs a layer to its end, its last all-reduce included; else it stops
    at the last tensor that backward reads.
    """
    saved_share: float | None = None
    """Share of a layer's activations that selective recompute saves; None: all but attention's."""
    alternate_ops: bool = False
    """Whether selective recompute saves attention and every second GEMM's result, in place of a
    share.
    """
    repeated_share: float | None = None
    """Share of a layer's forward that selective recompute repeats; None: attention alone."""
    offload_inputs: bool = False
    """Whether inputs of recomputed layers are offloaded to host memory."""
    keeps_expert_choices: bool = False
    """Whether an MoE layer saves the experts that its tokens chose, so that recomputation neither
    chooses nor exchanges counts of tokens again.
    """

    @property
    def repeated_all_reduces(self) -> int:
        """Tensor-parallel all-reduces of a layer's forward that full recompute repeats."""
        return 1 + self.whole_layers
