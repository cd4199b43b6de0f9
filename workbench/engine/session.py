"""A rank's part of a training job, built from a plan, and its step.

The worker, the rehearsal and the verification all build this, so that what is proved is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engine.loss_scaler import LossScaler, overflow, unowned
from workbench.engine.optimizer import Optimizer
from workbench.engine.precision import dtypes
from workbench.kernels.fused_seams import warm_up
from workbench.models.moe import CountReader, read_counts
from workbench.parallel.apply_strategy import ParallelModel, parallelize
from workbench.parallel.context.apply_context import local_tokens
from workbench.parallel.layout import square_norm
from workbench.parallel.mesh import Mesh
from workbench.parallel.pipeline.schedule_executor import ExecutorHooks, ScheduleExecutor
from workbench.parallel.pipeline.stage_transfers import sum_tied_gradient
from workbench.parallel.tensor.apply_tensor import boundary_shape, counts_own_loss
from workbench.plan.custom_schedule import executed
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.schedules import Action


class Observer(Protocol):
    """Watches a step without changing it: wraps every action, and is told of the moments of the
    memory vocabulary.
    """

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """Round one action of the schedule, or a named part of the step."""
        ...

    def moment(self, name: str) -> None:
        """Called when the step reaches a moment of `profile.MOMENTS`."""
        ...


class Unobserved:
    """Watches nothing."""

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """No wrapping."""
        return nullcontext()

    def moment(self, name: str) -> None:
        """Nothing."""


class StepResult(NamedTuple):
    """Scalars on the device, equal on every rank: mean loss over the step's tokens, the global
    gradient norm, the sum of all wishes to stop; where the loss is scaled, by what it was, and 1
    where the step was skipped for it.
    """

    loss: Tensor
    gradient_norm: Tensor
    stop: Tensor
    loss_scale: Tensor | None = None
    skipped: Tensor | None = None


@dataclass
class Session:
    """Everything a rank needs to train."""

    plan: ResolvedPlan
    mesh: Mesh
    device: torch.device
    part: ParallelModel
    optimizer: Optimizer
    executor: ScheduleExecutor
    scaler: LossScaler | None = None

    @classmethod
    def build(
        cls,
        plan: ResolvedPlan,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype | None = None,
        count_reader: CountReader = read_counts,
        model: nn.Module | None = None,
    ) -> Session:
        """Build this rank's part of a complete plan.

        `dtype` overrides the plan's precision (verification); `count_reader` says how many tokens an
        expert gets where tensors have no values (rehearsal); `model` is the module of a plan whose
        model is code, where it is built already.
        """
        own, gradients = dtypes(plan)
        own, gradients = (dtype or own), (dtype or gradients)
        t, pipeline = plan.training, mesh["pipeline"]
        table, partition = executed(plan)
        stages = table.stages_of(pipeline.index)
        overlap = table.stages == 1 and not table.split
        part = parallelize(
            plan, mesh, stages, partition, overlap, device, own, gradients, count_reader, model
        )
        store = part.store
        on_card = plan.gpu.device == "cuda" and plan.strategy.data.offload == "none"
        optimizer = Optimizer(
            store.values,
            store.optimizer_gradients,
            store.layouts,
            t.optimizer,
            t.steps,
            plan.strategy.kernels,
            on_card,
        )
        executor = ScheduleExecutor(
            table,
            part.stages,
            pipeline,
            partial(torch.empty, boundary_shape(plan), dtype=own, device=device),
            ExecutorHooks(
                store.reduce,
                store.expect_last_backward,
                store.accumulate,
                part.samples.start_microbatch,
            ),
            unsplit=part.head,
        )
        scaler = LossScaler(device) if own == torch.float16 else None
        return cls(plan, mesh, device, part, optimizer, executor, scaler)

    @property
    def first_stage(self) -> int:
        """The first of this rank's pipeline stages."""
        return min(self.part.stages)

    def warm_up(self) -> Iterator[str]:
        """Compile the plan's kernels before the first step, where that can be done apart; before
        each, its name.
        """
        if self.device.type == "cpu":
            yield from warm_up(
                self.part.stages.values(), dtypes(self.plan)[0], self.plan.training.micro_batch
            )

    def step(
        self,
        index: int,
        tokens_MBT: Tensor,
        targets_MBT: Tensor,
        observer: Observer | None = None,
        stop: int = 0,
    ) -> StepResult:
        """One optimizer step on this data-parallel rank's microbatches [M, B, T]; `index` counts
        from 0.

        Steps that loss scaling has skipped do not move the learning rate's schedule, the text goes
        on (as in Megatron-LM's `train_step` and Accelerate's scheduler). The loss is divided by the
        step's global number of valid tokens: text is packed, so all are valid. `stop` is what this
        rank asks of all (0: nothing); the sum of all wishes comes back with the step's reduction.
        """
        watch = observer or Unobserved()
        t = self.plan.training
        scale: Tensor | float = 1.0 / (t.global_batch * t.sequence_length)
        scale = scale if self.scaler is None else self.scaler.scale * scale
        self.part.store.zero_grads()
        self.part.aux_loss.start(scale)
        share = t.global_batch // self.mesh["data"].size
        self.part.samples.start_step(
            index * t.global_batch + self.mesh["data"].index * share, t.micro_batch
        )
        loss = self.executor.step(*self._own(tokens_MBT, targets_MBT), scale, watch.action)
        loss = self.part.aux_loss.added_to(loss)
        if self.part.tied_across_stages is not None:
            ends = self.executor.table.placement[0], self.executor.table.placement[-1]
            peer = ends[1] if self.mesh["pipeline"].index == ends[0] else ends[0]
            sum_tied_gradient(
                self.part.store.gradients[self.part.tied_across_stages], self.mesh["pipeline"], peer
            )
        watch.moment("before_optimizer")
        with watch.action("CLIP", None):
            result = self._unscaled(*self._agree(loss, stop))
            factor = clip_factor(result.gradient_norm, t.optimizer.clip)
            if result.loss_scale is not None:
                factor = (1.0 if factor is None else factor) / result.loss_scale
        with watch.action("OPTIMIZER", None):
            self.part.store.copy_grads_to_host()
            self.optimizer.step(
                index - (self.scaler.skipped if self.scaler else 0), factor, result.skipped
            )
            self.part.store.gather_updated_params()
        watch.moment("after_optimizer")
        return result

    def _unscaled(self, loss: Tensor, norm: Tensor, stop: Tensor) -> StepResult:
        """What all ranks agreed on, without the loss scale, which then goes on to the next
        step's.
        """
        if self.scaler is None:
            return StepResult(loss, norm, stop)
        scale, skipped = self.scaler.scale.clone(), overflow(norm)
        self.scaler.update(skipped)
        return StepResult(loss / scale, norm / scale, stop, scale, skipped)

    def _own(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> tuple[Tensor, Tensor]:
        """Of whole sequences, what this rank's place on the context axis sees."""
        return local_tokens(
            tokens_MBT, targets_MBT, self.mesh["context"], self.plan.strategy.context.algorithm
        )

    def _agree(self, loss: Tensor | None, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradient norm of the whole job, by one small sum over all ranks."""
        square = square_norm(self.part.store.gradients, self.part.store.layouts, self.mesh)
        if self.scaler is not None:
            square = square + unowned(self.part.store.gradients, self.part.store.layouts, self.mesh)
        read_counts = loss is not None and counts_own_loss(self.mesh)
        own_loss = (
            loss.to(square.dtype) if read_counts and loss is not None else torch.zeros_like(square)
        )
        both = torch.stack((own_loss, square, torch.full_like(square, float(stop))))
        if self.mesh.world_size > 1:
            dist.all_reduce(both)
        return both[0], both[1].sqrt(), both[2]

    def evaluate(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> Tensor | None:
        """Summed loss of this rank's microbatches without training on them; None where the head is
        not.
        """
        for model in self.part.stages.values():
            model.eval()
        loss = self.executor.evaluate(*self._own(tokens_MBT, targets_MBT))
        for model in self.part.stages.values():
            model.train()
        return loss


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """What to multiply gradients by so that their global norm is at most `limit`; a scalar, or
    None.
    """
    return None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
