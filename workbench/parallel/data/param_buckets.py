"""Buckets of parameters and gradients, each as ZeRO's stage and offload keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parallel.data.flat_buckets import (
    BucketLayout,
    ReductionAxes,
    buckets_by_size,
    buckets_by_unit,
)
from workbench.parallel.data.gradient_reduction import AccumulatedGrads, ShardedGrads
from workbench.parallel.data.offload.offloaded_grads import OffloadedGrads
from workbench.parallel.data.sharded_params import ParamInit, ReplicatedParams, ShardedParams
from workbench.parallel.data.tiled_linear import unit_of_tile
from workbench.parallel.layout import Layout
from workbench.plan.schema import Data
from workbench.runtime_facts.offload_sizes import HostShare


@dataclass
class ParamBucket:
    """Parameters and gradients of one flat bucket."""

    params: ReplicatedParams | ShardedParams
    grads: AccumulatedGrads | ShardedGrads
    on_host: bool
    """Whether its optimizer states are in host memory."""
    num_pending: int
    """Number of gradients that the current backward has not accumulated yet."""


def bucket_names(
    layouts: dict[str, Layout],
    sums: ReductionAxes,
    plan: Data,
    dtype: torch.dtype,
    separate: str | None,
) -> Iterator[list[str]]:
    """Names of the parameters of each of a stage's buckets, in the order of backward.

    Args:
        layouts: The stage's parameters, before ZeRO shards them.
        sums: Local parameter name -> the axes its gradient is summed over.
        plan: The plan's data parallelism.
        dtype: Of gradients, which `bucket_mib` is measured in.
        separate: Local name of a parameter that gets a bucket of its own.
    """
    if plan.zero == 3:
        return buckets_by_unit(layouts, sums, _unit_of, separate)
    max_numel = plan.bucket_mib * 2**20 / dtype.itemsize
    return buckets_by_size(layouts, sums, max_numel, separate if plan.zero else None)


def _unit_of(name: str) -> str:
    """The ZeRO-3 unit of a parameter: the embedding, a block, or the final norm with the head; of
    a tile, itself.
    """
    if tile := unit_of_tile(name):
        return tile
    first, second, *_ = (*name.split("."), "")
    return {"blocks": second, "embedding": first}.get(first, "head")


class BucketMaker:
    """Makes one bucket after another.

    Args:
        plan: The plan's data parallelism.
        shards_gradients: Whether each microbatch's gradients are reduce-scattered.
        dtype: Of gradients.
        init: Where parameters live, and what they start from.
        separate: Local name of a tied weight, to whose gradient another pipeline stage adds.
        before_leaving: Called with a shard of gradients that is final, before it leaves.
    """

    def __init__(
        self,
        plan: Data,
        shards_gradients: bool,
        dtype: torch.dtype,
        init: ParamInit,
        separate: str | None,
        before_leaving: Callable[[BucketLayout, Tensor], None],
    ) -> None:
        self._plan, self._dtype, self._init = plan, dtype, init
        self._shards_gradients = shards_gradients
        self._separate, self._before_leaving = separate, before_leaving
        self._host_share = HostShare(plan.offload_ratio)

    def make(self, layout: BucketLayout, layouts: dict[str, Layout]) -> ParamBucket:
        """The bucket of a layout; `layouts` are of its parameters, before ZeRO shards them."""
        params = self._params(layout, layouts, self._init)
        on_host = self._plan.offload != "none" and self._host_share.takes(layout.numel)
        grads = self._grads(layout, on_host)
        return ParamBucket(params, grads, on_host, num_pending=len(params.parameters))

    def frozen(
        self, layout: BucketLayout, layouts: dict[str, Layout], init: ParamInit
    ) -> ReplicatedParams | ShardedParams:
        """The bucket of parameters without gradients: without optimizer states either, only its
        parameters can be in host memory.
        """
        params = self._params(layout, layouts, init)
        for parameter in params.parameters.values():
            parameter.requires_grad_(False)
        return params

    def _params(
        self, layout: BucketLayout, layouts: dict[str, Layout], init: ParamInit
    ) -> ReplicatedParams | ShardedParams:
        if self._plan.zero == 3:
            return ShardedParams(layout, layouts, init, self._plan.offload == "parameters")
        return ReplicatedParams(layout, layouts, init)

    def _grads(self, layout: BucketLayout, on_host: bool) -> AccumulatedGrads | ShardedGrads:
        device = self._init.device
        if not self._shards_gradients:
            return AccumulatedGrads(layout, self._dtype, device)
        # To a tied weight's another stage adds, and what is partial is summed once a step.
        stays = bool(layout.partial_axes) or self._separate in layout.shapes
        if stays or not on_host:
            return ShardedGrads(layout, self._dtype, device)
        return OffloadedGrads(layout, self._dtype, device, self._init.copies, self._before_leaving)
