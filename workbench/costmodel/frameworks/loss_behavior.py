"""Memory and traffic of a framework's cross-entropy loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.plan.schema import Loss


@dataclass(frozen=True)
class LossBehavior:
    """Decides what the loss keeps and moves of its logits."""

    kind: Loss = "whole"
    """Logits of all tokens, of a chunk of them at a time, or head and loss in one operator that
    leaves gradients in their place. A plan's own `strategy.loss` replaces it.
    """
    logit_bytes: float | None = None
    """Bytes per logit at the loss's peak; None: as counted of torch's eager operators."""
    compiled_logit_bytes: float | None = None
    """The same where a compiler fuses the loss; None: as without."""
    split_logit_bytes: float | None = None
    """Bytes per logit of a tensor rank's share of the vocabulary; None: as of a whole one."""
    compiled_split_logit_bytes: float | None = None
    """The same where a compiler fuses the loss; None: as of a whole vocabulary there."""
    passes: float = 7.0
    """Passes of the loss over its fp32 logits, forward and backward."""

    def peak_logit_bytes(self, kernels: str, split: bool) -> float | None:
        """Bytes per logit at the loss's peak; None: as counted of torch's eager operators.

        Args:
            kernels: The plan's kernels.
            split: Whether tensor ranks split the vocabulary.
        """
        whole, share = self.logit_bytes, self.split_logit_bytes
        if kernels == "compiled" and self.compiled_logit_bytes is not None:
            whole, share = self.compiled_logit_bytes, self.compiled_split_logit_bytes
        return share if split and share is not None else whole


LOSSES: Mapping[Loss, LossBehavior] = {
    "whole": LossBehavior(passes=7),  # torch's cross_entropy of fp32 logits, eager
    # Of eight chunks: fp32 logits, their softmax and gradient (torchtune's LinearCrossEntropyLoss).
    "chunked": LossBehavior(kind="chunked", logit_bytes=12 / 8, passes=5),
    # 16-bit logits of a chunk are read twice and overwritten by their gradient: 6 bytes each
    # (Liger-Kernel's ops/fused_linear_cross_entropy.py, 2410.10989).
    "fused_linear": LossBehavior(kind="fused_linear", passes=1.5),
}
"""Losses that a plan may ask of a framework whose own is another."""
