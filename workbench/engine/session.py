"""Training session of one rank, built from a plan, and its optimizer step.

The worker, the rehearsal and `verify` all build this session: what is verified is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.adapters.lora_linear import adapters_disabled
from workbench.engine.kernel_warm_up import compile_kernels
from workbench.engine.optimizer.delayed_update import DelayedUpdate
from workbench.engine.optimizer.loss_scaler import LossScaler, found_inf
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.engine.precision import plan_dtypes
from workbench.engine.preference_pass import (
    evaluating,
    needs_reference_table,
    num_pairs,
    preference_loss,
)
from workbench.kernels.fused_seams import warm_up
from workbench.models.attention.packed_documents import document_starts
from workbench.models.counter_normal import NormalDrawer
from workbench.models.host_counts import CountReader, start_reading
from workbench.models.seams import token_losses_observed
from workbench.parallel.apply_strategy import ParallelModel, parallelize
from workbench.parallel.context.apply_context import local_tokens
from workbench.parallel.mesh import TIED_AXIS, Mesh
from workbench.parallel.pipeline.schedule_executor import ExecutorHooks, ScheduleExecutor
from workbench.parallel.pipeline.schedule_executor import Observer as ActionObserver
from workbench.parallel.pipeline.stage_transfers import sum_tied_gradient
from workbench.parallel.tensor.apply_tensor import boundary_shape, counts_own_loss
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import executed, pair_groups, transport
from workbench.plan.stage_replicas import BatchShare, batch_share
from workbench.schedules import Action, Table, send_ends


class Observer(Protocol):
    """Observes a step without changing it: wraps every action, and is called at each moment."""

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """A context around one action of the schedule, or around a named part of the step."""
        ...

    def moment(self, name: str) -> None:
        """Called when the step reaches a moment of `profile.MOMENTS`."""
        ...


class NullObserver:
    """An observer that does nothing."""

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        """No wrapping."""
        return nullcontext()

    def moment(self, name: str) -> None:
        """Nothing."""


class StepResult(NamedTuple):
    """Scalars of a step, on the device and equal on every rank.

    `loss` is the mean over the step's tokens, `gradient_norm` the global norm before clipping,
    `stop` the sum of the ranks' stop requests. With loss scaling, `loss_scale` is the scale of this
    step and `skipped` is 1 where gradients overflowed and the step was skipped. `by_source` is each
    source's part of the loss [sources], which without aux losses they add up to. Of pairs, `loss`
    is their mean, and `preference` the means of `preference_loss.METRICS`.
    """

    loss: Tensor
    gradient_norm: Tensor
    stop: Tensor
    loss_scale: Tensor | None = None
    skipped: Tensor | None = None
    by_source: Tensor | None = None
    preference: Tensor | None = None


class SequenceSources(NamedTuple):
    """Sources of a rank's sequences."""

    of_sequence: Sequence[Sequence[int]]
    """[microbatches, sequences]."""
    num_sources: int
    """Of the corpus."""


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
    scaler: LossScaler | None = None
    delayed: DelayedUpdate | None = None
    """Makes the update by the last step's gradients, where the plan delays it."""
    before_update: Callable[[], None] = lambda: None
    """Called in every step before parameters or optimizer state change."""

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
        t, pipeline = plan.training, mesh["pipeline"]
        share = rank_share(plan, mesh)
        table, partition = executed(plan)
        stages = table.stages_of(pipeline.index)
        overlap = table.stages == 1 and not table.split
        part = parallelize(
            plan,
            mesh,
            stages,
            partition,
            overlap,
            device,
            own,
            gradients,
            count_reader,
            model,
            drawer,
        )
        store = part.store
        optimizer = MixedPrecisionOptimizer(
            store.values,
            store.optimizer_gradients,
            store.layouts,
            t.optimizer,
            t.steps,
            plan.strategy.kernels,
            store.host,
        )
        executor = ScheduleExecutor(
            table,
            part.stages,
            pipeline,
            partial(
                torch.empty,
                boundary_shape(plan, share.sequences) if part.boundary is None else part.boundary,
                dtype=own,
                device=device,
            ),
            ExecutorHooks(
                store.reduce,
                store.expect_last_backward,
                store.accumulate,
                store.accumulate_product,
                part.samples.start_microbatch,
                None if device.type == "cuda" else _sends_end(plan, table, pipeline.index),
            ),
            unsplit=part.head,
        )
        part.samples.preference = preference_loss(plan, mesh, share, device, dtype)
        scaler = LossScaler(device) if own == torch.float16 else None
        delayed = None
        if t.optimizer.delayed_update and store.host is not None:
            delayed = DelayedUpdate(optimizer, store.host)
        return cls(plan, mesh, device, part, optimizer, executor, share, scaler, delayed)

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
            sources: Of this rank's sequences; then the loss of each source is summed with the
                rest, in the same all-reduce.
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
        # No token has a target where every document has one token.
        scale: Tensor | float = 1.0 / max(1, trained_tokens)
        scale = scale if self.scaler is None else self.scaler.scale * scale
        # The loss is scaled before backward, not the gradients after it: every axis then only sums.
        self.part.store.zero_grads()
        if self.delayed is not None:
            self.before_update()
            self.delayed.start()
        self.part.aux_loss.start(scale)
        self.part.samples.start_step(index * t.global_batch + self.share.first, self.share.stride)
        self._find_documents(targets_MBT, starts_MBT)
        own = self._own(tokens_MBT, targets_MBT)
        if (preference := self.part.samples.preference) is not None:
            self._take_reference(own, watch)
            preference.start(trained_tokens / num_pairs(self.plan))
        with nullcontext() if sources is None else self._observed_losses(tokens_MBT):
            loss = self.executor.step(*own, scale, watch.action)
        loss = self.part.aux_loss.added_to(loss)
        # Tied embedding and head on different stages are two copies of one parameter: the sum of
        # their gradients is the gradient of both.
        if self.part.tied_across_stages is not None:
            self._sum_tied_gradient(self.part.tied_across_stages)
        watch.moment("before_optimizer")
        with watch.action("CLIP", None):
            parts = None if sources is None else self._losses_by_source(sources) * scale
            if preference is not None:
                parts = preference.sums * (preference.factor * scale)
            result = self._unscaled(*self._agree(loss, stop, parts))
            if preference is not None:
                result = result._replace(by_source=None, preference=result.by_source)
            factor = clip_factor(result.gradient_norm, t.optimizer.clip)
            # Unscaling and clipping are one factor for the optimizer.
            if result.loss_scale is not None:
                factor = (1.0 if factor is None else factor) / result.loss_scale
        with watch.action("OPTIMIZER", None):
            self.part.store.copy_grads_to_host()
            self.before_update()
            update = index - (self.scaler.skipped if self.scaler else 0), factor, result.skipped
            if self.delayed is None:
                self.optimizer.step(*update, self.part.store.start_upload)
            else:
                self.delayed.finish()
                self.delayed.hold(*update)
            self.part.store.gather_updated_params()
        watch.moment("after_optimizer")
        return result

    def _sum_tied_gradient(self, name: str) -> None:
        store, axis = self.part.store, self.mesh["pipeline"]
        if (gradient := store.gradients.get(name)) is None:
            return  # a shard of none of it
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

    def _observed_losses(self, tokens_MBT: Tensor) -> AbstractContextManager[None]:
        samples = self.part.samples
        samples.losses_of_step = torch.zeros(
            tokens_MBT.shape[:2], dtype=torch.float32, device=self.device
        )
        return token_losses_observed(samples.add_token_losses)

    def _losses_by_source(self, sources: SequenceSources) -> Tensor:
        """This rank's summed losses of each source, [sources]."""
        losses_MB = self.part.samples.losses_of_step
        assert losses_MB is not None
        self.part.samples.losses_of_step = None
        of_sequence = torch.tensor(sources.of_sequence, device=self.device).flatten()
        sums = losses_MB.new_zeros(sources.num_sources)
        return sums.index_add(0, of_sequence, losses_MB.flatten())

    def _unscaled(
        self, loss: Tensor, norm: Tensor, stop: Tensor, by_source: Tensor | None
    ) -> StepResult:
        """Divide loss and norm by the loss scale, and update the scale for the next step."""
        if self.scaler is None:
            return StepResult(loss, norm, stop, by_source=by_source)
        scale, skipped = self.scaler.scale.clone(), found_inf(norm)
        self.scaler.update(skipped)
        by_source = None if by_source is None else by_source / scale
        return StepResult(loss / scale, norm / scale, stop, scale, skipped, by_source)

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Loss, gradient norm, stop requests, and losses by source or metrics of pairs, of the job:
        one all-reduce of 3 scalars and one a source or metric.

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
        return both[0], both[1].sqrt(), both[2], summed

    def evaluate(
        self, tokens_MBT: Tensor, targets_MBT: Tensor, starts_MBT: Tensor | None = None
    ) -> Tensor | None:
        """Summed loss of this rank's microbatches, without backward; of pairs, `sums` of the
        preference loss then has their rewards.

        Args:
            tokens_MBT: Inputs, as in `step`.
            targets_MBT: Next tokens, same shape.
            starts_MBT: As in `step`.

        Returns:
            A scalar; None on stages without the head.
        """
        self._find_documents(targets_MBT, starts_MBT)
        own = self._own(tokens_MBT, targets_MBT)
        if (preference := self.part.samples.preference) is not None:
            self._take_reference(own, NullObserver())
            preference.start()
        with evaluating(self.part.stages):
            return self.executor.evaluate(*own)

    def reference_log_probs(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> Tensor:
        """Log-probabilities of this rank's sequences [M, B] under a preference's reference: the
        weights as they are, with adapters off; zero on stages without the head.
        """
        return self._reference_pass(self._own(tokens_MBT, targets_MBT)).clone()

    def set_reference(self, log_probs_MB: Tensor) -> None:
        """Set the log-probabilities [M, B] of the next step's, or evaluation's, sequences under a
        preference's reference, where they are known beforehand (`needs_reference_table`).
        """
        preference = self.part.samples.preference
        assert preference is not None, "the plan trains on no pairs"
        preference.reference_MB.copy_(log_probs_MB)

    def _take_reference(self, own: tuple[Tensor, Tensor], watch: Observer) -> None:
        """Compute the preference's reference, unless it is known beforehand."""
        if needs_reference_table(self.plan):
            return
        self._reference_pass(own, lambda label, action: watch.action("REFERENCE", None))

    def _reference_pass(
        self, own: tuple[Tensor, Tensor], observe: ActionObserver | None = None
    ) -> Tensor:
        """Log-probabilities of the sequences [M, B] by a forward pass with adapters off, without
        gradients; it is the preference loss' reference then.
        """
        preference = self.part.samples.preference
        assert preference is not None, "the plan trains on no pairs"
        with preference.reference_pass(), evaluating(self.part.stages), adapters_disabled():
            self.executor.evaluate(*own, observe)
        return preference.reference_MB


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


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """Factor that clips the global gradient norm to `limit`: a scalar tensor; None without limit.

    Same formula as `torch.nn.utils.clip_grad_norm_`, its epsilon included.
    """
    return None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def _sends_end(plan: ResolvedPlan, table: Table, rank: int) -> dict[Action, int]:
    return send_ends(table, rank, transport(plan.gpu), pair_groups(plan))
