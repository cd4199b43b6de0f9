"""Training session of one rank, built from a plan, and its optimizer step.

The worker, the rehearsal and `verify` all build this session: what is verified is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engine.kernel_warm_up import compile_kernels
from workbench.engine.optimizer.delayed_update import DelayedUpdate
from workbench.engine.optimizer.loss_scaler import LossScaler, found_inf
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.engine.precision import plan_dtypes
from workbench.engine.preference_pass import (
    PreferencePass,
    evaluating,
    needs_reference_table,
    num_pairs,
    preference_pass,
)
from workbench.engine.source_losses import SequenceSources, SourceLosses
from workbench.engine.step_observer import NullObserver, Observer
from workbench.kernels.fused_seams import warm_up
from workbench.models.attention.packed_documents import document_starts
from workbench.models.counter_normal import NormalDrawer
from workbench.models.host_counts import CountReader, start_reading
from workbench.parallel.apply_strategy import parallelize
from workbench.parallel.context.apply_context import local_tokens
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.mesh import TIED_AXIS, Mesh
from workbench.parallel.parallel_model import ParallelModel, StagePlacement
from workbench.parallel.pipeline.schedule_executor import ExecutorHooks, ScheduleExecutor
from workbench.parallel.pipeline.stage_transfers import sum_tied_gradient
from workbench.parallel.tensor.apply_tensor import boundary_shape, counts_own_loss
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import executed, pair_groups, transport
from workbench.plan.stage_replicas import BatchShare, batch_share
from workbench.schedules import Action, Table, send_ends


class StepResult(NamedTuple):
    """Scalars of a step, on the device and equal on every rank.

    `loss` is the mean over the step's tokens, or over its pairs, `gradient_norm` the global norm
    before clipping, `stop` the sum of the ranks' stop requests. With loss scaling, `loss_scale` is
    the scale of this step and `skipped` is 1 where gradients overflowed and the step was skipped.
    `parts` are each source's part of the loss (`SourceLosses`), or means over pairs. `own_loss`
    alone is this rank's: its part of `loss`, 0 where it counts none.
    """

    loss: Tensor
    gradient_norm: Tensor
    stop: Tensor
    loss_scale: Tensor | None = None
    skipped: Tensor | None = None
    parts: Tensor | None = None
    own_loss: Tensor | None = None


@dataclass
class Session:
    """Model stages, buffers, optimizer and schedule executor of one rank."""

    plan: ResolvedPlan
    mesh: Mesh
    device: torch.device
    part: ParallelModel
    optimizer: MixedPrecisionOptimizer
    executor: ScheduleExecutor
    share: BatchShare
    """The sequences of a step that this rank takes."""
    preference: PreferencePass | None = None
    """Where the plan trains on pairs."""
    scaler: LossScaler | None = None
    delayed: DelayedUpdate | None = None
    """Makes the update by the last step's gradients, where the plan delays it."""
    before_update: Callable[[], None] = lambda: None
    """Called in every step before parameters or optimizer state change."""
    on_result: Callable[[StepResult], None] = lambda result: None
    """Called likewise, with the step's scalars."""

    @classmethod
    def build(
        cls,
        plan: ResolvedPlan,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype | None = None,
        count_reader: CountReader = start_reading,
        model: nn.Module | None = None,
        drawer: type[NormalDrawer] | None = NormalDrawer,
    ) -> Session:
        """Build this rank's session.

        Args:
            plan: The plan.
            mesh: This rank's place in the mesh.
            device: Where parameters live.
            dtype: Overrides the plan's precision, for parameters and gradients (`verify`).
            count_reader: Tokens per expert where tensors have no values (rehearsal).
            model: The module of a plan whose model is Python, where it is already built.
            drawer: Draws initial weights. None leaves parameters zero, for a checkpoint or the
                caller to fill: optimizer state that copies them must then be filled too.

        Returns:
            The session, its parameters initialised unless `drawer` is None.
        """
        own, gradients = plan_dtypes(plan)
        own, gradients = (dtype or own), (dtype or gradients)
        share, (table, partition) = rank_share(plan, mesh), executed(plan)
        stages = table.stages_of(mesh["pipeline"].index)
        overlap = table.stages == 1 and not table.split
        place = StagePlacement(stages, partition, overlap, device, own, gradients)
        part = parallelize(plan, mesh, place, count_reader, model, drawer)
        optimizer = _optimizer(plan, part.store)
        boundary = boundary_shape(plan, share.sequences) if part.boundary is None else part.boundary
        empty = partial(torch.empty, boundary, dtype=own, device=device)
        executor = _executor(plan, mesh, table, part, empty, device)
        preference = preference_pass(plan, mesh, share, device, own)
        part.samples.preference = None if preference is None else preference.loss
        scaler = LossScaler(device) if own == torch.float16 else None
        delayed = None
        if plan.training.optimizer.delayed_update and part.store.host is not None:
            delayed = DelayedUpdate(optimizer, part.store.host)
        return cls(
            plan, mesh, device, part, optimizer, executor, share, preference, scaler, delayed
        )

    @property
    def first_stage(self) -> int:
        """The first of this rank's pipeline stages."""
        return min(self.part.stages)

    def warm_up(self) -> Iterator[str]:
        """Compile the plan's kernels before the first step; yields each name beforehand."""
        stages = list(self.part.stages.values())
        if self.device.type == "cpu":
            yield from warm_up(stages, plan_dtypes(self.plan)[0], self.share.sequences)
        else:
            own = self.plan.with_fields(**{"training.micro_batch": self.share.sequences})
            yield from compile_kernels(own, stages, self.device)

    def step(
        self,
        index: int,
        tokens_MBT: Tensor,
        targets_MBT: Tensor,
        observer: Observer | None = None,
        stop: int = 0,
        trained_tokens: int | None = None,
        sources: SequenceSources | None = None,
        starts_MBT: Tensor | None = None,
    ) -> StepResult:
        """Forward, backward and optimizer step on this data-parallel rank's microbatches.

        The loss is divided by the step's global number of tokens that have a target.
        Steps that loss scaling skips do not advance the learning-rate schedule, but do consume
        their batch (as Megatron-LM's `train_step` and Accelerate's scheduler do).

        Args:
            index: The step, from 0.
            tokens_MBT: Inputs [microbatches, B, sequence_length], this rank's B sequences of each
                of its microbatches.
            targets_MBT: Next tokens, same shape.
            observer: Observes the actions and moments of the step.
            stop: This rank's stop request; all ranks' are summed with the loss and gradient norm,
                in the same all-reduce.
            trained_tokens: Tokens of the global batch that have a target; None: all of them.
            sources: Of this rank's sequences, which are no pairs; then the loss of each source is
                summed with the rest, in the same all-reduce.
            starts_MBT: Index in its sequence of the first token of each token's document; None: a
                sequence is one document, or its targets say it (`document_starts`).

        Returns:
            Loss, gradient norm and summed stop requests of the whole job, not yet synchronised with
            the host.
        """
        watch = observer or NullObserver()
        t = self.plan.training
        if trained_tokens is None:
            trained_tokens = t.global_batch * t.sequence_length
        scale = self._loss_factor(trained_tokens)
        self._start(index, scale)
        self._find_documents(targets_MBT, starts_MBT)
        own = self._own(tokens_MBT, targets_MBT)
        if self.preference is not None:
            # The loss is a mean over pairs, where `scale` divides by tokens.
            of_pairs = trained_tokens / num_pairs(self.plan)
            self.preference.start(self.executor, own, of_pairs, watch)
        by_source = sources and SourceLosses(sources, self.part.samples, self.device)
        with nullcontext() if by_source is None else by_source.collected():
            loss = self.executor.step(*own, scale, watch.action)
        loss = self.part.aux_loss.added_to(loss)
        self._sum_tied_gradient()
        watch.moment("before_optimizer")
        with watch.action("CLIP", None):
            parts = by_source if self.preference is None else self.preference
            summed = None if parts is None else parts.values(scale)
            result = self._unscaled(*self._agree(loss, stop, summed))
            factor = gradient_factor(result, t.optimizer.clip)
        self.on_result(result)
        with watch.action("OPTIMIZER", None):
            self._update(index, factor, self._skipped(result))
        watch.moment("after_optimizer")
        return result

    def _loss_factor(self, trained_tokens: int) -> Tensor | float:
        """What losses are multiplied by before backward; gradients are not scaled after it, so that
        every axis only sums.
        """
        # No token has a target where every document has one token.
        factor = 1.0 / max(1, trained_tokens)
        return factor if self.scaler is None else self.scaler.scale * factor

    def _start(self, index: int, scale: Tensor | float) -> None:
        """Start a step, and with it the delayed update by the last one's gradients."""
        self.part.store.zero_grads()
        if self.delayed is not None:
            self.before_update()
            self.delayed.start()
        self.part.aux_loss.start(scale)
        first = index * self.plan.training.global_batch + self.share.first
        self.part.samples.start_step(first, self.share.stride)

    def _update(self, index: int, factor: Tensor | None, skipped: Tensor | None) -> None:
        """Step the optimizer, or hold this step's gradients for the delayed update."""
        store = self.part.store
        store.copy_grads_to_host()
        self.before_update()
        scheduled = index - (self.scaler.skipped if self.scaler else 0)
        if self.delayed is None:
            self.optimizer.step(scheduled, factor, skipped, store.start_upload)
        else:
            self.delayed.finish()
            self.delayed.hold(scheduled, factor, skipped)
        store.gather_updated_params()

    def _sum_tied_gradient(self) -> None:
        """Tied embedding and head on different stages are two copies of one parameter: the sum of
        their gradients is the gradient of both.
        """
        name = self.part.tied_across_stages
        store, axis = self.part.store, self.mesh["pipeline"]
        if name is None or (gradient := store.gradients.get(name)) is None:
            return  # not tied, or a shard of none of it
        if TIED_AXIS not in self.mesh.axes:
            # Ranks with the same index of the data axis have the same shard.
            homes = self.executor.table.placement
            other = homes[0] if axis.index == homes[-1] else homes[-1]
            return sum_tied_gradient(gradient, axis, ([axis.index], [other]))
        axis, own = self.mesh[TIED_AXIS], self.mesh["replicas"].size
        cut = own if self.first_stage == 0 else axis.size - own
        first, last = range(cut), range(cut, axis.size)
        numel = math.prod(replace(store.layouts[name], flat=None).local_shape)
        sharded = numel if self.plan.strategy.data.zero else None
        ends = (first, last) if axis.index < cut else (last, first)
        return sum_tied_gradient(gradient, axis, ends, sharded)

    def _unscaled(
        self, loss: Tensor, norm: Tensor, stop: Tensor, parts: Tensor | None, own_loss: Tensor
    ) -> StepResult:
        """Divide loss and norm by the loss scale, and update the scale for the next step."""
        if self.scaler is None:
            return StepResult(loss, norm, stop, parts=parts, own_loss=own_loss)
        scale, skipped = self.scaler.scale.clone(), found_inf(norm)
        self.scaler.update(skipped)
        parts = None if parts is None else parts / scale
        return StepResult(loss / scale, norm / scale, stop, scale, skipped, parts, own_loss)

    def _skipped(self, result: StepResult) -> Tensor | None:
        """1 where the update must change nothing; None where `on_result` would have ended it. A
        GPU's host reads the scalars later, and must find the parameters as they were.
        """
        if result.skipped is None and self.device.type == "cuda":
            return found_inf(result.gradient_norm)
        return result.skipped

    def _find_documents(self, targets_MBT: Tensor, starts_MBT: Tensor | None) -> None:
        """Tell the stages where the documents of their microbatches start."""
        if self.plan.corpus.separate_documents:
            found = document_starts(targets_MBT) if starts_MBT is None else starts_MBT
            self.part.samples.starts_of_step = found

    def _own(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the sequences, along the context axis."""
        return local_tokens(
            tokens_MBT, targets_MBT, self.mesh["context.ring"], self.mesh["context.ulysses"]
        )

    def _agree(
        self, loss: Tensor | None, stop: int, parts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Loss, gradient norm, stop requests and parts of the loss, of the job, by one all-reduce
        of 3 scalars and one a part; and this rank's own loss.

        A rank contributes the squares of the gradients that it owns (each global entry once), and
        its loss where its stage has the head.
        """
        square = self.part.store.square_norm()
        counts = loss is not None and counts_own_loss(self.mesh)
        own_loss = (
            loss.to(square.dtype) if counts and loss is not None else torch.zeros_like(square)
        )
        both = torch.stack((own_loss, square, torch.full_like(square, float(stop))))
        if parts is not None:
            both = torch.cat((both, parts.to(square.dtype) * counts))
        if self.mesh.world_size > 1:
            dist.all_reduce(both)
        summed = None if parts is None else both[3:]
        return both[0], both[1].sqrt(), both[2], summed, own_loss

    def evaluate(
        self, tokens_MBT: Tensor, targets_MBT: Tensor, starts_MBT: Tensor | None = None
    ) -> Tensor | None:
        """Summed loss of this rank's microbatches, without backward; of pairs, the `sums` of
        `preference` then have their rewards.

        Args:
            tokens_MBT: Inputs, as in `step`.
            targets_MBT: Next tokens, same shape.
            starts_MBT: As in `step`.

        Returns:
            A scalar; None on stages without the head.
        """
        self._find_documents(targets_MBT, starts_MBT)
        own = self._own(tokens_MBT, targets_MBT)
        if self.preference is not None:
            self.preference.start(self.executor, own)
        with evaluating(self.part.stages):
            return self.executor.evaluate(*own)

    def reference_log_probs(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> Tensor:
        """Log-probabilities of this rank's sequences [M, B] under a preference's reference: the
        weights as they are, with adapters off; zero on stages without the head.
        """
        assert self.preference is not None, "the plan trains on no pairs"
        own = self._own(tokens_MBT, targets_MBT)
        return self.preference.run_reference(self.executor, own).clone()

    def set_reference(self, log_probs_MB: Tensor) -> None:
        """Set the log-probabilities [M, B] of the next step's, or evaluation's, sequences under a
        preference's reference, where they are known beforehand (`needs_reference_table`).
        """
        assert self.preference is not None, "the plan trains on no pairs"
        self.preference.loss.reference_MB.copy_(log_probs_MB)


def rank_share(plan: ResolvedPlan, mesh: Mesh) -> BatchShare:
    """The sequences of a step that a rank takes."""
    return batch_share(plan, mesh["data"].index, mesh["data"].size)


def initial_drawer(
    plan: ResolvedPlan, drawer: type[NormalDrawer] = NormalDrawer
) -> type[NormalDrawer] | None:
    """What draws the initial weights of a run; None where it loads a checkpoint or weights, which
    fill every parameter.

    Of adapters a checkpoint holds nothing else: a frozen base is drawn again where it was drawn. So
    are the weights that a preference's reference is, where they are trained.
    """
    base = plan.finetune and plan.finetune.base
    if plan.lora:
        return drawer if base is None or plan.checkpoint.load is None else None
    loads_all = plan.checkpoint.load is not None and not needs_reference_table(plan)
    return drawer if base is None and not loads_all else None


def _optimizer(plan: ResolvedPlan, store: ParamAndGradStore) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(
        store.values,
        store.optimizer_gradients,
        store.layouts,
        plan.training.optimizer,
        plan.training.steps,
        plan.strategy.kernels,
        store.host,
    )


def _executor(
    plan: ResolvedPlan,
    mesh: Mesh,
    table: Table,
    part: ParallelModel,
    empty_boundary: Callable[[], Tensor],
    device: torch.device,
) -> ScheduleExecutor:
    """What runs the schedule's `table` on a rank's stages."""
    store, pipeline = part.store, mesh["pipeline"]
    on_cuda = device.type == "cuda"
    hooks = ExecutorHooks(
        store.reduce,
        store.expect_last_backward,
        store.accumulate,
        store.accumulate_product,
        part.samples.start_microbatch,
        None if on_cuda else _sends_end(plan, table, pipeline.index),
    )
    return ScheduleExecutor(table, part.stages, pipeline, empty_boundary, hooks, unsplit=part.head)


def gradient_factor(result: StepResult, clip: float | None) -> Tensor | None:
    """Unscaling and clipping as one factor for the optimizer; None: neither."""
    factor = clip_factor(result.gradient_norm, clip)
    if result.loss_scale is None:
        return factor
    return (1.0 if factor is None else factor) / result.loss_scale


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """Factor that clips the global gradient norm to `limit`: a scalar tensor; None without limit.

    Same formula as `torch.nn.utils.clip_grad_norm_`, its epsilon included.
    """
    return None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def _sends_end(plan: ResolvedPlan, table: Table, rank: int) -> dict[Action, int]:
    return send_ends(table, rank, transport(plan.gpu), pair_groups(plan))
