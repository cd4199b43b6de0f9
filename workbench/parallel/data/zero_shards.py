"""ZeRO: a rank's parameter and gradient buffers, as data parallelism shards and reduces them.

What each stage of `data.zero` shards (Rajbhandari et al. 2020, arXiv 1910.02054):

- 0: nothing. Gradients are all-reduced, and every rank steps all parameters.
- 1: optimizer states. Gradients are reduced, each rank steps its shard of the flat buckets, and an
  all-gather brings the updated parameters.
- 2: gradients too, if `data.reduce` is microbatch, or the step has one: each microbatch's are
  reduce-scattered.
- 3: parameters too (FSDP): they are all-gathered unit by unit, `zero3_gather` says when.

With a shard group smaller than data parallelism (hybrid sharding, HSDP), shards are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from workbench.parallel.data.data_collectives import start_all_reduce
from workbench.parallel.data.flat_buckets import BucketLayout, ReductionAxes, bucket_layout
from workbench.parallel.data.gradient_norm import GradientNorm
from workbench.parallel.data.gradient_reduction import PendingReduction
from workbench.parallel.data.offload.offloaded_grads import OffloadedGrads
from workbench.parallel.data.offload.zero_offload import HostShards
from workbench.parallel.data.param_buckets import BucketMaker, ParamBucket, bucket_names
from workbench.parallel.data.sharded_params import ParamInit, ReplicatedParams, ShardedParams
from workbench.parallel.data.tile_gather import TileGatherer
from workbench.parallel.data.tiled_linear import TileAccess, TiledLinear
from workbench.parallel.data.zero3_gather import StageGatherer, UnitGatherer
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh
from workbench.plan.schema import Data


class ParamAndGradStore:
    """All parameters and gradients of a rank, accumulated, reduced and sharded by ZeRO.

    Attributes, each by local parameter name:
        values: What the optimizer steps: this rank's shards of flat buckets from ZeRO-1 up, on the
            host under offload.
        gradients: The shards of gradients, reduced after `reduce`; on the host those that left as
            they were made.
        optimizer_gradients: What the optimizer reads: `gradients`, or their host copies.
        layouts: Where `values` lie in the global tensors.
        frozen_values, frozen_layouts: The same of parameters without gradients, which are not in
            `values`: a fine-tuned model's base beside adapters.

    Args:
        models: This rank's stages, on the meta device; their parameters are replaced.
        layouts: Local parameter name -> its layout before ZeRO shards it.
        sums: Local parameter name -> the axes its gradient is summed over.
        shards_gradients: Whether each microbatch's are reduce-scattered.
        dtype: Of accumulated gradients; also what `bucket_mib` is measured in.
        init: Gives the initial values of a rank's shards.
        overlap: Whether a bucket's reduction starts as soon as the last backward has accumulated
            its gradients, overlapped with the rest of that backward; otherwise after the backward.
        separate: Local name of a parameter that gets a bucket of its own: a tied weight, whose
            gradient another pipeline stage adds to.
        loads_frozen: Whether frozen parameters are loaded, and need no initial values.
    """

    def __init__(
        self,
        models: Mapping[int, nn.Module],
        layouts: dict[str, Layout],
        sums: ReductionAxes,
        mesh: Mesh,
        plan: Data,
        shards_gradients: bool,
        dtype: torch.dtype,
        init: ParamInit,
        overlap: bool,
        separate: str | None,
        loads_frozen: bool = False,
    ) -> None:
        self.plan, self.overlap, self._separate = plan, overlap, separate
        self._copies = init.copies
        self.buckets: dict[int, list[ParamBucket]] = {}
        self.frozen: dict[int, list[ReplicatedParams | ShardedParams]] = {}
        """Buckets of parameters without gradients of each stage."""
        maker = BucketMaker(plan, shards_gradients, dtype, init, separate, self._add_to_norm)
        materialized: dict[int, nn.Parameter] = {}
        frozen_init = replace(init, fill=None) if loads_frozen else init
        for stage, model in models.items():
            meta = {n: p for n, p in model.named_parameters() if id(p) not in materialized}
            own = {name: layouts[name] for name, p in meta.items() if p.requires_grad}
            self.buckets[stage] = [
                maker.make(bucket_layout(names, own, sums, mesh, plan.zero), own)
                for names in bucket_names(own, sums, plan, dtype, separate)
            ]
            frozen = {name: layouts[name] for name, p in meta.items() if not p.requires_grad}
            over = {name: sums[name][-1:] for name in frozen}
            self.frozen[stage] = [
                maker.frozen(
                    bucket_layout(names, frozen, over, mesh, plan.zero), frozen, frozen_init
                )
                for names in bucket_names(frozen, over, plan, dtype, None)
            ]
            for params in (*(b.params for b in self.buckets[stage]), *self.frozen[stage]):
                materialized |= {id(meta[n]): p for n, p in params.parameters.items()}
        for model in models.values():
            _replace_parameters(model, materialized)
        self._register_shards(layouts, init)
        self._norm = GradientNorm(
            self.layouts, mesh, init.dtype == torch.float16, init.device, dtype
        )
        self._register_grad_hooks()
        self._install_gatherers(models)
        self._in_flight: list[PendingReduction] = []
        self._updated: set[int] = set()
        """Ids of the parameters whose all-gather after this step has been started."""
        self._last_backward: set[int] = set()
        """Stages whose next backward is their last of the step."""
        self._next_bucket = dict.fromkeys(self.buckets, 0)
        """Stage -> the first of its buckets that is not yet reduced after this backward."""
        if init.fill is not None:
            self.gather_params()

    def _add_to_norm(self, layout: BucketLayout, shard: Tensor) -> None:
        self._norm.add(layout.shard_views(shard))

    def _register_shards(self, layouts: dict[str, Layout], init: ParamInit) -> None:
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.layouts: dict[str, Layout] = {}
        for bucket in self._all_buckets():
            layout = bucket.params.layout
            self.values |= layout.shard_views(bucket.params.shard)
            self.gradients |= layout.shard_views(bucket.grads.shard)
            self.layouts |= layout.shard_layouts(layouts)
        self.frozen_values: dict[str, Tensor] = {}
        self.frozen_layouts: dict[str, Layout] = {}
        for params in self._all_frozen():
            self.frozen_values |= params.layout.shard_views(params.shard)
            self.frozen_layouts |= params.layout.shard_layouts(layouts)
        self.optimizer_gradients = self.gradients
        self.host: HostShards | None = None
        if self.plan.offload != "none":
            shards = [(b.params, b.grads) for b in self._all_buckets() if b.on_host]
            self.host = HostShards(shards, init.device, self._copies, init.master, init.delayed)
            self.values |= self.host.values
            self.optimizer_gradients = self.gradients | self.host.gradients

    def _register_grad_hooks(self) -> None:
        """Let autograd accumulate into the flat buffers where it can, and hook the rest.

        Autograd adds in place to a `parameter.grad` of the parameter's dtype. A gradient that is
        accumulated in another dtype, or that has no buffer yet, is taken by the hook.
        """
        self._bucket_of: dict[int, tuple[int, ParamBucket, str]] = {}
        for stage, own in self.buckets.items():
            for bucket in own:
                for name, parameter in bucket.params.parameters.items():
                    self._bucket_of[id(parameter)] = stage, bucket, name
                    view = bucket.grads.grad_view(name)
                    by_autograd = view is not None and view.dtype == parameter.dtype
                    parameter.grad = view if by_autograd else None
                    if self.overlap or not by_autograd:
                        parameter.register_post_accumulate_grad_hook(
                            partial(self._on_accumulated, stage, bucket, name)
                        )

    def _install_gatherers(self, models: Mapping[int, nn.Module]) -> None:
        self._gatherers: dict[int, StageGatherer | UnitGatherer] = {}
        params = [*(bucket.params for bucket in self._all_buckets()), *self._all_frozen()]
        sharded = {
            id(p): bucket
            for bucket in params
            if isinstance(bucket, ShardedParams)
            for p in bucket.parameters.values()
        }
        tiles = self._install_tile_gatherers(models, sharded)
        sharded = {key: bucket for key, bucket in sharded.items() if key not in tiles}
        for stage, model in models.items() if sharded else ():
            self._gatherers[stage] = (
                UnitGatherer(model, sharded, self.plan.keep_gathered, self.plan.in_flight - 1)
                if self.overlap
                else StageGatherer(model, sharded)
            )

    def _install_tile_gatherers(
        self, models: Mapping[int, nn.Module], sharded: Mapping[int, ShardedParams]
    ) -> set[int]:
        """Give tiled linears access to their tiles; returns the ids of these."""
        found: set[int] = set()
        for model in models.values():
            linears = [module for module in model.modules() if isinstance(module, TiledLinear)]
            if not linears:
                continue
            gatherer = TileGatherer(model, linears, sharded, self.plan.in_flight - 1)
            for linear in linears:
                linear.access = TileAccess(gatherer.gathered, self.accumulate_product)
                found |= {id(tile) for tile in linear.weight}
        return found

    def _all_buckets(self) -> Iterator[ParamBucket]:
        return (bucket for own in self.buckets.values() for bucket in own)

    def _all_frozen(self) -> Iterator[ReplicatedParams | ShardedParams]:
        return (params for own in self.frozen.values() for params in own)

    def zero_grads(self) -> None:
        """Zero all gradients at the start of a step."""
        self._norm.restart()
        for bucket in self._all_buckets():
            bucket.grads.zero()

    def expect_last_backward(self, stage: int) -> None:
        """Announce that the next backward of `stage` is its last of the step."""
        self._last_backward.add(stage)
        self._reset_pending(stage)

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a microbatch's gradient that autograd does not accumulate: a deferred W's bias."""
        stage, bucket, name = self._bucket_of[id(parameter)]
        bucket.grads.accumulate(name, gradient)
        self._on_gradient(stage, bucket)

    def accumulate_product(self, weight: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """Add a microbatch's gradient a b of a weight that autograd does not accumulate."""
        stage, bucket, name = self._bucket_of[id(weight)]
        bucket.grads.accumulate_product(name, a, b)
        self._on_gradient(stage, bucket)

    def reduce(self, stage: int) -> None:
        """Finish the reductions after a backward of `stage`; after its last one, reshard it."""
        self._start_reductions(stage, complete_only=False)
        while self._in_flight:
            self._advance(self._in_flight)
        self._reset_pending(stage)
        if stage in self._last_backward:
            self._last_backward.discard(stage)
            self._all_reduce_partial(stage)
            self._start_copies_to_host(stage)
            if stage in self._gatherers:
                self._gatherers[stage].reshard()

    def square_norm(self) -> Tensor:
        """This rank's share of the squared norm of the step's gradients, a scalar on the device;
        in fp16 not finite where one overflowed.
        """
        stayed = [b for b in self._all_buckets() if not isinstance(b.grads, OffloadedGrads)]
        own = (bucket.params.layout.shard_views(bucket.grads.shard) for bucket in stayed)
        return self._norm.square({name: view for views in own for name, view in views.items()})

    def copy_grads_to_host(self) -> None:
        """Before the optimizer's step: copy gradients to the host, under offload."""
        if self.host is not None:
            self.host.copy_grads_to_host()

    def wait_for_copies(self) -> None:
        """Let the host wait for what is on its way to it, before it reads `gradients`."""
        self._copies.synchronize()

    def start_upload(self, index: int) -> None:
        """Bring what the host has stepped of its bucket `index` to where it is used, and start its
        all-gather, while the host steps the next bucket (ZeRO-Offload, 2101.06840, section 4).
        """
        assert self.host is not None
        self._start_gather(self.host.params_of(index))

    def _start_gather(self, params: ReplicatedParams | ShardedParams) -> None:
        self._updated.add(id(params))
        with self._copies.copying() if self.host is not None else nullcontext():
            if self.host is not None:
                self.host.store_params(params)
            if isinstance(params, ReplicatedParams):
                params.start_all_gather()

    def gather_params(self) -> None:
        """After initialization or loading: as `gather_updated_params`, and frozen ones too."""
        self.gather_frozen()
        self.gather_updated_params()

    def gather_frozen(self) -> None:
        """All-gather the shards of frozen parameters that the other ranks have filled."""
        for params in self._all_frozen():
            if isinstance(params, ReplicatedParams):
                params.start_all_gather()
                params.wait_all_gather()

    def gather_updated_params(self) -> None:
        """After a step: all-gather the shards that the other ranks have filled
        or stepped, and wait for those that are under way.

        ZeRO-3 does not need it: it all-gathers parameters when they are next used.
        """
        params = [bucket.params for bucket in self._all_buckets()]
        for each in params:  # a bucket's all-gather runs beside the next one's copy
            if id(each) not in self._updated:
                self._start_gather(each)
        self._updated.clear()
        self._copies.copied()()
        for each in params:
            if isinstance(each, ReplicatedParams):
                each.wait_all_gather()

    def persistent(self) -> dict[str, list[Tensor]]:
        """Device buffers that live from step to step, by category of the memory frame."""
        params = [*(bucket.params for bucket in self._all_buckets()), *self._all_frozen()]
        return {
            "parameters": [p.persistent for p in params if not p.on_host],
            "gathered": [p.flat for p in params if isinstance(p, ShardedParams)],
            "gradients": [
                kept for b in self._all_buckets() if (kept := b.grads.persistent) is not None
            ],
        }

    def frozen_on_host(self) -> list[Tensor]:
        """Shards of frozen parameters that are in host memory (offload)."""
        return [params.shard for params in self._all_frozen() if params.on_host]

    def _on_accumulated(
        self, stage: int, bucket: ParamBucket, name: str, parameter: nn.Parameter
    ) -> None:
        if parameter.grad is None:  # a split backward has deferred it (W)
            return
        if parameter.grad is not bucket.grads.grad_view(name):
            bucket.grads.accumulate(name, parameter.grad)
            parameter.grad = None
        self._on_gradient(stage, bucket)

    def _on_gradient(self, stage: int, bucket: ParamBucket) -> None:
        if self.overlap and bucket.grads.should_reduce(stage in self._last_backward):
            bucket.num_pending -= 1
            self._start_reductions(stage, complete_only=True)

    def _all_reduce_partial(self, stage: int) -> None:
        """Sum shards over the axes along which they are partial, once a step.

        Reducing data parallelism first leaves only this rank's shard to all-reduce here.
        """
        for bucket in self.buckets[stage]:
            for axis in bucket.grads.layout.partial_axes:
                if wait := start_all_reduce(bucket.grads.shard, axis):
                    wait()

    def _start_copies_to_host(self, stage: int) -> None:
        """Under offload, of gradients that are final: all but a tied weight's, to which another
        stage adds.
        """
        for bucket in self.buckets[stage] if self.host is not None else ():
            if self.host is not None and self._separate not in bucket.params.parameters:
                self.host.start_copy_to_host(bucket.grads)

    def _reset_pending(self, stage: int) -> None:
        self._next_bucket[stage] = 0
        for bucket in self.buckets[stage]:
            bucket.num_pending = len(bucket.params.parameters)

    def _start_reductions(self, stage: int, complete_only: bool) -> None:
        """Start reducing buckets in their order: all that are left, or up to the first incomplete.

        The order is fixed, though a later bucket may be complete first: ranks must issue their
        collectives in the same order.
        """
        own, last = self.buckets[stage], stage in self._last_backward
        while self._next_bucket[stage] < len(own):
            bucket = own[self._next_bucket[stage]]
            if complete_only and bucket.num_pending:
                return
            self._next_bucket[stage] += 1
            if bucket.grads.should_reduce(last):
                # `in_flight` bounds the unsharded buffers alive at once: these, the one started
                # now, and the one that backward fills next.
                self._limit_in_flight(self.plan.in_flight - 2)
                reduction = bucket.grads.reduction(last)
                self._in_flight.append(PendingReduction(reduction, bucket.grads.is_chained))
                if self.plan.in_flight == 1:
                    self._limit_in_flight(0)

    def _limit_in_flight(self, limit: int) -> None:
        """Advance all chained reductions but the newest `limit`, so that they free their
        buffers.
        """
        chained = [reduction for reduction in self._in_flight if reduction.is_chained]
        self._advance(chained[: max(0, len(chained) - max(0, limit))])

    def _advance(self, reductions: list[PendingReduction]) -> None:
        for reduction in reductions:
            reduction.advance()
        self._in_flight = [reduction for reduction in self._in_flight if not reduction.done]


def _replace_parameters(model: nn.Module, materialized: Mapping[int, nn.Parameter]) -> None:
    """Replace meta parameters by the materialized ones, by id; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, materialized[id(parameter)])
