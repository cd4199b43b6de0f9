"""Passes of direct preference optimization: the pairs' loss in a session, and its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from workbench.engine.precision import plan_dtypes
from workbench.models.preference.preference_loss import PreferenceLoss
from workbench.parallel.context.apply_context import sum_sequence_parts
from workbench.parallel.mesh import Mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.stage_replicas import BatchShare
from workbench.vocabulary import REWARDS


def preference_loss(
    plan: ResolvedPlan,
    mesh: Mesh,
    share: BatchShare,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> PreferenceLoss | None:
    """The loss of a rank's pairs; None where the plan trains on tokens.

    Args:
        plan: The plan.
        mesh: This rank's place.
        share: Its sequences of a step.
        device: Its device.
        dtype: Of parameters, in place of the plan's precision (`verify`).
    """
    if plan.finetune is None or plan.finetune.preference is None:
        return None
    own, context = dtype or plan_dtypes(plan)[0], mesh["context"]
    return PreferenceLoss(
        plan.finetune.preference.beta,
        share.microbatches,
        share.sequences,
        torch.promote_types(own, torch.float32),
        device,
        partial(sum_sequence_parts, axis=context),
        context.size,
    )


def num_pairs(plan: ResolvedPlan) -> int:
    """Pairs of a global batch."""
    return plan.training.global_batch // 2


def reward_record(values: list[float]) -> dict[str, float]:
    """Fields of a step's record, by means over its pairs of `preference_loss.METRICS`."""
    chosen, rejected, accuracy = values
    return dict(zip(REWARDS, (chosen, rejected, chosen - rejected, accuracy), strict=True))


@contextmanager
def evaluating(stages: Mapping[int, nn.Module]) -> Iterator[None]:
    """Within it the stages are in evaluation mode: without dropout and aux losses."""
    for stage in stages.values():
        stage.eval()
    try:
        yield
    finally:
        for stage in stages.values():
            stage.train()


def needs_reference_table(plan: ResolvedPlan) -> bool:
    """Whether the reference's log-probabilities are computed before the first step: its weights are
    those that are trained, which no step leaves as they are.
    """
    tune = plan.finetune
    return tune is not None and tune.preference is not None and tune.method == "full"


class ReferenceTable:
    """Log-probabilities of pairs under the weights that training starts from, in host memory.

    It takes 4 bytes a sequence, and a forward pass of each batch before the first step.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[str, int, int | None], Tensor] = {}

    def put(self, part: str, batch: int, log_probs_MB: Tensor, source: int | None = None) -> None:
        """Keep those of a batch of the training pairs ("train") or of held-out ones ("holdout")."""
        self._of[part, batch, source] = log_probs_MB.detach().to("cpu", copy=True)

    def get(self, part: str, batch: int, source: int | None = None) -> Tensor:
        """Those of a batch, [M, B]."""
        return self._of[part, batch, source]
