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
    passes: float = 7.0
    """Passes of the loss over its fp32 logits, forward and backward."""

    def peak_logit_bytes(self, kernels: str) -> float | None:
        """Bytes per logit at the loss's peak under the plan's `kernels`; None: as counted of
        torch's eager operators.
        """
        if kernels == "compiled" and self.compiled_logit_bytes is not None:
            return self.compiled_logit_bytes
        return self.logit_bytes
