"""Which tensors the layers of a framework save for backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedTensorBehavior:
    """Decides activation memory where frameworks save different tensors of the same layer.

    Softmax and masks of unfused attention follow from `kernels.fused_attention`.
    """

    gated_tensors: float = 4.0
    """Tensors of feed-forward width that a gated layer saves."""
    dropout_masks: bool = False
    """Whether dropout draws masks with every pass over scores and residuals, and saves them."""
    fp8_inputs: bool = False
    """Whether fp8 GEMMs save their inputs in 8 bits."""

    @property
    def score_bytes(self) -> int:
        """Bytes of an element of the scores that unfused attention saves: the softmax in 16 bits
        and, with dropout, its mask and what is left of it (5 a s^2 b of 2205.05198).
        """
        return 2 + 3 * self.dropout_masks
