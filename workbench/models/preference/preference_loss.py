"""The loss of direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

METRICS = ("chosen_reward", "rejected_reward", "accuracy")
"""Of each pair, what `PreferenceLoss.sums` adds up: the rewards of both answers, beta times the log
of the policy's probability over the reference's; and whether the chosen one's is larger.
"""


def _unsharded(log_probs_B: Tensor) -> Tensor:
    return log_probs_B


class PreferenceLoss:
    """DPO's loss of a rank's microbatches, of which sequences 2i and 2i + 1 are a pair: the chosen
    and the rejected answer to one prompt.

    loss = -log sigmoid(beta ((log p_chosen - log r_chosen) - (log p_rejected - log r_rejected))),
    p and r being the probabilities of an answer's tokens, the targets that are not ignored, under
    the policy and under the reference.

    Args:
        beta: How far the policy may move from the reference: the smaller, the farther.
        microbatches: Of this rank.
        sequences: Of a microbatch.
        dtype: Of log-probabilities.
        device: Their device.
        sum_over_ranks: Sums log-probabilities [B] over the ranks that have parts of the sequences,
            each of which then computes the same loss.
        ranks: How many those are.

    Attributes:
        reference_MB: Log-probabilities of the answers under the reference, [M, B].
        sums: Sum over pairs of each of `METRICS`; a rank's part of those of its sequences.
        factor: Of the loss.

    Raises:
        ValueError: Sequences are odd in number.
    """

    def __init__(
        self,
        beta: float,
        microbatches: int,
        sequences: int,
        dtype: torch.dtype,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor] = _unsharded,
        ranks: int = 1,
    ) -> None:
        if sequences % 2:
            raise ValueError(f"a microbatch has {sequences} sequences; legal: pairs of them")
        self.beta, self.sum_over_ranks, self.ranks = beta, sum_over_ranks, ranks
        self.reference_MB = torch.zeros(microbatches, sequences, dtype=dtype, device=device)
        self.sums = torch.zeros(len(METRICS), dtype=dtype, device=device)
        self.factor = 1.0
        self._of_reference = False

    @contextmanager
    def reference_pass(self) -> Iterator[None]:
        """Within it a forward pass is the reference's: it fills `reference_MB`."""
        self._of_reference = True
        try:
            yield
        finally:
            self._of_reference = False

    def start(self, factor: float = 1.0) -> None:
        """Start a forward pass of the policy, whose losses are multiplied by `factor`."""
        self.factor = factor
        self.sums.zero_()

    def __call__(self, token_losses_BT: Tensor, microbatch: int) -> Tensor:
        """Summed loss of a microbatch's pairs, a scalar: this rank's part of it.

        Args:
            token_losses_BT: Negative log-likelihood of each of this rank's tokens, 0 where the
                target is ignored.
            microbatch: Which of the rank's it is.
        """
        log_probs_B = self.sum_over_ranks(-token_losses_BT.sum(1))
        if self._of_reference:
            self.reference_MB[microbatch] = log_probs_B
            return log_probs_B.new_zeros(())
        rewards_P2 = self.beta * (log_probs_B - self.reference_MB[microbatch]).view(-1, 2)
        margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        with torch.no_grad():
            pairs = torch.cat((rewards_P2, (margins_P > 0).to(rewards_P2.dtype)[:, None]), 1)
            self.sums += pairs.sum(0) / self.ranks
        return -F.logsigmoid(margins_P).sum() * (self.factor / self.ranks)
