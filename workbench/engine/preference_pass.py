"""Passes of direct preference optimization: the pairs' loss in a session, and its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from workbench.adapters.lora_linear import adapters_disabled
from workbench.engine.step_observer import NullObserver, Observer
from workbench.models.preference.preference_loss import PreferenceLoss
from workbench.parallel.context.apply_context import sum_sequence_parts
from workbench.parallel.mesh import Mesh
from workbench.parallel.pipeline.schedule_executor import ScheduleExecutor
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.stage_replicas import BatchShare
from workbench.vocabulary import REWARDS


class PreferencePass:
    """Pairs' losses in the passes of a session, and the passes of their reference: the weights as
    they are with adapters off, or what was computed beforehand (`needs_reference_table`).

    Args:
        plan: The plan.
        loss: Of this rank's pairs; the head calls it.
    """

    def __init__(self, plan: ResolvedPlan, loss: PreferenceLoss) -> None:
        self.loss = loss
        self._known = needs_reference_table(plan)

    def start(
        self,
        executor: ScheduleExecutor,
        own: tuple[Tensor, Tensor],
        factor: float = 1.0,
        observer: Observer | None = None,
    ) -> None:
        """Before the policy's pass: run the reference's, unless it is known beforehand.

        Args:
            executor: As in `run_reference`.
            own: As in `run_reference`.
            factor: Of the losses.
            observer: As in `run_reference`.
        """
        if not self._known:
            self.run_reference(executor, own, observer)
        self.loss.start(factor)

    def run_reference(
        self,
        executor: ScheduleExecutor,
        own: tuple[Tensor, Tensor],
        observer: Observer | None = None,
    ) -> Tensor:
        """Log-probabilities of the sequences [M, B] by a forward pass with adapters off, without
        gradients, which are the loss' reference then; zero on stages without the head.

        Args:
            executor: Runs this rank's stages.
            own: Tokens and targets [M, B, T], this rank's part of the sequences.
            observer: Observes each action as one of the reference.
        """
        watch = observer or NullObserver()
        with self.loss.reference_pass(), evaluating(executor.stages), adapters_disabled():
            executor.evaluate(*own, lambda label, action: watch.action("REFERENCE", None))
        return self.loss.reference_MB

    def values(self, scale: Tensor | float) -> Tensor:
        """This rank's summands of the means over the step's pairs of `preference_loss.METRICS`, in
        the scale of the loss: `scale` is what the losses of tokens are multiplied by.
        """
        return self.loss.sums * (self.loss.factor * scale)


def preference_pass(
    plan: ResolvedPlan, mesh: Mesh, share: BatchShare, device: torch.device, dtype: torch.dtype
) -> PreferencePass | None:
    """The pass of a rank's pairs; None where the plan trains on tokens.

    Args:
        plan: The plan.
        mesh: This rank's place.
        share: Its sequences of a step.
        device: Its device.
        dtype: Of its parameters.
    """
    if plan.finetune is None or plan.finetune.preference is None:
        return None
    loss = PreferenceLoss(
        plan.finetune.preference.beta,
        share.microbatches,
        share.sequences,
        torch.promote_types(dtype, torch.float32),
        device,
        partial(sum_sequence_parts, axis=mesh["context"]),
        mesh["context"].size,
    )
    return PreferencePass(plan, loss)


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
