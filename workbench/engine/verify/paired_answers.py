"""Pairs of answers for a verification, and their loss on one device by plain operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.attention.soft_cap import soft_cap
from workbench.models.seams import IGNORE_INDEX, HeadLoss, at_least_fp32


def pair_up(tokens_ST: Tensor, targets_ST: Tensor, generator: torch.Generator) -> None:
    """Make random tokens [sequences, T] pairs, in place: the same prompt, and answers of different
    lengths, whose targets alone count.
    """
    length = tokens_ST.shape[1]
    for first in range(0, len(tokens_ST), 2):
        prompt = int(torch.randint(1, max(2, length // 2), (), generator=generator))
        tokens_ST[first + 1, :prompt] = tokens_ST[first, :prompt]
        targets_ST[first : first + 2, : prompt - 1] = IGNORE_INDEX
        for sequence in (first, first + 1):
            end = int(torch.randint(prompt, length + 1, (), generator=generator))
            targets_ST[sequence, end:] = IGNORE_INDEX


def answer_log_probs(head: HeadLoss, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Log-probability of each answer [B], by the logits of all tokens at once."""
    logits_BTV = at_least_fp32(soft_cap(F.linear(x_BTD, head.weight), head.softcap))
    of_token = logits_BTV.log_softmax(-1).gather(-1, targets_BT.clamp(min=0)[..., None])[..., 0]
    return (of_token * (targets_BT != IGNORE_INDEX)).sum(1)


class EagerPairs:
    """Takes the place of a head's forward: the DPO loss as the paper writes it (2305.18290, 7).

    Args:
        head: The head.
        beta: Of the loss.

    Attributes:
        factor: Of the loss.
        reference: Log-probabilities of all answers seen since `record`, in order.
    """

    def __init__(self, head: HeadLoss, beta: float) -> None:
        self.head, self.beta, self.factor = head, beta, 1.0
        self.reference: list[Tensor] = []
        self.recording = False
        head.forward = self.forward  # type: ignore[method-assign, assignment]

    def record(self, reference_pass: Callable[[], object]) -> None:
        """Take as the reference what the head sees in `reference_pass`."""
        self.reference, self.recording = [], True
        with torch.no_grad():
            reference_pass()
        self.recording = False

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Summed loss of the pairs."""
        policy_B = answer_log_probs(self.head, x_BTD, targets_BT)
        if self.recording:
            self.reference.append(policy_B)
            return policy_B.new_zeros(())
        ratio_B = policy_B - self.reference.pop(0)
        margin_P = self.beta * (ratio_B[::2] - ratio_B[1::2])
        return -torch.log(torch.sigmoid(margin_P)).sum() * self.factor
