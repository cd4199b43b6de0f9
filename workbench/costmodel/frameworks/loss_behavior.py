"""Memory and traffic of a framework's cross-entropy loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossBehavior:
    """Decides what the loss keeps and moves of its logits."""

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
